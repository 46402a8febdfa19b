"""Publishing what a finished job made: all of it appears at once, or nothing does; doing it twice changes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.layout import trainer_ranks
from evo_hpc.config.yaml_io import dump_tree, load_tree, plain
from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.dispatch.attempt import load_result, reached, work_of
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.errors import UserError
from evo_hpc.evaluation.shards import publish_evaluation
from evo_hpc.harness.analysis import publish_analysis
from evo_hpc.jobs.outputs import AnalyseOutputs, EvaluateOutputs, Part, SuperviseOutputs, TrainOutputs, parse_outputs
from evo_hpc.jobs.spec import Blame, Ending, JobSpec, Record, load_spec
from evo_hpc.paths import COMPLETE, CampaignPaths, JobPaths, OwnerPaths
from evo_hpc.store.atomic import AlreadyWritten, StoreError, read_json, write_bytes, write_json_once
from evo_hpc.store.lease import Lease
from evo_hpc.store.manifest import content, publish_folder, read_complete, sha256


def commit(state: CampaignState, status: JobStatus, lease: Lease) -> None:
    """Publish the outputs of a job whose result says done, then write its record."""
    spec, outputs = load_spec(status.job), outputs_of(status)
    lease.check()
    commits = {"supervise": _commit_base, "train": _commit_training, "evaluate": _commit_evaluations, "analyse": _commit_analysis}
    commits[spec.kind](state, spec, status.job, outputs)
    if status.record is None:
        write_record(status, lease, state="done")


def outputs_of(status: JobStatus) -> dict[str, Any]:
    """What an attempt that is done says that it made."""
    assert status.incarnation is not None
    return status.result.outputs if status.result else load_result(status.job.incarnation(status.incarnation)).outputs


def commit_stopped(state: CampaignState, version: VersionState, status: JobStatus, lease: Lease) -> None:
    """Publish the steps of a run up to the look that ended it, without a policy, then write the record of its job."""
    look, paths = version.stopped_early, version.node.paths
    assert look is not None and version.run is not None
    lease.check()
    files = _parts(state.paths.root, [Part.model_validate(part) for part in look.parts], status.job)
    publish_folder(paths.train, files, {
        "version": version.id, "step": look.step, "run": version.run, "job": status.job.root.name, "attempt": status.job.attempt,
        "stopped_early": {"step": look.step, "findings": list(look.futile)},
    })
    if status.record is None:
        write_record(status, lease, state="stopped_early")


def _parts(root: Path, parts: list[Part], job: JobPaths) -> dict[str, Path]:
    """The table files of a run, checked by hash, by their names in the published folder. Raises StoreError."""
    files: dict[str, Path] = {}
    for part in parts:
        source = root / part.path
        if not source.is_file() or source.stat().st_size != part.bytes or sha256(source) != part.sha256:
            raise StoreError(f"{source}: missing or changed since the job wrote it; remove {job.root.parent} to train this version again")
        files[f"{part.table}/{source.name}"] = source
    return files


def write_record(
    status: JobStatus, lease: Lease, *, state: Literal["done", "failed", "stopped_early"], blame: Blame | None = None, error: str | None = None
) -> None:
    """The controller's final word on an attempt."""
    starts = status.job.starts()
    record = Record(
        state=state, incarnation=status.incarnation if state == "done" else None, blame=blame, error=error, generation=lease.generation,
        ending=_ending(status) if state == "failed" else None,
        started_by=read_json(starts[-1][1])["generation"] if starts else lease.generation,
        starts=len(starts), advanced=state == "failed" and _advanced(status), seconds=_seconds(status.job), written_at=time.time(),
    )
    lease.check()
    try:
        write_json_once(status.job.record, record.model_dump())
    except AlreadyWritten:
        pass  # an earlier try of this very commit got that far


def _ending(status: JobStatus) -> Ending | None:
    """How the last start of a failed attempt ended: by its own word, else by Slurm's."""
    if status.result is not None and status.result.ending is not None:
        return status.result.ending
    return status.endings[-1] if status.ended else None


def _advanced(status: JobStatus) -> bool:
    """Whether it came further than the attempts at the same work before it."""
    job = status.job
    before = [each for each in OwnerPaths(job.owner).jobs() if (each.kind, each.shard) == (job.kind, job.shard) and each.attempt < job.attempt]
    same = [each for each in before if status.intent is not None and work_of(each) == status.intent.work]
    return reached(job) > max(map(reached, same), default=0)


def _seconds(job: JobPaths) -> float:
    """Wall time of all incarnations: by their results, or from claim to last heartbeat where a kill left none."""
    total = 0.0
    for number, path in job.claims():
        incarnation = job.incarnation(number)
        if incarnation.result.exists():
            total += load_result(incarnation).seconds
        elif incarnation.heartbeat.exists():
            total += max(0.0, read_json(incarnation.heartbeat)["time"] - read_json(path)["claimed_at"])
    return total


