"""Carries out a plan's actions, each of which may be cut off anywhere and done again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from evo_hpc.agent.rules import load_rules
from evo_hpc.config.yaml_io import ConfigError, dump_model
from evo_hpc.controller.commit import commit, commit_stopped, outputs_of, publish_evaluations, write_record
from evo_hpc.controller.gate import compare
from evo_hpc.controller.judge import decide
from evo_hpc.controller.actions import (
    Action, Analyse, Cancel, Commit, Compare, CreateVersion, Decide, EndEarly, GiveUp, Kill, MakeHarness, MakeTasks, Propose, Publish, Start,
    Stop, Submit, Watch,
)
from evo_hpc.controller.state import CampaignState
from evo_hpc.controller.tasks import make_tasks
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.intent import declare
from evo_hpc.harness.analysis import read_watches, run_analysis, run_watch, version_inputs
from evo_hpc.harness.harness import make_harness, read_harnesses
from evo_hpc.harness.inputs import Inputs
from evo_hpc.jobs.spec import JobSpec, job_name, load_spec
from evo_hpc.lineage.decision import write_decision
from evo_hpc.lineage.tree import create_version
from evo_hpc.paths import JobPaths, OwnerPaths
from evo_hpc.store.atomic import append_line, write_once
from evo_hpc.store.lease import Lease
from evo_hpc.store.manifest import quarantine

Event = dict[str, Any]


def carry_out(action: Action, state: CampaignState, dispatch: Dispatch, lease: Lease, beat: Callable[[], None]) -> Event | None:
    """Do one action and journal it; `beat` is called while it waits. Returns the event, for whoever watches; None for a repeated request."""
    event: Event = {"event": type(action).__name__}
    match action:
        case MakeTasks():
            lease.check()
            event["tasks"] = make_tasks(state.paths, state.settings.campaign)
        case CreateVersion():
            _create(action, state, lease)
            event.update(version=action.id, parents=action.version.parents, rule=action.version.rule, hypothesis=action.version.hypothesis)
        case MakeHarness():
            lease.check()
            load_rules(state.found.rules)
            event.update(harness=make_harness(state.paths, state.found, action.number, while_waiting=beat).id)
        case Submit() | Start() | GiveUp():
            event.update(carry_out_job(action, state, dispatch, lease))
        case Commit():
            commit(state, action.status, lease)
            event.update(job=short_name(action.status.job), seconds=round(action.status.result.seconds, 1) if action.status.result else None)
        case Publish():
            lease.check()
            publish_evaluations(state, {status.job: outputs_of(status) for status in action.shards}, load_spec(action.shards[0].job).name)
            for status in action.shards:
                if status.record is None:
                    write_record(status, lease, state="done")
            event.update(version=action.version, parts=len(action.shards))
        case Watch():
            event.update(version=action.version, step=action.step, **_watch(action, state, lease, beat))
        case Stop():
            if not dispatch.stop(action.status):
                return None
            event.update(version=action.version, job=short_name(action.status.job))
        case Kill():
            if not dispatch.executor_of(action.status).end(action.status, "infrastructure", action.why):
                return None
            event.update(job=short_name(action.status.job), why=action.why)
        case EndEarly():
            version = state.versions[action.version]
            assert version.stopped_early is not None
            commit_stopped(state, version, action.status, lease)
            event.update(version=action.version, step=version.stopped_early.step, futile=list(version.stopped_early.futile))
        case Analyse():
            event.update(version=action.version, **_analyse(action, state, lease, beat))
        case Decide():
            decision = decide(state, state.versions[action.version])
            lease.check()
            write_decision(state.versions[action.version].node.paths.decision_yaml, decision)
            event.update(
                version=action.version, decision=decision.decision, promoted=decision.promoted, because=decision.because,
                prediction=decision.prediction.outcome if decision.prediction else None,
            )
        case Cancel():
            lease.check()
            write_decision(state.versions[action.version].node.paths.decision_yaml, action.decision)
            event.update(version=action.version, because=action.decision.because)
        case Propose():
            lease.check()
            write_once(state.paths.round(action.round.number), dump_model(action.round.signed()))
            event.update(round=action.round.number, versions=[p.version.id for p in action.round.proposals])
        case Compare():
            versions = state.versions
            found = compare(state.paths, state.settings.campaign, versions[action.against], versions[action.version], lease).interval
            event.update(
                version=action.version, against=action.against, difference=found.difference, ci_low=found.ci_low, ci_high=found.ci_high,
                n_tasks=found.n_tasks,
            )
    append_line(state.paths.events, {"time": time.time(), "generation": lease.generation, **event})
    return event


def carry_out_job(action: Submit | Start | GiveUp, state: CampaignState, dispatch: Dispatch, lease: Lease) -> Event:
    """What is the same for every job, whoever owns it."""
    match action:
        case Submit():
            job = _owner(state, action.owner).job(action.kind, action.attempt, action.shard)
            spec = spec_of(action, state, job)
            declare(job, spec, action.work, lease, state.settings.cluster.executor)
            return {"job": spec.name}
        case Start():
            said = dispatch.executor_of(action.statuses[0]).start(action.statuses, lease)
            return {"job": ", ".join(short_name(status.job) for status in action.statuses), "said": said}
        case GiveUp():
            write_record(action.status, lease, state="failed", blame=action.blame, error=action.error)
            return {"job": short_name(action.status.job), "blame": action.blame, "error": action.error}


def short_name(job: JobPaths) -> str:
    """Owner and attempt, for people."""
    return f"{job.owner.name}/{job.root.name}"


def _owner(state: CampaignState, owner: str) -> OwnerPaths:
    special: dict[str, OwnerPaths] = {each.root.name: each for each in (state.paths.base, state.paths.final)}
    return special[owner] if owner in special else state.versions[owner].node.paths


def spec_of(action: Submit, state: CampaignState, job: JobPaths) -> JobSpec:
    """The spec of a new attempt, with the settings as they are now."""
    campaign = state.settings.campaign
    config = campaign.model_dump(mode="json")
    if action.kind == "train":  # the futility rule is declared once a run: a second attempt at it is watched as the first was
        earlier = [s for s in state.versions[action.owner].jobs.get("train", []) if s.intent is not None and s.intent.work == action.work]
        if earlier:
            config["watch"] = load_spec(earlier[0].job).config["watch"]
    return JobSpec(
        name=job_name(str(state.paths.root.resolve()), campaign.name, action.owner, job.root.name),
        kind=action.kind, campaign=campaign.name, owner=action.owner, attempt=action.attempt,
        config=config, cluster=state.settings.cluster.model_dump(mode="json"), params=action.params,
    )


def _create(action: CreateVersion, state: CampaignState, lease: Lease) -> None:
    lease.check()
    parents = action.version.parents
    if parents and action.recipe.steps == 0:
        raise ConfigError(f"{state.paths.recipe_yaml}: steps is 0, so {action.id} would be its parent again; set it to at least 1")
    create_version(state.paths, action.version, action.recipe, state.versions[parents[0]].node if parents else None)


def _watch(action: Watch, state: CampaignState, lease: Lease, beat: Callable[[], None]) -> Event:
    """The live analyzers on the run's first steps; what they find is on disk before anything follows from it."""
    version, harness = state.versions[action.version], state.harness
    assert version.running is not None and harness is not None
    parts = version.running.up_to(action.step)
    files = {table: tuple(state.paths.root / p.path for p in parts if p.table == table) for table in ("steps", "rollouts")}
    lease.check()
    for earlier in read_watches(version.node.paths):
        if earlier.run != version.run:
            quarantine(earlier.folder)
    if version.watches:  # one run is looked at by one harness, whatever has been edited since
        harness = next(each for each in read_harnesses(state.paths) if each.id == version.watches[0].harness)
    look = run_watch(
        version.node.paths, harness, Inputs(steps=files["steps"], train=files["rollouts"]), step=action.step, run=version.run or "",
        stop_on=version.running.watch.stop_on, parts=[part.model_dump() for part in parts], while_waiting=beat,
    )
    return {"futile": list(look.futile), "findings": [f.model_dump(include={"id", "severity", "text"}) for f in look.findings]}


def _analyse(action: Analyse, state: CampaignState, lease: Lease, beat: Callable[[], None]) -> Event:
    version, harness = state.versions[action.version], state.harness
    assert harness is not None
    lease.check()
    if version.node.paths.analysis(harness.id).exists():  # of results that are no longer there
        quarantine(version.node.paths.analysis(harness.id))
    found = run_analysis(version.node.paths, harness, version_inputs(version.node.paths), while_waiting=beat)
    return {"harness": harness.id, "seconds": found.seconds, "findings": [f.model_dump(include={"id", "severity", "text"}) for f in found.findings]}
