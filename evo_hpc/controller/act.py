"""Carries out a plan's actions, each of which may be cut off anywhere and done again."""

from __future__ import annotations

import time
from typing import Any

from evo_hpc.config.yaml_io import ConfigError
from evo_hpc.controller.commit import commit, write_record
from evo_hpc.controller.gate import compare
from evo_hpc.controller.plan import Action, Commit, Compare, CreateVersion, GiveUp, MakeTasks, Start, Submit
from evo_hpc.controller.state import CampaignState
from evo_hpc.controller.tasks import make_tasks
from evo_hpc.dispatch.local import LocalExecutor
from evo_hpc.jobs.spec import JobSpec, job_name
from evo_hpc.lineage.tree import create_version
from evo_hpc.lineage.version import Prediction, Version
from evo_hpc.paths import JobPaths, OwnerPaths
from evo_hpc.store.atomic import append_line
from evo_hpc.store.lease import Lease

Event = dict[str, Any]


def carry_out(action: Action, state: CampaignState, executor: LocalExecutor, lease: Lease) -> Event:
    """Do one action and journal it. Returns the event, for whoever watches."""
    event: Event = {"event": type(action).__name__}
    match action:
        case MakeTasks():
            lease.check()
            event["tasks"] = make_tasks(state.paths, state.settings.campaign)
        case CreateVersion():
            _create(action, state, lease)
            event["version"] = action.id
        case Submit():
            job = _owner(state, action.owner).job(action.kind, action.attempt)
            spec = _spec(action, state, job)
            executor.submit(job, spec, action.work, lease)
            event["job"] = spec.name
        case Start():
            event.update(job=_short(action.job), pid=executor.start(action.job, lease))
        case Commit():
            commit(state, action.status, lease)
            event.update(job=_short(action.status.job), seconds=round(action.status.result.seconds, 1) if action.status.result else None)
        case GiveUp():
            write_record(action.status, lease, state="failed", blame=action.blame, error=action.error)
            event.update(job=_short(action.status.job), blame=action.blame, error=action.error)
        case Compare():
            versions = state.versions
            found = compare(state.paths, state.settings.campaign, versions[action.against], versions[action.version], lease).interval
            event.update(
                version=action.version, against=action.against, difference=found.difference, ci_low=found.ci_low, ci_high=found.ci_high,
                n_tasks=found.n_tasks,
            )
    append_line(state.paths.events, {"time": time.time(), "generation": lease.generation, **event})
    return event


def _short(job: JobPaths) -> str:
    return f"{job.owner.name}/{job.root.name}"


def _owner(state: CampaignState, owner: str) -> OwnerPaths:
    return state.paths.base if owner == "base" else state.versions[owner].node.paths


def _spec(action: Submit, state: CampaignState, job: JobPaths) -> JobSpec:
    campaign = state.settings.campaign
    return JobSpec(
        name=job_name(str(state.paths.root.resolve()), campaign.name, action.owner, action.kind, action.attempt),
        kind=action.kind, campaign=campaign.name, owner=action.owner, attempt=action.attempt,
        config=campaign.model_dump(mode="json"), cluster=state.settings.cluster.model_dump(mode="json"), params=action.params,
    )


def _create(action: CreateVersion, state: CampaignState, lease: Lease) -> None:
    lease.check()
    recipe = state.settings.recipe.model_copy(update={"steps": action.steps})
    if action.steps == 0 and action.parent is not None:
        raise ConfigError(f"{state.paths.recipe_yaml}: steps is 0, so {action.id} would be its parent again; set it to at least 1")
    if action.parent is None:
        version = Version(id=action.id, author="campaign", hypothesis="The base policy as it is, without RL.")
        create_version(state.paths, version, recipe, None)
    else:
        version = Version(
            id=action.id, parents=[action.parent], author="campaign",
            hypothesis="GRPO with the campaign's recipe raises the score on dev over the base policy.",
            prediction=Prediction(metric="dev/avg_at_k", direction="up", by=0.0), rollback=f"Go on from {action.parent}.",
        )
        create_version(state.paths, version, recipe, state.versions[action.parent].node)
