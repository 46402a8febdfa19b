"""An attempt that is looked at time and again: what is remembered of it never tells of another life than the files and the queue do."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch.attempt import campaign_root
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm.errors import NoAccounting
from evo_hpc.dispatch.slurm.parse import Listing
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.spec import Identity, Intent, Result, Start, Submission, root_digest
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import write_json
from tests.controller.attempts import PROCESS

BEGAN = 1_000_000.0


class World:
    """One attempt on a cluster without accounting, and the clock."""

    def __init__(self, folder: Path, claimed: bool = True) -> None:
        self.now, self.jobs, self.questions = BEGAN, list[SlurmJob](), 0
        self.job = CampaignPaths(folder / "c").version("v0001").job("train", 0)
        self.name = f"evo-c-{root_digest(campaign_root(self.job))}-v0001-train-000-s0"
        write_json(self.job.intent, Intent(name="n", spec_sha256="", owner="v0001", work="w", root="/c", generation=1, written_at=0,
                                           executor="slurm").model_dump())
        write_json(self.job.start(0), Start(number=0, generation=1, written_at=BEGAN, slurm_name=self.name).model_dump())
        write_json(self.job.submission(0), Submission(number=0, job_id="5", written_at=BEGAN).model_dump())
        if claimed:
            write_json(self.job.claim(0), Identity(job_name="n", generation=1, start=0, process=PROCESS, claimed_at=BEGAN).model_dump())
            self.beat()
        self.dispatch = Dispatch(Cluster(executor="slurm"), lambda: self.now, _queue=Queue(self, 10.0, lambda: self.now))
        self.status: JobStatus | None = None

    def queue(self) -> Listing:
        self.questions += 1
        return Listing(self.jobs)

    def accounting(self, since: float) -> Listing:
        raise NoAccounting("none")

    def is_(self, state: str, **more: object) -> None:
        self.jobs = [SlurmJob(self.name, "5", None, state, BEGAN, started=BEGAN, **more)]  # type: ignore[arg-type]

    def beat(self) -> None:
        write_json(self.job.incarnation(0).heartbeat, {"time": self.now}, durable=False)

    def look(self, seconds: float = 2.0, times: int = 1, beats: bool = True) -> JobStatus:
        """Look again and again, so many seconds apart."""
        for _ in range(times):
            self.now += seconds
            if beats:
                self.beat()
            self.status = self.dispatch.observe(self.job) if self.status is None else self.dispatch.observe_again(self.status)
        assert self.status is not None
        return self.status


def test_one_that_resumes_after_a_long_suspension_is_not_silent(tmp_path: Path) -> None:
    """Its heartbeat was hours old, and is not any more."""
    world = World(tmp_path)
    world.is_("RUNNING")
    world.look(times=10)
    world.is_("SUSPENDED")
    assert world.look(times=1000, beats=False).silent == 0
    world.is_("RUNNING")
    assert max(world.look().silent for _ in range(20)) < 60


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_silent_one_is_told_so(tmp_path: Path, state: str) -> None:
    world = World(tmp_path)
    world.is_(state)
    world.look(times=10)
    assert world.look(seconds=10.0, times=100, beats=False).silent == (1000.0 if state == "RUNNING" else 0.0)


def test_what_is_not_sure_is_judged_anew_each_time(tmp_path: Path) -> None:
    """A job that Slurm may run again for 15 s, and one that is not in the queue yet."""
    world = World(tmp_path / "a")
    world.is_("RUNNING")
    world.look(times=60)
    ended = world.now
    world.is_("NODE_FAIL", ended=ended)
    while world.look(beats=False).phase != "dead":
        assert world.now < ended + 15 + 10 + 3
    lost = World(tmp_path / "b", claimed=False)
    while lost.look(beats=False).phase != "dead":
        assert lost.status is not None and lost.status.phase == "unknown" and lost.now < BEGAN + 60 + 10 + 3


def test_it_is_one_question_to_slurm_a_poll(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.is_("RUNNING")
    world.look(times=100)
    assert world.questions <= 1 + 200 / 10


@pytest.mark.parametrize("then, phase", [("PENDING", "queued"), ("CANCELLED", "dead"), (None, "finished")])
def test_changes_show_at_the_next_answer(tmp_path: Path, then: str | None, phase: str) -> None:
    world = World(tmp_path)
    world.is_("RUNNING")
    world.look(times=10)
    if then is None:
        write_json(world.job.incarnation(0).result, Result(outcome="done").model_dump())
        assert world.look().phase == phase, "a result at once"
        return
    world.is_(then, ended=world.now)
    assert world.look(times=6, beats=False).phase == phase
