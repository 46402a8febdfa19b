"""The campaign's tasks on disk: train, probe and dev beside the campaign, sealed outside it and for nobody's eyes."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.yaml_io import explain
from evo_hpc.domains.base import Domain, get_domain, read_tasks, task_set_hash, tasks_to_jsonl
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json, write_bytes, write_json


class BadTasks(UserError):
    """The tasks on disk are not those that campaign.yaml describes."""


def domain_of(paths: CampaignPaths, campaign: Campaign) -> tuple[Domain, Any]:
    """The domain and its validated settings. Raises UserError with file and line."""
    domain = get_domain(campaign.domain.name)
    try:
        return domain, domain.config_type.model_validate(campaign.domain.config)
    except ValidationError as error:
        raise BadTasks(explain(paths.campaign_yaml, domain.config_type, error, ("domain", "config"))) from error


def make_tasks(paths: CampaignPaths, campaign: Campaign) -> dict[str, int]:
    """Write every split and, last, the manifest; returns how many tasks each has. The same settings give the same files."""
    domain, config = domain_of(paths, campaign)
    splits = domain.make_tasks(config)
    for split in ("train", "probe", "dev"):
        write_bytes(paths.tasks(split), tasks_to_jsonl(splits[split]).encode())
    sealed = task_set_hash(splits["sealed"])
    if splits["sealed"]:
        write_bytes(paths.workspace.sealed_tasks(sealed), tasks_to_jsonl(splits["sealed"]).encode(), mode=0o600)
    write_json(paths.tasks_manifest, {
        "schema_version": 1, "domain": campaign.domain.model_dump(mode="json"),
        "splits": {split: {"tasks": len(tasks), "task_set": task_set_hash(tasks)} for split, tasks in splits.items()},
    })
    return {split: len(tasks) for split, tasks in splits.items()}


def check_tasks(paths: CampaignPaths, campaign: Campaign, *, hashes: bool) -> bool:
    """Whether the tasks are there. Raises BadTasks when they belong to other settings or, with `hashes`, were edited."""
    if not paths.tasks_manifest.exists():
        return False
    manifest = read_json(paths.tasks_manifest)
    if manifest["domain"] != campaign.domain.model_dump(mode="json"):
        raise BadTasks(f"{paths.campaign_yaml}: `domain` changed after the tasks were made (see {paths.tasks_manifest}); scores on other "
                       "tasks cannot be compared. Restore it, or start a new campaign folder")
    if hashes:
        for split in ("train", "probe", "dev"):
            found = task_set_hash(read_tasks(paths.tasks(split)))
            if found != manifest["splits"][split]["task_set"]:
                raise BadTasks(f"{paths.tasks(split)}: edited after it was made (its hash differs from {paths.tasks_manifest}); "
                               f"remove {paths.tasks_folder} to have the tasks made again")
    return True
