"""Random histories without processes: the real judge, executor and planner against a Slurm in memory, and what must hold of any history."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.slurm import Retries, Slurm
from evo_hpc.controller import act, commit
from evo_hpc.controller.actions import Commit, GiveUp, Kill, Start, Submit
from evo_hpc.controller.plan import SILENCE_SECONDS, Planner
from evo_hpc.controller.settings import Settings
from evo_hpc.dispatch import intent
from evo_hpc.dispatch.attempt import load_intent, load_record
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm import executor
from evo_hpc.dispatch.slurm.errors import SlurmUnavailable
from evo_hpc.dispatch.slurm.executor import SlurmExecutor
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.claims import Superseded, check_claim, claim
from evo_hpc.jobs.spec import Identity, Record, Result, Start as StartRecord, Submission
from evo_hpc.paths import CampaignPaths, IncarnationPaths, JobPaths
from evo_hpc.store import atomic
from evo_hpc.store.atomic import dump_json, read_json, write_json, write_json_once, write_once
from evo_hpc.store.lease import Lease, LeaseLost, Owner
from evo_hpc.store.processes import ProcessIdentity
from tests.chaos.memory import Killed, MemoryJob, MemorySlurm, Run

CAPS = {"preempted": 3, "timeout": 3, "oom": 1, "node_fail": 2, "infrastructure": 2, "code_error": 2, "user_cancelled": 0}
STALE = 5
"""Incarnations in a row without a step further, after which an attempt has failed."""
RETRIES = Retries(preempted=3, timeout=3, oom=1, node_fail=2, infrastructure=2, without_progress=STALE)
SLURM = Slurm(settle_seconds=60, backoff_seconds=15, poll_seconds=10, retries=RETRIES)
CLUSTER = Cluster(executor="slurm", slurm=SLURM, max_attempts=2, stall_minutes=5)
CAMPAIGN = Campaign(name="c", domain={"name": "arithmetic"}, base_model={"supervised": {}})  # type: ignore[arg-type]
PROCESS = ProcessIdentity(host="elsewhere", boot="b", pid=7, start_ticks=1)
ENDS = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
LIVELY = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STOPPED", "A_WORD_OF_A_LATER_VERSION")
OF_NODES = ("NODE_FAIL", "BOOT_FAIL")
SLOW = ("infrastructure", "node_fail", "oom", "code_error")
"""Endings after which a new start waits."""
MOST_CONTROLLERS = 6
FRESH_SECONDS = 60.0
"""Age of a heartbeat that shows a life that Slurm knows nothing of."""
NODES_SECONDS = 600.0
"""How long a failed job that does not come to its end is waited for."""
HIDDEN_SECONDS = 50.0
"""How long a filesystem may hide a result from a controller; below the profile's settle_seconds."""


def waits(failures: int) -> float:
    """Seconds before the next try, after so many failures in a row."""
    return min(15.0 * 2 ** (failures - 1), 600.0)


class Process:
    """A launcher: the claim of one run of a job, as long as it lives."""

    def __init__(self, job: MemoryJob, folder: JobPaths, incarnation: IncarnationPaths, step: int) -> None:
        self.job, self.folder, self.incarnation, self.step = job, folder, incarnation, step
        self.restart = len(job.runs) - 1
        self.beaten_at = 0.0


class Hidden:
    """A result that is written, but does not show up before its time."""

    def __init__(self, process: Process, result: str, shows_at: float) -> None:
        self.process, self.result, self.shows_at = process, result, shows_at


class Controller:
    """One generation: its own memory of the queue and of what it saw, its own lease."""

    def __init__(self, world: Histories, generation: int) -> None:
        owner = Owner(generation=generation, process=PROCESS, acquired_at=world.now)
        write_once(world.paths.generation(generation), dump_json(owner.model_dump()))
        self.lease = Lease(world.paths, owner)
        self.queue = Queue(world.slurm, SLURM.poll_seconds, lambda: world.now)
        hand = SlurmExecutor(world.cluster, world.slurm, forget=self.queue.invalidate)  # type: ignore[arg-type]
        self.dispatch = Dispatch(world.cluster, lambda: world.now, _slurm=hand, _queue=self.queue)
        self.blocked: str | None = None
        self.known: dict[Path, tuple[list[str], JobStatus]] = {}
        """Attempts as they were seen last, with the names that were in their folders."""


