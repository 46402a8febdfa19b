"""The job on sealed tasks is planned by the time that it is, not by that of the state, which is read once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.controller.actions import Plan, Start, Submit
from evo_hpc.controller.final_job import FinalJob
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.spec import Record
from evo_hpc.paths import CampaignPaths
from tests.controller.test_plan import INTENT, SETTINGS, state, version

SLURM = Cluster(executor="slurm", slurm={"backoff_seconds": 60})  # type: ignore[arg-type]


def plan_of(folder: Path, **fields: Any) -> Plan:
    """Of one attempt, by a finalize that began an hour ago."""
    paths = CampaignPaths(folder)
    found = state(paths, version(paths, "v0000", [], trained=True, evaluated=True, analysed=True))
    job: Any = object.__new__(FinalJob)
    job.state = replace(found, now=time.time() - 3600, settings=replace(SETTINGS, cluster=SLURM))
    job.paths, job.work, job.params, job.dispatch = paths.final, "run", {}, Dispatch(SLURM)
    job.read = SimpleNamespace(number=1, baseline=SimpleNamespace(version="v0000"), candidate=SimpleNamespace(version="v0001"))
    job.ownership = SimpleNamespace(lease=SimpleNamespace(generation=1))
    intent = INTENT.model_copy(update={"executor": "slurm"})
    return job._plan([JobStatus(paths.final.job("evaluate", 0), intent=intent, **fields)])  # type: ignore[no-any-return]


@pytest.mark.parametrize("ago, waits", [(30.0, True), (90.0, False)])
def test_a_back_off_ends(tmp_path: Path, ago: float, waits: bool) -> None:
    failed = Record(state="failed", incarnation=None, blame="infrastructure", error="why", generation=1, started_by=1, starts=1, seconds=0,
                    written_at=time.time() - ago)
    again = plan_of(tmp_path, phase="recorded", record=failed)
    assert (len(again.waiting), [type(action) for action in again.actions]) == ((1, []) if waits else (0, [Submit]))
    dead = plan_of(tmp_path, phase="dead", starts=1, endings=("infrastructure",), ended=True, not_before=time.time() + 60 - ago)
    assert (len(dead.waiting), [type(action) for action in dead.actions]) == ((1, []) if waits else (0, [Start]))
