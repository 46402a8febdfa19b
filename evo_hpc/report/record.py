"""Reads what a report shows from a campaign's folders, whatever state it is in: the files' way into report/model.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evo_hpc.config.yaml_io import load_tree, plain
from evo_hpc.controller.gate import METHOD, REPORTED_ALPHA, SCORE_DIFFERENCE, SUITE
from evo_hpc.controller.state import CampaignState, VersionState, read_state
from evo_hpc.dispatch.attempt import load_record
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.evaluation.scores import EvaluationRecord, scores_by_task
from evo_hpc.harness.analysis import read_analysis
from evo_hpc.lineage.comparison import Interval
from evo_hpc.lineage.looks import read_looks
from evo_hpc.lineage.sealed import BadSealedLedger, Entry, place_of, read_ledger, sealed_problems
from evo_hpc.lineage.tree import node_changes
from evo_hpc.paths import CampaignPaths, harness_id
from evo_hpc.report.curves_figure import COLUMNS
from evo_hpc.report.model import CampaignReport, Curves, Score, SealedRead, StoppedEarly, VersionReport, build
from evo_hpc.report.views import version_stage
from evo_hpc.seeds import derive_seed
from evo_hpc.stats import mean_interval, paired_bootstrap
from evo_hpc.store.atomic import read_json
from evo_hpc.store.schemas import STEP
from evo_hpc.store.tables import read_tables

_TRAINER_FACTS = {"torch": "torch", "megatron_core": "megatron-core", "device_name": "trainer's device", "dtype": "trainer's dtype"}
_ENGINE_FACTS = {"engine.dtype": "engine's dtype"}


def read_report_record(paths: CampaignPaths) -> CampaignReport:
    """All that a report shows. Raises UserError or StoreError when a folder is damaged, as every reader of a campaign does."""
    state = read_state(paths)
    campaign, looks = state.settings.campaign, read_looks(paths)
    evaluations = [record for version in state.versions.values() for record in version.evaluations.values() if record]
    return build(
        name=campaign.name, description=campaign.description, folder=paths.root.name, domain=campaign.domain.name, seed=campaign.seed,
        alpha=campaign.gate.alpha, versions=[_version(state, version) for version in state.versions.values()], looks=looks, rounds=state.rounds,
        tasks={split: found.tasks for split, found in state.tasks.splits.items()} if state.tasks else {},
        epochs={record.epoch: record.epoch_components for record in evaluations}, software=_software(state, evaluations),
        sealed=_sealed(paths, state), other_seconds=sum(_seconds(attempts) for attempts in state.base_jobs.values())
        + sum(record.seconds for job in paths.final.jobs() if (record := load_record(job)) is not None),
        times=[
            *_job_times(state.all_jobs()), *(look.declared_at for look in looks),
        ],
    )


def _version(state: CampaignState, version: VersionState) -> VersionReport:
    node, stopped = version.node, version.stopped_early
    newest = node.paths.analyses()
    analysis = read_analysis(node.paths, harness_id(newest[-1][0])) if newest else None
    return VersionReport(
        version=node.version, recipe_steps=node.recipe.steps, seed=node.recipe.seed, init=node.init, stage=version_stage(version),
        changes={parent: tuple(node_changes(state.versions[parent].node, node)) for parent in node.version.parents},
        scores={suite: _score(state, version, record) for suite, record in version.evaluations.items() if record is not None},
        over_base=_over_base(state, version), comparisons=version.comparisons, decision=version.decision, curves=_curves(state.paths, version),
        harness=analysis.harness if analysis else None, analyses=tuple(analysis.reports.values()) if analysis else (),
        stopped_early=StoppedEarly(stopped.step, tuple(stopped.futile)) if stopped else None,
        seconds={kind: _seconds(attempts) for kind, attempts in version.jobs.items()},
        failed_attempts=sum(s.record is not None and s.record.state == "failed" for attempts in version.jobs.values() for s in attempts),
    )


def _score(state: CampaignState, version: VersionState, record: EvaluationRecord) -> Score:
    campaign, low, high, note = state.settings.campaign, None, None, "one task gives no interval"
    if len(record.task_ids) > 1:
        found = mean_interval(
            scores_by_task(version.node.paths, record.suite), tasks=record.task_ids, k=record.k, draws=campaign.gate.draws, alpha=REPORTED_ALPHA,
            seed=derive_seed(campaign.seed, "report", version.id, record.suite, record.epoch) % 2**32, method=METHOD, bounds=(0.0, 1.0),
        )
        low, high, note = found.ci_low, found.ci_high, found.note
    return Score(record.avg_at_k, low, high, len(record.task_ids), record.k, record.missing, record.epoch, note)


def _over_base(state: CampaignState, version: VersionState) -> Interval | None:
    """On dev against the root: the gate's own numbers where it has compared the two."""
    root = state.root
    before, after = root.evaluations[SUITE] if root else None, version.evaluations[SUITE]
    if root is None or before is None or after is None or version.id == root.id or before.epoch != after.epoch or len(after.task_ids) < 2:
        return None
    if (looked := version.comparison_with(root)) is not None:
        return looked.interval
    seed = derive_seed(state.settings.campaign.seed, "report", version.id, root.id, after.epoch) % 2**32
    found = paired_bootstrap(
        *(scores_by_task(v.node.paths, SUITE) for v in (root, version)), tasks=after.task_ids, k=after.k, draws=state.settings.campaign.gate.draws,
        alpha=REPORTED_ALPHA, seed=seed, method=METHOD, bounds=SCORE_DIFFERENCE,
    )
    return Interval(**asdict(found), excludes_zero=found.excludes_zero and not found.degenerate)