class Histories(RuleBasedStateMachine):
    """One piece of work; `done` once its record says so."""

    cluster = CLUSTER

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.paths = CampaignPaths(self.folder / "c")
        self.now = 1_000_000.0
        self.slurm = MemorySlurm(lambda: self.now, submit_seconds=SLURM.submit_seconds)
        self.processes: list[Process] = []
        self.hidden: list[Hidden] = []
        self.results: dict[tuple[str, int], str] = {}
        """Outcome by attempt and incarnation, in the order of writing."""
        self.records: dict[str, bytes] = {}
        self.seen: set[Path] = set()
        """Records of starts and intents that were checked."""
        self.settings = Settings(CAMPAIGN, Recipe(steps=5), self.cluster)
        self.patches = pytest.MonkeyPatch()
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        for module in (executor, intent, commit, act):
            self.patches.setattr(module, "time", clock)
        self.patches.setattr(executor, "submit", self.submit)
        self.patches.setattr(intent, "spec_bytes", lambda spec: f"name: {spec.name}\n".encode())  # YAML costs more than all the rest
        self.patches.setattr(executor, "load_spec", lambda job: SimpleNamespace(cluster=CLUSTER.model_dump(mode="json")))
        self.patches.setattr(atomic.os, "fsync", lambda fd: None)
        self.controllers = [Controller(self, 1)]

    def teardown(self) -> None:
        try:
            self.healthy_world_ends_the_work()
        finally:
            self.patches.undo()
            shutil.rmtree(self.folder)

    # What happens to the cluster and to jobs.

    def live(self) -> list[MemoryJob]:
        return [job for job in self.slurm.jobs if job.lives]

    def runnable(self) -> list[MemoryJob]:
        """Those that slurmctld knows of, or knew."""
        return [job for job in self.live() if job.visible_at <= self.now]

    def over(self) -> list[MemoryJob]:
        return [job for job in self.slurm.jobs if not job.lives and job.returns_at is None]

    def pick(self, data: Any, of: list[Any]) -> Any:
        return data.draw(st.sampled_from(of))

    def folder_of(self, job: MemoryJob) -> JobPaths:
        return next(each for each in self.paths.base.jobs() if job.attempt.endswith(each.root.name))

    def passes(self, seconds: float) -> None:
        """Let time go on, and what is due happen in its order."""
        until = self.now + seconds
        due: list[tuple[float, Callable[[], None]]] = [(h.shows_at, lambda h=h: self.shows(h)) for h in self.hidden]  # type: ignore[misc]
        due += [(job.returns_at, lambda job=job: self.returns(job)) for job in self.slurm.jobs if job.returns_at is not None]  # type: ignore[misc]
        for at, happens in sorted(due, key=lambda each: each[0]):
            if at <= until:
                self.now = at
                happens()
        self.now = until

    @rule(seconds=st.sampled_from([1.0, 11.0, 16.0, 35.0, 70.0, 700.0]), beats=st.booleans())
    def time_passes(self, seconds: float, beats: bool) -> None:
        """Processes show life, or their filesystem does not; then a controller looks."""
        self.passes(seconds)
        for process in self.processes if beats else []:
            self.beat(process)
        self.tick(self.controllers[-1])

    @rule(seconds=st.sampled_from([11.0, 35.0, 55.0]), times=st.integers(2, 8), beats=st.booleans())
    def a_controller_looks_again_and_again(self, seconds: float, times: int, beats: bool) -> None:
        for _ in range(times):
            self.time_passes(seconds, beats)

    def beat(self, process: Process) -> None:
        process.beaten_at = self.now
        write_json(process.incarnation.heartbeat, {"time": self.now}, durable=False)

    @rule(answers=st.lists(st.sampled_from(["ok", "slow", "refused", "busy", "lost answer", "lost question", "late", "killed"]), min_size=1, max_size=3))
    def submissions_will_end(self, answers: list[Any]) -> None:
        self.slurm.answers = answers

    @rule(down=st.booleans())
    def slurmctld(self, down: bool) -> None:
        self.slurm.down = down

    @rule(mode=st.sampled_from(["ok", "absent", "down"]))
    def accounting(self, mode: Any) -> None:
        self.slurm.accounting_is = mode

    @rule()
    def ids_are_used_again(self) -> None:
        self.slurm.reused = [job.job_id for job in self.slurm.jobs]

    @precondition(lambda self: self.live())
    @rule(data=st.data(), word=st.sampled_from(LIVELY))
    def a_job_is_in_some_state(self, data: Any, word: str) -> None:
        self.pick(data, self.live()).run.state = word

    @precondition(lambda self: self.runnable())
    @rule(data=st.data(), steps=st.sampled_from([0, 0, 1, 3]))
    def a_job_runs(self, data: Any, steps: int) -> None:
        """Starts and claims, or goes on."""
        self.runs(self.pick(data, self.runnable()), steps)

    def runs(self, job: MemoryJob, steps: int = 1) -> None:
        job.run.state = "RUNNING"
        process = next((p for p in self.processes if p.job is job and p.restart == len(job.runs) - 1), None)
        if process is None:
            folder = self.folder_of(job)
            try:
                incarnation = claim(folder, Identity(job_name="j", generation=job.generation, start=job.start, restart=len(job.runs) - 1,
                                                     process=PROCESS, claimed_at=self.now))
            except Superseded:
                self.ends(job, "FAILED", 3)
                return
            process = Process(job, folder, incarnation, self.reached(folder))
            self.processes.append(process)
        self.beat(process)
        if steps:
            process.step += steps
            write_json(process.incarnation.progress, {"step": process.step}, durable=False)

    def reached(self, job: JobPaths) -> int:
        """The step that an attempt goes on from."""
        return max((read_json(each.progress)["step"] for each in job.incarnations() if each.progress.exists()), default=0)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), word=st.sampled_from(ENDS), code=st.sampled_from([0, 1, 3, 9, 127]), accounted=st.booleans(), step_lives=st.booleans())
    def a_job_ends(self, data: Any, word: str, code: int, accounted: bool, step_lives: bool) -> None:
        job = self.pick(data, self.live())
        self.ends(job, word, code, accounted, step_lives)

    def ends(self, job: MemoryJob, word: str, code: int = 0, accounted: bool = True, step_lives: bool = False) -> None:
        job.run.state, job.run.ended, job.run.exit_code, job.run.accounted, job.dead = word, self.now, code, accounted, True
        if not step_lives:
            self.processes = [p for p in self.processes if p.job is not job]

    @precondition(lambda self: self.live())
    @rule(data=st.data(), word=st.sampled_from(["PREEMPTED", "NODE_FAIL", "REQUEUED"]), step_lives=st.booleans(), accounted=st.booleans())
    def a_job_is_requeued(self, data: Any, word: str, step_lives: bool, accounted: bool) -> None:
        job = self.pick(data, self.live())
        if not job.forgotten:
            self.ends(job, word, step_lives=step_lives)
            self.returns(job, accounted)

    @rule(word=st.sampled_from(["PREEMPTED", "NODE_FAIL"]), step_lives=st.booleans(), seconds=st.sampled_from([4.0, 12.0, 14.0]))
    def a_job_shows_an_end_before_it_is_requeued(self, word: str, step_lives: bool, seconds: float) -> None:
        """For a moment; a controller may look just then."""
        if (job := self.newest()) is not None:
            self.ends(job, word, step_lives=step_lives)
            job.returns_at = self.now + seconds
            self.time_passes(11.0, step_lives)

    def returns(self, job: MemoryJob, accounted: bool = False) -> None:
        job.dead, job.returns_at = False, None
        job.runs.append(Run(self.now, accounted=accounted))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), goes_on=st.booleans(), accounted=st.booleans())
    def a_job_is_forgotten(self, data: Any, goes_on: bool, accounted: bool) -> None:
        """slurmctld lost it: accounting has it as it was last seen, or not at all."""
        job = self.pick(data, self.live())
        job.forgotten, job.dead, job.deleted = True, not goes_on, not accounted
        if not goes_on:
            self.processes = [p for p in self.processes if p.job is not job]

    @precondition(lambda self: self.over())
    @rule(data=st.data(), deleted=st.booleans())
    def an_ended_job_leaves_the_queue(self, data: Any, deleted: bool) -> None:
        job = self.pick(data, self.over())
        job.forgotten, job.deleted, job.run.accounted = True, deleted, True

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), result=st.sampled_from(["done", *["failed", "stopped"] * 3, "user"]),
          then=st.sampled_from(["ends", "goes on", "is requeued", "node fails", "its node is missed later"]))
    def a_process_writes_its_result(self, data: Any, result: str, then: str) -> None:
        """Also one of a job that Slurm thinks has ended."""
        self.writes(self.pick(data, self.processes), result, then)

    def writes(self, process: Process, result: str, then: str = "ends") -> None:
        self.processes.remove(process)
        try:
            check_claim(process.folder, process.incarnation)
        except Superseded:
            return
        self.says(process, result)
        job = process.job
        if not job.lives:
            return
        again = result in ("stopped", "failed") and not job.forgotten
        if then == "ends":
            self.ends(job, "COMPLETED" if result != "stopped" else "FAILED", 0 if result != "stopped" else 75)
        elif then == "is requeued" and again:
            self.ends(job, "REQUEUED" if result == "stopped" else "NODE_FAIL")
            self.returns(job)
        elif then == "node fails" and again:
            self.ends(job, "NODE_FAIL")
        elif then == "its node is missed later" and again:
            self.time_passes(11.0, True)
            if job.lives:
                self.ends(job, "NODE_FAIL")
                job.returns_at = self.now + 4.0
                self.time_passes(11.0, True)

    def says(self, process: Process, result: str) -> None:
        newest = max(number for number, _ in process.folder.claims())
        assert process.incarnation.number == newest, f"incarnation {process.incarnation.number} commits, though {newest} has taken over"
        outcome: Any = "failed" if result == "user" else result
        blame: Any = {"user": "user", "failed": "infrastructure"}.get(result)
        record = Result(outcome=outcome, blame=blame, error=result, finished_at=self.now)
        write_json_once(process.incarnation.result, record.model_dump())
        if load_record(process.folder) is None:
            self.results[process.folder.root.name, newest] = outcome

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), result=st.sampled_from(["done", "stopped"]), looks=st.booleans())
    def a_result_shows_late(self, data: Any, result: str, looks: bool) -> None:
        """The job has ended well, and a network filesystem does not show its last file yet."""
        process = self.pick(data, self.processes)
        if not process.job.lives or process.job.forgotten or process.job.visible_at > self.now:
            return
        self.processes.remove(process)
        self.beat(process)
        self.ends(process.job, *(("COMPLETED", 0) if result == "done" else ("FAILED", 75)))
        self.hidden.append(Hidden(process, result, self.now + HIDDEN_SECONDS))
        if looks:
            self.time_passes(16.0, True)

    def shows(self, hidden: Hidden) -> None:
        self.hidden.remove(hidden)
        try:
            check_claim(hidden.process.folder, hidden.process.incarnation)
        except Superseded:
            return
        self.says(hidden.process, hidden.result)

    # Courses that chance alone would seldom take.

    def newest(self) -> MemoryJob | None:
        """The job that was submitted last, where it can run."""
        job = self.slurm.jobs[-1] if self.slurm.jobs else None
        return job if job is not None and job.lives and job.visible_at <= self.now and not job.forgotten else None

    @rule(word=st.sampled_from([*ENDS, *["stopped", "failed"] * 4]), times=st.sampled_from([1, 3, 6]), code=st.sampled_from([0, 1, 9]),
          progress=st.sampled_from(["none", "at first", "all the time"]), seconds=st.sampled_from([11.0, 35.0, 700.0]))
    def the_same_end_again_and_again(self, word: str, times: int, code: int, progress: str, seconds: float) -> None:
        """Start after start, attempt after attempt, while nothing is wrong with Slurm."""
        self.slurm.down, self.slurm.answers = False, []
        self.time_passes(130.0, True)
        for number in range(times):
            if (job := self.newest()) is not None:
                self.runs(job, progress == "all the time" or (progress == "at first" and number == 0))
                if not job.lives:
                    continue
                if word in ("stopped", "failed"):
                    for process in [p for p in self.processes if p.job is job][-1:]:
                        self.writes(process, word)
                else:
                    self.ends(job, word, code)
            for _ in range(3):
                self.time_passes(seconds, False)

    @rule(times=st.integers(2, 8), seconds=st.sampled_from([11.0, 40.0, 55.0]), steps=st.sampled_from([0, 1]), lost=st.booleans(), taken_over=st.booleans())
    def a_job_runs_on(self, times: int, seconds: float, steps: int, lost: bool, taken_over: bool) -> None:
        """Also one that neither slurmctld nor accounting knows any more, and before a controller that never saw it there."""
        job = self.newest()
        if job is None:
            return
        self.runs(job, steps)
        self.tick(self.controllers[-1])
        job.forgotten = job.deleted = lost
        if taken_over and len(self.controllers) < MOST_CONTROLLERS:
            self.another_controller_takes_over()
        for _ in range(times):
            self.time_passes(seconds, True)

    @rule(times=st.integers(1, 3))
    def a_job_hangs(self, times: int) -> None:
        """It shows no life, and Slurm sees nothing."""
        if (job := self.newest()) is not None:
            self.runs(job)
            for _ in range(times):
                self.time_passes(700.0, False)

    @rule(result=st.sampled_from(["done", "failed", "stopped", "stopped"]), goes_on=st.booleans(), looks=st.booleans())
    def a_job_lives_on_beside_its_copy(self, result: str, goes_on: bool, looks: bool) -> None:
        """Its node was lost to slurmctld alone."""
        job = self.newest()
        if job is None:
            return
        self.runs(job)
        old = next((p for p in self.processes if p.job is job), None)
        self.ends(job, "NODE_FAIL", step_lives=True)
        self.returns(job)
        if looks:
            self.time_passes(11.0, True)
        self.runs(job)
        if old in self.processes:
            self.writes(old, result, "goes on" if goes_on else "ends")
        self.time_passes(11.0, True)

    @rule(result=st.sampled_from(["failed", "stopped"]), looks=st.booleans(), word=st.sampled_from([None, *["NODE_FAIL"] * 4, *ENDS]),
          seconds=st.sampled_from([16.0, 70.0]))
    def a_job_that_gave_its_result_runs_again(self, result: str, looks: bool, word: str | None, seconds: float) -> None:
        """Slurm requeues it for its node's sake, or ends it so; what the second run says, or does not say, counts."""
        job = self.newest()
        if job is None:
            return
        self.runs(job)
        for process in [p for p in self.processes if p.job is job][-1:]:
            self.writes(process, result, "goes on")
        if looks:
            self.time_passes(11.0, True)
        if not job.lives:
            return
        self.ends(job, "NODE_FAIL")
        if word == "NODE_FAIL":
            self.time_passes(seconds, True)
            return
        self.returns(job)
        self.runs(job)
        self.time_passes(11.0, True)
        if word is not None and job.lives:
            self.ends(job, word, 1)
        self.time_passes(seconds, True)

    @rule(accounted=st.booleans(), result=st.sampled_from([None, "done", "done", "failed", "user"]), late=st.booleans())
    def a_lost_job_starts_after_all(self, accounted: bool, result: str | None, late: bool) -> None:
        """It waited, slurmctld forgot it, the next start took its place: then a node runs it."""
        lost = self.newest()
        if lost is None:
            return
        self.slurm.down, self.slurm.accounting_is, self.slurm.answers = False, "ok", []
        lost.run.state, lost.forgotten, lost.deleted = "PENDING", True, not accounted
        self.processes = [p for p in self.processes if p.job is not lost]
        for _ in range(3):
            self.time_passes(700.0, False)
        job = self.newest()
        if job is None:
            return
        if late or result is not None:
            self.runs(job)
        for process in [p for p in self.processes if p.job is job and result is not None][-1:]:
            self.writes(process, str(result))
            self.time_passes(11.0, True)
        if lost.lives:
            self.runs(lost)

    @rule(answer=st.sampled_from(["late", "slow", "lost answer", "killed"]), times=st.integers(2, 5))
    def a_submission_shows_late(self, answer: Any, times: int) -> None:
        """Of a job that is started again at once."""
        if (job := self.newest()) is not None:
            self.slurm.down, self.slurm.answers = False, [answer]
            self.runs(job)
            self.ends(job, "PREEMPTED")
            for _ in range(times):
                self.time_passes(35.0, True)

    @rule(seconds=st.sampled_from([35.0, 70.0, 700.0]), times=st.integers(1, 4), beats=st.booleans(), taken_over=st.booleans())
    def slurmctld_is_down_for_a_while(self, seconds: float, times: int, beats: bool, taken_over: bool) -> None:
        """Also for a controller that has never seen what the queue holds."""
        self.slurm.down = True
        if taken_over and len(self.controllers) < MOST_CONTROLLERS:
            self.another_controller_takes_over()
        for _ in range(times):
            self.time_passes(seconds, beats)
        self.slurm.down = False
        self.time_passes(130.0, beats)

    # What controllers do.

    @precondition(lambda self: len(self.controllers) < MOST_CONTROLLERS)
    @rule(what=st.sampled_from(["done", "user", "PREEMPTED", "FAILED", "CANCELLED"]))
    def a_displaced_controller_sees_it_first(self, what: str) -> None:
        """Something is to be done, and the one that is to do it has not looked yet."""
        if (job := self.newest()) is not None:
            self.runs(job)
            if what in ENDS and job.lives:
                self.ends(job, what, 1)
            for process in [p for p in self.processes if p.job is job and what not in ENDS][-1:]:
                self.writes(process, what)
        self.passes(700.0)
        self.controllers.append(Controller(self, len(self.controllers) + 1))
        for _ in range(2):
            self.a_controller_looks_and_acts(True)
            self.passes(20.0)

    @precondition(lambda self: len(self.controllers) < 4)
    @rule()
    def another_controller_takes_over(self) -> None:
        self.controllers.append(Controller(self, len(self.controllers) + 1))

    @rule(old=st.sampled_from([False, False, False, True]))
    def a_controller_looks_and_acts(self, old: bool) -> None:
        """The newest, or one that has been displaced and has not noticed."""
        if not old or len(self.controllers) == 1:
            self.tick(self.controllers[-1])
            return
        before = self.everything()
        submitted = len(self.slurm.submissions)
        try:
            self.tick(self.controllers[-2])
        except LeaseLost:
            pass
        assert (self.everything(), len(self.slurm.submissions)) == (before, submitted), "a displaced controller has committed something"

    @precondition(lambda self: self.runnable())
    @rule(data=st.data(), what=st.sampled_from(["claims", "done", "failed", "user", "stopped", "ends", "is requeued"]))
    def a_job_is_faster_than_a_look(self, data: Any, what: str) -> None:
        """A controller has read the files, and has not asked Slurm yet."""
        job = self.pick(data, self.runnable())

        def happens() -> None:
            if what == "is requeued":
                if not job.forgotten:
                    self.ends(job, "NODE_FAIL")
                    self.returns(job)
            elif what == "ends":
                self.ends(job, "FAILED", 1)
            else:
                self.runs(job)
                for process in [p for p in self.processes if p.job is job and what != "claims"][-1:]:
                    self.writes(process, what, "goes on")
                    self.ends(job, "FAILED" if what != "done" else "COMPLETED", {"done": 0, "user": 2, "stopped": 75}.get(what, 1))

        self.slurm.meanwhile = happens
        try:
            self.time_passes(11.0, False)
        finally:
            self.slurm.meanwhile = None

    def everything(self) -> list[str]:
        return sorted(str(p) for p in self.paths.root.rglob("*") if p.is_file())

    def tick(self, controller: Controller) -> None:
        """One look, what follows from it, and whether that was right."""
        self.looks_and_acts(controller)
        self.what_is_committed_stays()
        self.caps_hold()

    def looks_and_acts(self, controller: Controller) -> None:
        """A controller that is killed meanwhile is followed by another one."""
        statuses = [self.observed(controller, job) for job in self.paths.base.jobs()]
        if statuses and statuses[-1].record is not None and statuses[-1].record.state == "done":
            return
        state: Any = SimpleNamespace(settings=self.settings, now=self.now, paths=self.paths, all_jobs=lambda: statuses, versions={}, unrecorded=())
        planner = Planner(state, controller.lease.generation, None)
        if statuses and statuses[-1].phase == "finished":
            planner.end(statuses[-1])
        else:
            planner.work("base", "supervise", statuses, {}, "work")
        controller.blocked = planner.blockers[0].error if planner.blockers else None
        for action in planner.actions:
            if isinstance(action, GiveUp):
                self.may_be_given_up(controller, action.status)
            try:
                self.carry_out(action, state, controller)
            except Killed:
                if len(self.controllers) < MOST_CONTROLLERS:
                    self.controllers.append(Controller(self, len(self.controllers) + 1))
                return

    def carry_out(self, action: Any, state: Any, controller: Controller) -> None:
        match action:
            case Submit() | GiveUp() | Start():
                act.carry_out_job(action, state, controller.dispatch, controller.lease)
            case Commit():
                controller.lease.check()
                commit.write_record(action.status, controller.lease, state="done")
            case Kill():
                controller.lease.check()
                self.may_be_killed(action.status)
                try:
                    controller.dispatch.executor_of(action.status).end(action.status, "infrastructure", action.why)
                except SlurmUnavailable:
                    pass

    def submit(self, environment: Any, text: str, path: Path, *, seconds: float) -> str:
        """Submits, where no other start of that attempt can still give a result."""
        number = len(self.slurm.submissions)
        try:
            return self.slurm.submit(environment, text, path, seconds=seconds)
        finally:
            if len(self.slurm.submissions) > number and (start := self.slurm.jobs[-1]).start > 0:
                self.started_beside_nobody(start)

    def started_beside_nobody(self, new: MemoryJob) -> None:
        before = [job for job in self.slurm.jobs if job.attempt == new.attempt and job.start == new.start - 1]
        for hidden in self.hidden:
            number = max(number for number, _ in hidden.process.folder.claims())
            if hidden.process.job in before and hidden.process.incarnation.number == number:
                self.slurm.violations.append(f"{new.name} was submitted while the result of {hidden.process.job.name}, which ended well, was on its way")
        for process in self.processes:
            if process.job in before and process.job.forgotten and process.job.lives and len(process.job.runs) == 1:
                if self.now - process.beaten_at < FRESH_SECONDS:
                    self.slurm.violations.append(f"{new.name} was submitted while {process.job.name}, which Slurm has forgotten, showed life")

    def may_be_given_up(self, controller: Controller, status: JobStatus) -> None:
        """Nobody gives up what Slurm may run again."""
        starts = status.job.starts()
        last = StartRecord.model_validate(read_json(starts[-1][1]))
        jobs = [job for job in self.slurm.jobs if job.name == last.slurm_name]
        asked = controller.queue._squeue
        if status.phase == "dead":
            alive = [job.name for job in self.slurm.jobs if last.slurm_name == job.name and (job.lives or job.returns_at is not None) and not job.forgotten]
            assert not alive, f"{alive} are given up though they are in the queue: {status.said}"
        elif status.result is not None and status.result.blame == "infrastructure" and asked.error is None and asked.asked_at is not None:
            identity = read_json(status.job.claims()[-1][1])
            assert identity["start"] == last.number, "given up for what an earlier start said"
            waited = self.now >= status.result.finished_at + NODES_SECONDS
            for job in jobs:
                if identity["start"] == last.number and last.written_at <= asked.asked_at >= job.visible_at and not job.forgotten:
                    assert not job.lives or waited, f"{job.name}, which is {job.run.state}, is given up by its own word alone"
                    assert job.run.state not in OF_NODES, f"{job.name} is given up though it was its node's fault"

    def may_be_killed(self, status: JobStatus) -> None:
        for process in self.processes:
            if process.folder == status.job and process.incarnation.number == status.incarnation:
                silent = self.now - process.beaten_at
                assert silent > 60 * CLUSTER.stall_minutes + SILENCE_SECONDS - FRESH_SECONDS, f"killed {silent:.0f} s after it showed life"

    def observed(self, controller: Controller, job: JobPaths) -> JobStatus:
        """As a controller sees it from one look to the next: anew where a name has come or gone in its folder."""
        names = sorted(name for name in os.listdir(job.root) if not name.startswith("inc-"))
        known = controller.known.get(job.root)
        happens = self.slurm.meanwhile
        again = known is not None and known[0] == names
        if known is None or not again:
            status = controller.dispatch.observe(job)
        elif known[1].phase == "recorded":
            status = known[1]
        else:
            status = controller.dispatch.observe_again(known[1])
        controller.known[job.root] = (names, status)
        if again and self.slurm.meanwhile is happens:
            self.same_as_afresh(controller, status)
        if status.phase == "dead":
            self.has_died(controller, status)
        return status

    def same_as_afresh(self, controller: Controller, status: JobStatus) -> None:
        """What is gone on from says the same as a look by somebody who remembers no attempt."""
        fresh = Dispatch(self.cluster, lambda: self.now, _queue=controller.queue).observe(status.job)
        told, tells = _told(status), _told(fresh)
        assert told == tells, f"remembered {told} ({status.said}), afresh {tells} ({fresh.said})"
        assert abs(status.silent - fresh.silent) <= FRESH_SECONDS, f"silent for {status.silent:.0f} s, afresh {fresh.silent:.0f} s"
        asked = controller.queue._squeue
        if status.phase in ("planned", "recorded", "finished") or asked.asked_at is None:
            return
        assert asked.error is not None or self.now - asked.asked_at <= SLURM.poll_seconds, "judged by an old answer, though squeue would answer"
        if asked.error is None and asked.asked_at == self.now:
            name = read_json(status.job.starts()[-1][1])["slurm_name"]
            if any(job.name == name and self.slurm.visible(job) and job.lives for job in self.slurm.jobs):
                assert status.phase in ("queued", "running"), f"{name} is in the queue, yet {status.phase}: {status.said}"

    def has_died(self, controller: Controller, status: JobStatus) -> None:
        claims = status.job.claims()
        path = status.job.incarnation(claims[-1][0]).result if claims else None
        if path is not None and path.exists():
            result = read_json(path)
            assert result["outcome"] != "done" and result["blame"] != "user", f"dead, though it has its result: {status.said}"
        last = StartRecord.model_validate(read_json(status.job.starts()[-1][1]))
        for process in self.processes:
            newest = bool(claims) and process.folder == status.job and process.incarnation.number == claims[-1][0] and process.job.name == last.slurm_name
            if newest and process.job.forgotten and process.job.lives and len(process.job.runs) == 1:
                assert self.now - process.beaten_at >= FRESH_SECONDS, f"dead, though it shows life: {status.said}"
        if not status.refused and "Limit" not in status.said:
            asked = controller.queue._squeue.asked_at
            assert asked is not None and asked >= last.written_at, f"dead though squeue was not asked since its start: {status.said}"

    # What must hold.

    @invariant()
    def nothing_is_submitted_beside_a_visible_job(self) -> None:
        assert not self.slurm.violations

    @invariant()
    def claims_only_rise(self) -> None:
        for job in self.paths.base.jobs():
            ranks = [(each["generation"], each["start"], each["restart"]) for each in (read_json(path) for _, path in job.claims())]
            assert ranks == sorted(set(ranks)), f"{job.root.name} was claimed by an older start: {ranks}"

    @invariant()
    def what_is_committed_stays(self) -> None:
        jobs = self.paths.base.jobs()
        for job in jobs:
            name = job.root.name
            if not job.record.exists():
                assert name not in self.records
                continue
            data = job.record.read_bytes()
            if name not in self.records:
                record = load_record(job)
                assert record is not None
                self.records[name] = data
                self.is_right(job, record, jobs)
            assert self.records[name] == data
            newest = job.claims()[-1][0] if job.claims() else None
            told = None if newest is None else self.results.get((name, newest))
            state = read_json(job.record)
            assert (state["state"] == "done") == (told == "done"), f"{name}: {state['state']}, but its newest incarnation said {told}"
            if state["state"] == "done":
                assert state["incarnation"] == newest
                assert job == jobs[-1], "work that was done was begun again"

    def is_right(self, job: JobPaths, record: Record, jobs: list[JobPaths]) -> None:
        """Of a record just written: how far it says that the attempt came, and that a failure has its cause."""
        if record.state != "failed":
            return
        assert record.advanced == (self.reached(job) > max(map(self.reached, jobs[: jobs.index(job)]), default=0))
        newest = job.claims()[-1][0] if job.claims() else None
        told = None if newest is None else self.results.get((job.root.name, newest))
        starts = [StartRecord.model_validate(read_json(path)) for _, path in job.starts()]
        submission = Submission.model_validate(read_json(job.submissions()[-1][1])) if job.submissions() else None
        refused = submission is not None and submission.refused is not None and not submission.busy and submission.number == starts[-1].number
        endings = Counter([s.after for s in starts if s.after] + ([record.ending] if record.ending else []))
        over = any(count > CAPS[ending] for ending, count in endings.items())
        assert told == "failed" or refused or over or self.stale(job) >= STALE, f"{job.root.name} was given up for nothing: {record.error}"
        if record.ending == "user_cancelled":
            last = [each for each in self.slurm.jobs if each.name == starts[-1].slurm_name]
            assert any(each.run.state == "CANCELLED" and not each.cancelled_by_us for each in last), f"nobody cancelled it: {record.error}"

    def stale(self, job: JobPaths) -> int:
        """Incarnations in a row, the newest last, that came no further than those before."""
        best, stale = -1, 0
        for number, _ in job.claims():
            path = job.incarnation(number).progress
            step = read_json(path)["step"] if path.exists() else -1
            best, stale = max(best, step), 0 if step > best else stale + 1
        return stale

    @invariant()
    def caps_hold(self) -> None:
        jobs = self.paths.base.jobs()
        for job in jobs:
            if job.intent not in self.seen and load_intent(job) is not None:
                self.seen.add(job.intent)
                self.was_due(job, jobs)
            paths = job.starts()
            if not paths or paths[-1][1] in self.seen:
                continue
            starts = [StartRecord.model_validate(read_json(path)) for _, path in paths]
            assert all(count <= CAPS[ending] for ending, count in Counter(s.after for s in starts if s.after).items())
            if len(starts) > 1:
                assert self.stale(job) < STALE, "was started again though it gets no further"
                self.has_waited(job, starts)
            self.seen.add(paths[-1][1])

    def was_due(self, job: JobPaths, jobs: list[JobPaths]) -> None:
        """A new attempt: after its wait, and not one too many."""
        begun = load_intent(job)
        assert begun is not None
        before = [load_record(each) for each in jobs[: jobs.index(job)]]
        assert all(before), "two attempts at once"
        ours = [record for record in before if record is not None and record.state == "failed" and record.started_by >= begun.generation]
        if ours:
            failures = _in_a_row(ours)
            assert failures < CLUSTER.max_attempts, f"another attempt after {failures} failures in a row"
            assert ours[-1].blame != "user", "another attempt though a person must mend something"
            assert begun.written_at >= ours[-1].written_at + waits(failures), "another attempt without a wait"

    def has_waited(self, job: JobPaths, starts: list[StartRecord]) -> None:
        last, before = starts[-1], starts[-2]
        after = [each.after for each in starts if each.after is not None]
        submission = job.submission(before.number)
        ended = [each.run.ended for each in self.slurm.jobs if each.name == before.slurm_name and not each.forgotten and each.run.ended is not None]
        if last.after in SLOW:
            failures = next((n for n, each in enumerate(reversed(after)) if each not in SLOW), len(after))
            since = max([before.written_at, *(ended if not any(p.exists() for _, p in job.endeds()) else [])])
            assert last.written_at >= since + waits(failures), f"start {last.number} came too soon after {failures} failures"
        elif submission.exists() and read_json(submission)["busy"]:
            assert last.written_at >= before.written_at + waits(1), "asked again at once where Slurm has no room"

    @initialize(answers=st.lists(st.sampled_from(["ok", "slow", "late", "lost answer", "lost question"]), max_size=2))
    def begin(self, answers: list[Any]) -> None:
        self.slurm.answers = answers
        self.tick(self.controllers[-1])

    def healthy_world_ends_the_work(self) -> None:
        """Slurm answers, what waits runs, what runs ends well, what was forgotten ends silently: then the work is done or has failed for good."""
        self.slurm.down, self.slurm.accounting_is, self.slurm.answers, self.slurm.reused = False, "ok", [], []
        for _ in range(120):
            controller = self.controllers[-1]
            for job in self.live():
                if job.forgotten:
                    job.dead = True
                elif job.visible_at <= self.now:
                    self.runs(job)
                    for process in [p for p in self.processes if p.job is job][-1:]:
                        self.writes(process, "done")
            self.processes = [p for p in self.processes if p.job.lives]
            self.passes(60)
            self.tick(controller)
            self.nothing_is_submitted_beside_a_visible_job()
            jobs = self.paths.base.jobs()
            record = load_record(jobs[-1]) if jobs else None
            if record is not None and (record.state == "done" or controller.blocked):
                assert record.state == "done" or record.error
                return
        raise AssertionError(f"no end: {[(j.root.name, controller.dispatch.observe(j)) for j in self.paths.base.jobs()]}, {self.slurm.jobs}")


def _told(status: JobStatus) -> dict[str, Any]:
    """What the plan goes by."""
    fields = ("phase", "endings", "incarnation", "result", "slurm_id", "refused", "not_before", "ended", "starts")
    return {field: getattr(status, field) for field in fields} | ({"stale": status.stale} if status.phase == "dead" else {})


def _in_a_row(failed: Iterable[Record]) -> int:
    """The last failures of which none but the first came further than those before it."""
    count = 0
    for record in failed:
        count = 1 if record.advanced else count + 1
    return count
