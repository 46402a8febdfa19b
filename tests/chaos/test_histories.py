"""Random histories without processes: the real judge, executor and planner against a Slurm in memory, and what must hold of any history."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.slurm import Slurm
from evo_hpc.controller import act, commit
from evo_hpc.controller.actions import Commit, GiveUp, Start, Submit
from evo_hpc.controller.plan import Planner
from evo_hpc.controller.settings import Settings
from evo_hpc.dispatch import intent
from evo_hpc.dispatch.attempt import load_record
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm import executor
from evo_hpc.dispatch.slurm.executor import SlurmExecutor
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.claims import Superseded, check_claim, claim
from evo_hpc.jobs.spec import Identity, Result, Start as StartRecord
from evo_hpc.paths import CampaignPaths, IncarnationPaths, JobPaths
from evo_hpc.store import atomic
from evo_hpc.store.atomic import dump_json, read_json, write_json, write_json_once, write_once
from evo_hpc.store.lease import Lease, LeaseLost, Owner
from evo_hpc.store.processes import ProcessIdentity
from tests.chaos.memory import MemoryJob, MemorySlurm, Run

SLURM = Slurm(settle_seconds=60, backoff_seconds=15, poll_seconds=10)
CLUSTER = Cluster(executor="slurm", slurm=SLURM, max_attempts=2)
CAMPAIGN = Campaign(name="c", domain={"name": "arithmetic"}, base_model={"supervised": {}})  # type: ignore[arg-type]
SETTINGS = Settings(CAMPAIGN, Recipe(steps=5), CLUSTER)
PROCESS = ProcessIdentity(host="elsewhere", boot="b", pid=7, start_ticks=1)
ENDS = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
LIVELY = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STOPPED", "A_WORD_OF_A_LATER_VERSION")
CAPS = {"preempted": 1000, "timeout": 1000, "oom": 1, "node_fail": 5, "infrastructure": 3, "code_error": 3, "user_cancelled": 0}


class Process:
    """A launcher: the claim of one run of a job, as long as it lives."""

    def __init__(self, job: MemoryJob, folder: JobPaths, incarnation: IncarnationPaths) -> None:
        self.job, self.folder, self.incarnation, self.step = job, folder, incarnation, 0
        self.restart = len(job.runs) - 1


class Controller:
    """One generation: its own memory of the queue, its own lease."""

    def __init__(self, world: Histories, generation: int) -> None:
        owner = Owner(generation=generation, process=PROCESS, acquired_at=world.now)
        write_once(world.paths.generation(generation), dump_json(owner.model_dump()))
        self.lease = Lease(world.paths, owner)
        queue = Queue(world.slurm, SLURM.poll_seconds, lambda: world.now)
        self.queue = queue
        hand = SlurmExecutor(CLUSTER, world.slurm, forget=queue.invalidate)  # type: ignore[arg-type]
        self.dispatch = Dispatch(CLUSTER, lambda: world.now, _slurm=hand, _queue=queue)
        self.blocked: str | None = None


class Histories(RuleBasedStateMachine):
    """One piece of work; `done` once its record says so."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.paths = CampaignPaths(self.folder / "c")
        self.now = 1_000_000.0
        self.slurm = MemorySlurm(lambda: self.now)
        self.processes: list[Process] = []
        self.results: dict[tuple[str, int], str] = {}
        """Outcome by attempt and incarnation, in the order of writing."""
        self.records: dict[str, bytes] = {}
        self.patches = pytest.MonkeyPatch()
        clock = SimpleNamespace(time=lambda: self.now)
        for module in (executor, intent, commit, act):
            self.patches.setattr(module, "time", clock)
        self.patches.setattr(executor, "submit", self.slurm.submit)
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

    def pick(self, data: Any, of: list[Any]) -> Any:
        return data.draw(st.sampled_from(of))

    @rule(seconds=st.sampled_from([1.0, 11.0, 16.0, 35.0, 70.0, 700.0]), beats=st.booleans())
    def time_passes(self, seconds: float, beats: bool) -> None:
        """Processes show life, or their filesystem does not; then a controller looks."""
        self.now += seconds
        for process in self.processes if beats else []:
            self.beat(process)
        self.tick(self.controllers[-1])

    def beat(self, process: Process) -> None:
        write_json(process.incarnation.heartbeat, {"time": self.now}, durable=False)

    @rule(answers=st.lists(st.sampled_from(["ok", "refused", "busy", "lost answer", "lost question", "late"]), min_size=1, max_size=3))
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

    @precondition(lambda self: self.live())
    @rule(data=st.data(), progress=st.booleans())
    def a_job_runs(self, data: Any, progress: bool) -> None:
        """Starts and claims, or goes on."""
        self.runs(self.pick(data, self.live()), progress)

    def runs(self, job: MemoryJob, progress: bool = True) -> None:
        job.run.state = "RUNNING"
        process = next((p for p in self.processes if p.job is job and p.restart == len(job.runs) - 1), None)
        if process is None:
            folder = next(j for j in self.paths.base.jobs() if job.attempt.endswith(j.root.name))
            try:
                incarnation = claim(folder, Identity(job_name="j", generation=job.generation, start=job.start, restart=len(job.runs) - 1,
                                                     process=PROCESS, claimed_at=self.now))
            except Superseded:
                self.ends(job, "FAILED", 3)
                return
            process = Process(job, folder, incarnation)
            self.processes.append(process)
        self.beat(process)
        if progress:
            process.step += 1
            write_json(process.incarnation.progress, {"step": process.step}, durable=False)

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
    @rule(data=st.data(), word=st.sampled_from(["PREEMPTED", "NODE_FAIL", "REQUEUED"]), step_lives=st.booleans())
    def a_job_is_requeued(self, data: Any, word: str, step_lives: bool) -> None:
        job = self.pick(data, self.live())
        if job.forgotten:
            return
        self.ends(job, word, step_lives=step_lives)
        job.dead = False
        job.runs.append(Run(self.now))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), goes_on=st.booleans(), accounted=st.booleans())
    def a_job_is_forgotten(self, data: Any, goes_on: bool, accounted: bool) -> None:
        """slurmctld lost it: accounting has it as it was last seen, or not at all."""
        job = self.pick(data, self.live())
        job.forgotten, job.dead, job.deleted = True, not goes_on, not accounted
        if not goes_on:
            self.processes = [p for p in self.processes if p.job is not job]

    @precondition(lambda self: any(not job.lives for job in self.slurm.jobs))
    @rule(data=st.data(), deleted=st.booleans())
    def an_ended_job_leaves_the_queue(self, data: Any, deleted: bool) -> None:
        job = self.pick(data, [job for job in self.slurm.jobs if not job.lives])
        job.forgotten, job.deleted, job.run.accounted = True, deleted, True

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), result=st.sampled_from(["done", "failed", "user", "stopped"]), then=st.sampled_from(["ends", "goes on", "is requeued"]))
    def a_process_writes_its_result(self, data: Any, result: str, then: str) -> None:
        """Also one of a job that Slurm thinks has ended."""
        self.writes(self.pick(data, self.processes), result, then)

    def writes(self, process: Process, result: str, then: str = "ends") -> None:
        self.processes.remove(process)
        try:
            check_claim(process.folder, process.incarnation)
        except Superseded:
            return
        outcome: Any = "failed" if result == "user" else result
        blame: Any = {"user": "user", "failed": "infrastructure"}.get(result)
        record = Result(outcome=outcome, blame=blame, error=result, finished_at=self.now)
        write_json_once(process.incarnation.result, record.model_dump())
        if load_record(process.folder) is None:
            self.results[process.folder.root.name, process.incarnation.number] = outcome
        job = process.job
        if job.lives and then == "ends":
            self.ends(job, "COMPLETED" if result != "stopped" else "FAILED", 0 if result != "stopped" else 75)
        elif job.lives and then == "is requeued" and not job.forgotten and result == "stopped":
            self.ends(job, "REQUEUED")
            job.dead = False
            job.runs.append(Run(self.now))

    # What controllers do.

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

    def everything(self) -> list[str]:
        return sorted(str(p) for p in self.paths.root.rglob("*") if p.is_file())

    def tick(self, controller: Controller) -> None:
        statuses = [self.observed(controller, job) for job in self.paths.base.jobs()]
        if statuses and statuses[-1].record is not None and statuses[-1].record.state == "done":
            return
        state: Any = SimpleNamespace(settings=SETTINGS, now=self.now, paths=self.paths, all_jobs=lambda: statuses, versions={}, unrecorded=())
        planner = Planner(state, controller.lease.generation, None)
        if statuses and statuses[-1].phase == "finished":
            planner.end(statuses[-1])
        else:
            planner.work("base", "supervise", statuses, {}, "work")
        controller.blocked = planner.blockers[0].error if planner.blockers else None
        for action in planner.actions:
            match action:
                case Submit() | GiveUp() | Start():
                    act.carry_out_job(action, state, controller.dispatch, controller.lease)
                case Commit():
                    controller.lease.check()
                    commit.write_record(action.status, controller.lease, state="done")

    def observed(self, controller: Controller, job: JobPaths) -> JobStatus:
        status = controller.dispatch.observe(job)
        if status.phase == "dead" and not status.refused and "violates" not in status.said and "Limit" not in status.said:
            last = StartRecord.model_validate(read_json(job.starts()[-1][1]))
            asked = controller.queue._squeue.asked_at
            assert asked is not None and asked >= last.written_at, f"dead though squeue was not asked since its start: {status.said}"
        return status

    # What must hold.

    @invariant()
    def nothing_is_submitted_beside_a_visible_job(self) -> None:
        assert not self.slurm.violations

    @invariant()
    def what_is_committed_stays(self) -> None:
        for job in self.paths.base.jobs():
            name = job.root.name
            if not job.record.exists():
                assert name not in self.records
                continue
            data = job.record.read_bytes()
            assert self.records.setdefault(name, data) == data
            record = load_record(job)
            assert record is not None
            newest = job.claims()[-1][0] if job.claims() else None
            told = None if newest is None else self.results.get((name, newest))
            assert (record.state == "done") == (told == "done"), f"{name}: {record.state}, but its newest incarnation said {told}"
            if record.state == "done":
                assert record.incarnation == newest
                assert job == self.paths.base.jobs()[-1], "work that was done was begun again"

    @invariant()
    def caps_hold(self) -> None:
        by_generation: Counter[int] = Counter()
        for job in self.paths.base.jobs():
            starts = [StartRecord.model_validate(read_json(path)) for _, path in job.starts()]
            assert all(count <= CAPS[ending] for ending, count in Counter(s.after for s in starts if s.after).items())
            if starts and (record := load_record(job)) is not None and record.state == "failed":
                by_generation[record.started_by] += 1
        assert all(count <= CLUSTER.max_attempts for count in by_generation.values())

    @initialize(answers=st.lists(st.sampled_from(["ok", "late", "lost answer", "lost question"]), max_size=2))
    def begin(self, answers: list[Any]) -> None:
        self.slurm.answers = answers
        self.tick(self.controllers[-1])

    def healthy_world_ends_the_work(self) -> None:
        """Slurm answers, what waits runs, what runs ends well, what was forgotten ends silently: then the work is done or has failed for good."""
        self.slurm.down, self.slurm.accounting_is, self.slurm.answers, self.slurm.reused = False, "ok", [], []
        controller = self.controllers[-1]
        for _ in range(120):
            for job in self.live():
                if job.forgotten:
                    job.dead = True
                elif job.visible_at <= self.now:
                    self.runs(job)
                    for process in [p for p in self.processes if p.job is job][-1:]:
                        self.writes(process, "done")
            self.processes = [p for p in self.processes if p.job.lives]
            self.now += 60
            self.tick(controller)
            self.nothing_is_submitted_beside_a_visible_job()
            self.what_is_committed_stays()
            self.caps_hold()
            jobs = self.paths.base.jobs()
            record = load_record(jobs[-1]) if jobs else None
            if record is not None and (record.state == "done" or controller.blocked):
                assert record.state == "done" or record.error
                return
        raise AssertionError(f"no end: {[(j.root.name, controller.dispatch.observe(j)) for j in self.paths.base.jobs()]}, {self.slurm.jobs}")


def test_histories() -> None:
    """A few hundred steps of each kind; HISTORIES=n tries n histories."""
    number = int(os.environ.get("HISTORIES", "120"))
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=number, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)),
    )


def test_every_state_word_is_tried() -> None:
    """The words above are all that states.py knows to be an end."""
    from evo_hpc.dispatch.slurm.states import LIVES

    assert {word for word, lives in LIVES.items() if lives == "terminal"} == set(ENDS)
    assert all(life(word) != "terminal" for word in LIVELY)
