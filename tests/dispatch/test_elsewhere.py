"""An attempt that the local executor of another machine began: what is known of it from here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.controller.blockers import refuse_what_runs_elsewhere
from evo_hpc.controller.final_job import FinalJob
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm.errors import SlurmMissing, SlurmUnavailable
from evo_hpc.dispatch.slurm.parse import Listing
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.errors import UserError
from evo_hpc.jobs.spec import Intent, Result
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.atomic import read_json, write_json
from evo_hpc.store.lease import Owner
from tests.controller.attempts import PROCESS, write_attempt


@dataclass
class Slurm:
    """What its commands answer."""

    jobs: list[SlurmJob] = field(default_factory=list)
    error: Exception | None = None

    def queue(self) -> Listing:
        if self.error is not None:
            raise self.error
        return Listing(self.jobs)

    def accounting(self, since: float) -> Listing:
        return self.queue()


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    paths = CampaignPaths(tmp_path / "campaign")
    made = write_attempt(paths.version("v0001").job("train", 0), executor="local", recorded=None)
    made.incarnation(0).result.unlink()
    intent = Intent.model_validate(read_json(made.intent)).model_copy(update={"root": str(paths.root.resolve())})
    write_json(made.intent, intent.model_dump())
    return made


def owned_by(job: JobPaths, **slurm: object) -> None:
    """The controller that started it: process 1 of n1, in that Slurm job."""
    paths = CampaignPaths.of_job(job)
    owner = Owner(generation=1, process=PROCESS, acquired_at=1000.0, **slurm)  # type: ignore[arg-type]
    paths.generation(1).parent.mkdir(parents=True, exist_ok=True)
    write_json(paths.generation(1), owner.model_dump())


IN_SLURM = {"slurm_job_id": "7", "slurm_job_name": "evo-c-controller"}


def seen(job: JobPaths, slurm: Slurm, silent: float) -> tuple[str, str | None]:
    write_json(job.incarnation(0).heartbeat, {"time": time.time() - silent})
    status = Dispatch(Cluster(), _queue=Queue(slurm, 10)).observe(job)  # type: ignore[arg-type]
    assert status.pid is None and status.incarnation == 0
    return status.phase, status.host


def controller(state: str, job_id: str = "7") -> SlurmJob:
    return SlurmJob("evo-c-controller", job_id, None, state, 900.0)


@pytest.mark.parametrize("slurm", [{}, IN_SLURM])
def test_where_nobody_can_be_asked_it_is_told_by_its_life_alone(job: JobPaths, slurm: dict[str, str]) -> None:
    owned_by(job, **slurm)
    away = Slurm(error=SlurmMissing("squeue: no such program"))
    assert seen(job, away, silent=5) == ("running", "n1")
    assert seen(job, away, silent=500) == ("unknown", "n1")


@pytest.mark.parametrize("jobs, silent, phase", [
    ([controller("RUNNING")], 5, "running"), ([controller("RUNNING")], 500, "unknown"), ([controller("COMPLETING")], 500, "unknown"),
    ([controller("TIMEOUT")], 500, "dead"), ([], 500, "dead"), ([controller("RUNNING", "8")], 500, "dead"),  # a successor
    ([], 5, "running"),  # it shows life: nothing is concluded yet
])
def test_it_ends_with_the_slurm_job_of_its_controller(job: JobPaths, jobs: list[SlurmJob], silent: float, phase: str) -> None:
    owned_by(job, **IN_SLURM)
    assert seen(job, Slurm(jobs), silent) == (phase, None)


def test_while_slurm_does_not_answer_nothing_is_concluded(job: JobPaths) -> None:
    owned_by(job, **IN_SLURM)
    assert seen(job, Slurm(error=SlurmUnavailable("Socket timed out")), 500) == ("unknown", None)


def test_a_requeued_controller_knows_that_its_earlier_run_is_over(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    owned_by(job, **IN_SLURM)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert seen(job, Slurm([controller("RUNNING")]), 500) == ("unknown", None)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert seen(job, Slurm([controller("RUNNING")]), 500) == ("dead", None)


def test_its_result_counts_wherever_it_ran(job: JobPaths) -> None:
    write_json(job.incarnation(0).result, Result(outcome="done", seconds=1).model_dump())
    assert seen(job, Slurm(), 500) == ("finished", None)


def test_a_controller_refuses_what_it_can_neither_see_nor_end(job: JobPaths) -> None:
    status = Dispatch(Cluster(), _queue=Queue(Slurm(), 10)).observe(job)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="runs on n1, .* go on with the campaign on that machine"):
        refuse_what_runs_elsewhere([status])
    final: Any = object.__new__(FinalJob)
    final.paths, final.dispatch = SimpleNamespace(jobs=lambda: [job]), SimpleNamespace(observe=lambda job: status)
    with pytest.raises(UserError, match="runs on n1"):
        final.run()
