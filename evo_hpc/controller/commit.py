"""Publishing what a finished job made: all of it appears at once, or nothing does; doing it twice changes nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from evo_hpc.config.yaml_io import dump_tree, load_tree, plain
from evo_hpc.controller.state import CampaignState
from evo_hpc.dispatch.local import JobStatus, load_result
from evo_hpc.errors import UserError
from evo_hpc.jobs.spec import Blame, JobSpec, Record, load_spec
from evo_hpc.paths import COMPLETE, CampaignPaths
from evo_hpc.store.atomic import AlreadyWritten, StoreError, write_bytes, write_json_once
from evo_hpc.store.lease import Lease
from evo_hpc.store.manifest import content, publish_folder, read_complete, sha256


def commit(state: CampaignState, status: JobStatus, lease: Lease) -> None:
    """Publish the outputs of a job whose result says done, then write its record."""
    spec = load_spec(status.job)
    outputs = _outputs(status)
    lease.check()
    {"supervise": _commit_base, "train": _commit_training, "evaluate": _commit_evaluations}[spec.kind](state, spec, outputs)
    if status.record is None:
        write_record(status, lease, state="done")


def _outputs(status: JobStatus) -> dict[str, Any]:
    if status.result is not None:
        return status.result.outputs
    assert status.incarnation is not None
    return load_result(status.job.incarnation(status.incarnation)).outputs


def write_record(status: JobStatus, lease: Lease, *, state: str, blame: Blame | None = None, error: str | None = None) -> None:
    """The controller's final word on an attempt."""
    record = Record(
        state=state, incarnation=status.incarnation if state == "done" else None, blame=blame, error=error,
        generation=lease.generation, starts=len(status.job.starts()), seconds=status.result.seconds if status.result else 0.0,
    )
    lease.check()
    try:
        write_json_once(status.job.record, record.model_dump())
    except AlreadyWritten:
        pass  # an earlier try of this very commit got that far


def _tree(source: Path, prefix: str) -> dict[str, Path]:
    """Files of a finished folder, its own completion record included, under a new prefix."""
    read_complete(source)
    files = {f"{prefix}/{p.relative_to(source).as_posix()}": p for p in content(source)}
    return {**files, f"{prefix}/{COMPLETE}": source / COMPLETE}


def _commit_base(state: CampaignState, spec: JobSpec, outputs: dict[str, Any]) -> None:
    source = state.paths.root / outputs["policy"]
    meta = read_complete(source)["meta"]
    files = {p.relative_to(source).as_posix(): p for p in content(source)}
    publish_folder(state.paths.root / state.settings.campaign.base_model.path, files, {**meta, "job": spec.name, "loss": outputs["loss"]})


def _commit_training(state: CampaignState, spec: JobSpec, outputs: dict[str, Any]) -> None:
    version = state.versions[spec.owner]
    if outputs["recipe_hash"] != version.node.recipe_hash:
        raise UserError(f"{version.node.paths.recipe_yaml}: edited while its training ran; restore it, or remove "
                        f"{version.node.paths.root / 'jobs'} to train the edited recipe")
    root, step = state.paths.root, outputs["step"]
    files: dict[str, Path] = {}
    for part in outputs["parts"]:
        source = root / part["path"]
        _check_part(source, part)
        files[f"{part['table']}/{source.name}"] = source
    files.update(_tree(root / outputs["checkpoint"], _under(version.node.paths.train, version.node.paths.checkpoint(step))))
    files.update(_tree(root / outputs["policy"], _under(version.node.paths.train, version.node.paths.policy(step))))
    files[version.node.paths.effective_yaml.name] = _effective(state.paths, spec, outputs)
    publish_folder(version.node.paths.train, files, {
        "version": spec.owner, "step": step, "recipe_hash": outputs["recipe_hash"], "job": spec.name, "attempt": spec.attempt,
    })


def _under(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _check_part(source: Path, part: dict[str, Any]) -> None:
    if not source.is_file() or source.stat().st_size != part["bytes"] or sha256(source) != part["sha256"]:
        raise StoreError(f"{source}: missing or changed since the job wrote it; remove this version's jobs folder to train it again")


def _effective(paths: CampaignPaths, spec: JobSpec, outputs: dict[str, Any]) -> Path:
    """One effective.yaml from what each role read back from inside the job, with the recipe that it ran."""
    roles = {role: plain(load_tree(paths.root / path)) for role, path in outputs["effective"].items()}
    merged = {"job": spec.name, "recipe_hash": spec.params["recipe_hash"], "recipe": spec.params["recipe"], **roles}
    target = (paths.root / outputs["policy"]).parent / "effective.yaml"
    write_bytes(target, dump_tree(merged))
    return target


def _commit_evaluations(state: CampaignState, spec: JobSpec, outputs: dict[str, Any]) -> None:
    for entry in outputs["evaluations"]:
        version = state.versions.get(entry["version"])
        if version is None:
            raise UserError(f"{state.paths.version(entry['version']).root}: removed while it was evaluated; restore it, or remove "
                            f"the job folder of {spec.name}")
        source = state.paths.root / entry["folder"]
        meta = read_complete(source)["meta"]
        files = {p.relative_to(source).as_posix(): p for p in content(source)}
        publish_folder(version.node.paths.evaluation(entry["suite"]), files, {**meta, "job": spec.name, "committed_at": time.time()})
