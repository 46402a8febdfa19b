"""The campaign's tasks on disk: train, probe and dev beside the campaign, sealed outside it and for nobody's eyes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationError

from evo_hpc.config.base import Config
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


class SplitManifest(Config):
    """One split."""

    tasks: int
    task_set: str


class TasksManifest(Config):
    """`tasks/manifest.json`."""

    schema_version: Literal[1] = 1
    domain: dict[str, Any]
    splits: dict[str, SplitManifest]


def make_tasks(paths: CampaignPaths, campaign: Campaign) -> dict[str, int]:
    """Write every split and, last, the manifest; returns how many tasks each has. The same settings give the same files."""
    domain, config = domain_of(paths, campaign)
    splits = domain.make_tasks(config)
    for split in ("train", "probe", "dev"):
        write_bytes(paths.tasks(split), tasks_to_jsonl(splits[split]).encode())
    if splits["sealed"]:
        sealed = paths.workspace.sealed_tasks(task_set_hash(splits["sealed"]))
        write_bytes(sealed, tasks_to_jsonl(splits["sealed"]).encode(), mode=0o600)
    manifest = TasksManifest(
        domain=campaign.domain.model_dump(mode="json"),
        splits={split: SplitManifest(tasks=len(tasks), task_set=task_set_hash(tasks)) for split, tasks in splits.items()},
    )
    write_json(paths.tasks_manifest, manifest.model_dump())
    return {split: len(tasks) for split, tasks in splits.items()}


def read_manifest(paths: CampaignPaths, campaign: Campaign) -> TasksManifest | None:
    """The tasks' manifest, None before they are made. Raises BadTasks when it is damaged or belongs to other settings."""
    if not paths.tasks_manifest.exists():
        return None
    try:
        manifest = TasksManifest.model_validate(read_json(paths.tasks_manifest))
    except ValidationError as error:
        raise BadTasks(f"{paths.tasks_manifest}: not a manifest of tasks ({error.errors()[0]['msg']}); remove {paths.tasks_folder} to have "
                       "the tasks made again") from error
    if manifest.domain != campaign.domain.model_dump(mode="json"):
        raise BadTasks(f"{paths.campaign_yaml}: `domain` changed after the tasks were made (see {paths.tasks_manifest}); scores on other "
                       "tasks cannot be compared. Restore it, or start a new campaign folder")
    return manifest


def check_task_files(paths: CampaignPaths, manifest: TasksManifest) -> None:
    """Raise BadTasks when a split's file is missing or was edited, TaskError when it is damaged."""
    again = f"remove {paths.tasks_folder} to have the tasks made again"
    for split in ("train", "probe", "dev"):
        path = paths.tasks(split)
        if not path.is_file():
            raise BadTasks(f"{path}: missing; {again}")
        if task_set_hash(read_tasks(path)) != manifest.splits[split].task_set:
            raise BadTasks(f"{path}: edited after it was made (its hash differs from {paths.tasks_manifest}); {again}")