def _sealed(paths: CampaignPaths, state: CampaignState) -> list[SealedRead]:
    """Every read of the sealed tasks; results are shown of this campaign's own."""
    if state.tasks is None:
        return []
    if problems := sealed_problems(paths, state.tasks.splits["sealed"].task_set):
        raise BadSealedLedger("\n".join(problems))
    return [_sealed_read(entry, place_of(paths)) for entry in read_ledger(paths.workspace, state.tasks.splits["sealed"].task_set)]


def _sealed_read(entry: Entry, place: str) -> SealedRead:
    read, own = entry.read, entry.read.place == place
    return SealedRead(
        number=read.number, campaign=read.campaign, own=own, baseline=read.baseline.version, candidate=read.candidate.version,
        declared_at=read.declared_at, why=read.why, result=entry.result if own else None,
    )


def _curves(paths: CampaignPaths, version: VersionState) -> Curves | None:
    """Of the published run, or of one still in training as far as it has got; None before its first step."""
    if version.node.paths.train.exists():
        files: Iterable[Path] = sorted(version.node.paths.steps.glob("*.parquet"))
    else:
        files = [paths.root / part.path for part in version.running.parts if part.table == "steps"] if version.running else []
    table = read_tables(files, STEP, ["step", *COLUMNS]).sort_by("step")
    if not table.num_rows:
        return None
    return Curves(tuple(table.column("step").to_pylist()), {name: tuple(table.column(name).to_pylist()) for name in COLUMNS})


def _seconds(attempts: Iterable[JobStatus]) -> float:
    """Wall time of finished attempts."""
    return sum(status.record.seconds for status in attempts if status.record is not None)


def _job_times(jobs: Iterable[JobStatus]) -> list[float]:
    """When each incarnation ended, where it says so."""
    results = [incarnation.result for status in jobs for incarnation in status.job.incarnations() if incarnation.result.exists()]
    return [read_json(path)["finished_at"] for path in results]


def _software(state: CampaignState, evaluations: Iterable[EvaluationRecord]) -> dict[str, tuple[str, ...]]:
    """What ran, by its own account: the engine of the evaluations, the trainers of the training runs."""
    found: dict[str, set[str]] = {}
    for record in evaluations:
        parts = record.epoch_components
        if "engine.engine" in parts:
            found.setdefault("engine", set()).add(f"{parts['engine.engine']} {parts.get('engine.engine_version', '')}".strip())
        for key, name in _ENGINE_FACTS.items():
            if key in parts:
                found.setdefault(name, set()).add(parts[key])
    for version in state.versions.values():
        if version.node.paths.effective_yaml.exists():
            trainer: Any = plain(load_tree(version.node.paths.effective_yaml)).get("trainer", {})
            for key, name in _TRAINER_FACTS.items():
                if key in trainer:
                    found.setdefault(name, set()).add(str(trainer[key]))
    return {name: tuple(sorted(values)) for name, values in found.items()}