def _tree(source: Path, prefix: str) -> dict[str, Path]:
    """Files of a finished folder, checked by hash, its own completion record included, under a new prefix."""
    read_complete(source, hashes=True)
    files = {f"{prefix}/{p.relative_to(source).as_posix()}": p for p in content(source)}
    return {**files, f"{prefix}/{COMPLETE}": source / COMPLETE}


def _commit_base(state: CampaignState, spec: JobSpec, job: JobPaths, outputs: dict[str, Any]) -> None:
    made = parse_outputs(SuperviseOutputs, outputs, job, state.paths.root)
    source = state.paths.root / made.policy
    meta = read_complete(source, hashes=True)["meta"]
    files = {p.relative_to(source).as_posix(): p for p in content(source)}
    publish_folder(state.paths.root / state.settings.campaign.base_model.path, files, {**meta, "job": spec.name, "loss": made.loss})


def _commit_training(state: CampaignState, spec: JobSpec, job: JobPaths, outputs: dict[str, Any]) -> None:
    version = state.versions[spec.owner]
    made = parse_outputs(TrainOutputs, outputs, job, state.paths.root)
    if version.run is not None and made.run != version.run:
        raise UserError(f"{version.node.paths.recipe_yaml}: the recipe, init, seed or training tasks changed while {spec.name} ran; restore "
                        f"them, or remove {job.root} to train what the files say now")
    root, train = state.paths.root, version.node.paths.train
    files = _parts(root, made.parts, job)
    files.update(_tree(root / made.checkpoint, version.node.paths.checkpoint(made.step).relative_to(train).as_posix()))
    files.update(_tree(root / made.policy, version.node.paths.policy(made.step).relative_to(train).as_posix()))
    files[version.node.paths.effective_yaml.name] = _effective(state.paths, spec, job, made)
    publish_folder(train, files, {
        "version": spec.owner, "step": made.step, "run": made.run, "job": spec.name, "attempt": spec.attempt,
    })


def _effective(paths: CampaignPaths, spec: JobSpec, job: JobPaths, made: TrainOutputs) -> Path:
    """One effective.yaml from what each role read back from inside the job, with what was asked for: the recipe, and the cluster
    profile's sections on trainer and engine."""
    roles = {role: plain(load_tree(paths.root / path)) for role, path in made.effective.items()}
    asked = {section: dict(spec.cluster[section]) for section in ("trainer", "engine") if section in spec.cluster}
    if "trainer" in asked:  # under Slurm the job's own resources say it
        asked["trainer"]["ranks"] = trainer_ranks(Cluster.model_validate(spec.cluster))
    target = job.effective_yaml
    write_bytes(target, dump_tree({"job": spec.name, "run": made.run, "recipe": spec.params["recipe"], "cluster": asked, **roles}))
    return target


def _commit_evaluations(state: CampaignState, spec: JobSpec, job: JobPaths, outputs: dict[str, Any]) -> None:
    if job.shard is None:
        publish_evaluations(state, {job: outputs}, spec.name)
    else:  # published once all parts are there
        for entry in parse_outputs(EvaluateOutputs, outputs, job, state.paths.root).evaluations:
            read_complete(state.paths.root / entry.folder, hashes=True)


def _commit_analysis(state: CampaignState, spec: JobSpec, job: JobPaths, outputs: dict[str, Any]) -> None:
    made = parse_outputs(AnalyseOutputs, outputs, job, state.paths.root)
    if made.harness != spec.params["harness"]:
        raise StoreError(f"{job.root}: says that it is of harness {made.harness}, and was asked for {spec.params['harness']}; remove this job folder "
                         "to have the work done again")
    publish_analysis(state.versions[spec.owner].node.paths, made.harness, state.paths.root / made.folder)


def publish_evaluations(state: CampaignState, outputs: Mapping[JobPaths, dict[str, Any]], name: str) -> None:
    """Publish what the jobs of one piece of evaluation work made, one a shard; `name` is what its records call the job.

    Raises StoreError on outputs that are not usable, BadShards on those of different works, UserError where a version is gone.
    """
    folders: dict[tuple[str, str], list[Path]] = {}
    for job, made in outputs.items():
        for entry in parse_outputs(EvaluateOutputs, made, job, state.paths.root).evaluations:
            if entry.version not in state.versions:
                raise UserError(f"{state.paths.version(entry.version).root}: removed while it was evaluated; restore it, or remove {job.root}")
            folders.setdefault((entry.version, entry.suite), []).append(state.paths.root / entry.folder)
    for (version, suite), shards in folders.items():
        publish_evaluation(state.versions[version].node.paths, suite, shards, {"job": name})
