"""The controller as a Slurm job: one at a time, found again after an uncertain end, handed over before its limit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evo_hpc.config.slurm import Slurm
from evo_hpc.controller import hand_over as handing_over
from evo_hpc.controller import launch as subject
from evo_hpc.controller import ownership
from evo_hpc.controller.hand_over import HandOver, NotHandedOver, Standby, cancel_successors, hand_over
from evo_hpc.controller.launch import (
    ControllerLives, LaunchRecord, LaunchUncertain, Script, controller_name, dry_run, launch,
)
from evo_hpc.dispatch.slurm.errors import SlurmBusy, SlurmRefused, SlurmUnavailable
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json, write_json, write_json_once
from evo_hpc.store.lease import Owner
from evo_hpc.store.processes import ProcessIdentity
from tests.crash.campaign import make_campaign

DOWN = SlurmUnavailable("sbatch: Socket timed out on send/recv operation")


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class FakeSlurm:
    """Commands and sbatch: a queue, and what each call answers in turn."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.jobs = clock, list[SlurmJob]()
        self.requeues: list[Exception | None] = []
        """What `scontrol requeue` answers, the last for ever."""
        self.submissions: list[Exception | str] = ["100"]
        self.late: Callable[[], None] = lambda: None
        """What happens in Slurm whenever it is asked."""
        self.cancelled: list[str] = []
        self.submitted: list[str] = []

    def queue(self) -> list[SlurmJob]:
        self.late()
        return list(self.jobs)

    def cancel(self, ids: list[str]) -> None:
        self.cancelled += ids

    def requeue(self, job_id: str) -> None:
        answer = self.requeues.pop(0) if len(self.requeues) > 1 else self.requeues[0]
        if answer is not None:
            raise answer

    def submit(self, environment: dict[str, str], text: str, path: Path, *, seconds: float) -> str:
        path.write_text(text)
        self.submitted.append(text)
        answer = self.submissions.pop(0) if len(self.submissions) > 1 else self.submissions[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def add(self, name: str, job_id: str, state: str = "PENDING", *, submitted: float | None = None, reason: str = "") -> None:
        self.jobs.append(SlurmJob(name, job_id, None, state, self.clock.time if submitted is None else submitted, reason))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slurm(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(clock)
    for module in (subject, handing_over):
        monkeypatch.setattr(module, "submit", fake.submit)
    return fake


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    return make_campaign(tmp_path / "it's %j", executor="slurm", slurm={"controller": {"partition": "long", "minutes": 600}, "shards": 3})


def go(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock, **more: bool | str) -> subject.Launched:
    return launch(paths, commands=slurm, now=clock.now, sleep=clock.sleep, **more)  # type: ignore[arg-type]


def name_of(paths: CampaignPaths) -> str:
    return controller_name(paths, "crash")


def own(paths: CampaignPaths, clock: Clock, *, host: str = socket.gethostname(), **fields: object) -> None:
    """Have somebody own the campaign: on this host the process of this test."""
    owner = Owner(generation=1, process=ProcessIdentity.current().model_copy(update={"host": host}), acquired_at=clock.time, heartbeat_at=clock.time)
    owner = owner.model_copy(update=fields)
    write_json_once(paths.generation(1), owner.model_dump())
    write_json(paths.lease, owner.model_dump())


def files(paths: CampaignPaths) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in paths.root.rglob("*") if path.is_file()}


def test_a_launch_is_on_disk_before_it_is_submitted(
    paths: CampaignPaths, slurm: FakeSlurm, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def submit(*arguments: Any, **more: Any) -> str:
        seen.append(read_json(paths.launch(0)))
        return slurm.submit(*arguments, **more)

    monkeypatch.setattr(subject, "submit", submit)
    launched = go(paths, slurm, clock, until="v0001")
    assert seen == [{"number": 0, "slurm_name": name_of(paths), "written_at": clock.time}]
    assert (launched.job_id, launched.script, launched.log, launched.note) == ("100", paths.controller_script, paths.controller_log, "")
    script = paths.controller_script.read_text()
    assert f"#SBATCH --job-name={name_of(paths)}" in script and "--partition=long" in script and "--dependency=singleton" in script
    assert "--until v0001" in script and "--take-over" not in script
    assert LaunchRecord.model_validate(read_json(paths.launch(0))) == launched.record


def test_each_launch_has_a_number(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    go(paths, slurm, clock)
    assert go(paths, slurm, clock, take_over=True).record.number == 1
    assert "--take-over" in paths.controller_script.read_text()


def test_the_name_is_the_campaigns_and_the_folders(paths: CampaignPaths, tmp_path: Path) -> None:
    assert re.fullmatch("evo-crash-[0-9a-f]{8}-controller", name_of(paths))
    assert controller_name(CampaignPaths(tmp_path / "copy"), "crash") != name_of(paths)


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [("RUNNING", "None", ("tail -f", "evo-hpc stop")), ("PENDING", "Priority", ("Priority", "scancel 55")), ("COMPLETING", "", ("tail -f",)),
     ("REQUEUE_HOLD", "", ("scancel 55",))],
)
def test_a_second_is_refused_while_the_first_is_in_the_queue(
    paths: CampaignPaths, slurm: FakeSlurm, clock: Clock, state: str, reason: str, says: tuple[str, ...]
) -> None:
    slurm.add(name_of(paths), "55", state, reason=reason)
    before = files(paths)
    with pytest.raises(ControllerLives) as caught:
        go(paths, slurm, clock)
    assert all(words in str(caught.value) for words in ("Slurm job 55", state, *says))
    assert (slurm.submitted, files(paths)) == ([], before)


def test_ended_controllers_and_other_campaigns_are_no_hindrance(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.add(name_of(paths), "55", "COMPLETED")
    slurm.add(name_of(paths), "56", "PREEMPTED")
    slurm.add("evo-crash-01234567-controller", "57", "RUNNING")
    assert go(paths, slurm, clock).job_id == "100"


def test_one_is_refused_while_an_owner_lives_here(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    own(paths, clock)
    with pytest.raises(ControllerLives, match=f"process {os.getpid()} on .*evo-hpc stop"):
        go(paths, slurm, clock)
    write_json(paths.lease, {**read_json(paths.lease), "released": True})
    assert go(paths, slurm, clock).job_id == "100"


def test_an_owner_elsewhere_is_judged_by_its_slurm_job(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    own(paths, clock, host="n7", slurm_job_id="55", slurm_job_name="by-hand")
    slurm.add("by-hand", "55", "RUNNING")
    clock.sleep(10_000)
    with pytest.raises(ControllerLives, match="Slurm job 55"):
        go(paths, slurm, clock)
    slurm.jobs = []
    slurm.add("of-somebody-else", "55", "RUNNING")  # the id was used again
    assert go(paths, slurm, clock).job_id == "100"


def test_a_silent_owner_elsewhere_needs_a_word(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    own(paths, clock, host="login2")
    with pytest.raises(ControllerLives, match="a controller runs"):
        go(paths, slurm, clock, take_over=True)
    clock.sleep(10_000)
    with pytest.raises(ControllerLives, match="--take-over"):
        go(paths, slurm, clock)
    assert go(paths, slurm, clock, take_over=True).job_id == "100"


def test_a_bad_campaign_is_refused_before_slurm_is_asked(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.late = lambda: pytest.fail("asked")
    paths.recipe_yaml.write_text("steps: many\n")
    with pytest.raises(UserError, match=r"recipe.yaml:1"):
        go(paths, slurm, clock)


def test_what_sbatch_refuses_is_passed_on(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.submissions = [SlurmRefused("sbatch: invalid partition specified: long")]
    with pytest.raises(SlurmRefused, match="invalid partition"):
        go(paths, slurm, clock)


def test_after_an_uncertain_end_the_job_is_looked_for(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.submissions = [DOWN]
    slurm.add(name_of(paths), "7", "COMPLETED", submitted=clock.time - 3600)  # an earlier launch
    began = clock.time

    def late() -> None:
        if clock.time >= began + 9 and len(slurm.jobs) == 1:
            slurm.add(name_of(paths), "8", submitted=began - 20)  # Slurm's host is 20 s behind

    slurm.late = late
    launched = go(paths, slurm, clock)
    assert launched.job_id == "8" and "did not answer" in launched.note


def test_an_uncertain_end_without_a_job_is_said(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.submissions = [DOWN]
    began = clock.time
    with pytest.raises(LaunchUncertain, match=f"squeue --name={name_of(paths)}"):
        go(paths, slurm, clock)
    assert 60 <= clock.time - began < 70
    assert len(slurm.submitted) == 1, "never twice by itself"


def test_a_dry_run_shows_every_script_and_writes_nothing(paths: CampaignPaths) -> None:
    before = files(paths)
    shown = dry_run(paths, until="v0001")
    assert files(paths) == before and not paths.controller.exists()
    assert [script.path for script in shown] == [
        paths.controller_script, paths.base.job("supervise", 0).script(0), paths.version("v0001").job("train", 0).script(0),
        paths.version("v0001").job("evaluate", 0, 0).script(0),
    ]
    assert len({script.name for script in shown}) == 4 and all(f"--job-name={script.name}" in script.text for script in shown)
    assert "--array=0-2" in shown[-1].text and "--array" not in shown[-2].text


def test_a_dry_run_shows_the_analysis_where_that_is_a_job(paths: CampaignPaths) -> None:
    settings = read_json(paths.cluster_yaml)
    paths.cluster_yaml.write_text(json.dumps({**settings, "slurm": {**settings["slurm"], "analyse": {"memory": "8G"}}}))
    shown = dry_run(paths, until="v0001")
    assert shown[-1].path == paths.version("v0001").job("analyse", 0).script(0) and "--mem=8G" in shown[-1].text and len(shown) == 5


def test_the_dry_run_is_what_is_submitted(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    shown = dry_run(paths)[0]
    go(paths, slurm, clock)
    assert shown == Script(name_of(paths), paths.controller_script, slurm.submitted[0])


def test_with_jobs_on_one_machine_there_is_one_script(paths: CampaignPaths) -> None:
    cluster = json.loads(paths.cluster_yaml.read_text())
    paths.cluster_yaml.write_text(json.dumps({**cluster, "executor": "local"}))
    assert [script.path for script in dry_run(paths)] == [paths.controller_script]


def give(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> HandOver:
    return hand_over(paths, Slurm(), slurm, name=name_of(paths), own_id="55", seconds=60, now=clock.now, sleep=clock.sleep)  # type: ignore[arg-type]


@pytest.fixture
def running(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> CampaignPaths:
    """Launched once, as job 55."""
    go(paths, slurm, clock)
    slurm.submitted.clear()
    slurm.add(name_of(paths), "55", "RUNNING")
    return paths


def test_a_controller_is_requeued_where_that_is_allowed(running: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.requeues = [DOWN, None]
    assert give(running, slurm, clock) == HandOver("requeued", "55")
    assert not slurm.submitted and len(running.launches()) == 1


def test_else_a_successor_waits_for_its_end(running: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    script = running.controller_script.read_text()
    slurm.requeues, slurm.submissions = [SlurmRefused("Requested operation is presently disabled")], [SlurmBusy("QOSMaxSubmitJobPerUserLimit"), "101"]
    assert give(running, slurm, clock) == HandOver("successor", "101")
    assert slurm.submitted == [script, script] and len(running.launches()) == 2


def test_a_successor_that_nobody_confirmed_is_found(running: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.requeues, slurm.submissions = [SlurmRefused("disabled")], [DOWN]
    slurm.add(name_of(running), "102")
    assert give(running, slurm, clock) == HandOver("successor", "102")
    assert len(slurm.submitted) == 1


def test_with_slurm_away_it_ends_in_time_and_says_what_to_do(running: CampaignPaths, slurm: FakeSlurm, clock: Clock) -> None:
    slurm.requeues, slurm.submissions = [DOWN], [DOWN]
    began = clock.time
    with pytest.raises(NotHandedOver, match="evo-hpc launch"):
        give(running, slurm, clock)
    assert clock.time - began <= 60 and slurm.submitted, "both ways were tried"


def test_a_started_controller_cancels_those_that_wait_for_it(paths: CampaignPaths, slurm: FakeSlurm) -> None:
    name = name_of(paths)
    for job_id, state in (("55", "PENDING"), ("56", "PENDING"), ("57", "RUNNING"), ("58", "COMPLETED"), ("59", "REQUEUE_HOLD")):
        slurm.add(name, job_id, state)
    slurm.add("somebody-elses", "60")
    assert cancel_successors(slurm, name=name, own_id="55") == ["56", "59"] == slurm.cancelled  # type: ignore[arg-type]
    slurm.jobs.clear()
    assert cancel_successors(slurm, name=name, own_id="55") == []  # type: ignore[arg-type]


class Loop:
    """What stands by for a controller, and what became of it."""

    def __init__(self, answer: HandOver | Exception, patience: float = 0.2) -> None:
        self.warned, self.asked = threading.Event(), threading.Event()
        self.standby = Standby(self.warned.is_set, self.submit, patience)
        self.answer = answer
        self.standby.start()

    def submit(self) -> HandOver:
        self.asked.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_one_that_is_stopped_in_that_time_gets_none() -> None:
    loop = Loop(SUCCESSOR, patience=0.5)
    loop.warned.set()
    time.sleep(0.2)
    loop.warned.clear()  # what it asks is: warned, and not stopped
    assert not loop.asked.wait(1.5) and loop.standby.end() is None


@pytest.mark.parametrize("signum, later, stop", [
    (signal.SIGTERM, 5.0, True), (signal.SIGTERM, 111.0, False), (signal.SIGTERM, 500.0, False), (signal.SIGINT, 500.0, True), (None, 0.0, True),
])
def test_the_end_that_was_warned_of_is_no_wish_to_stop(monkeypatch: pytest.MonkeyPatch, signum: int | None, later: float, stop: bool) -> None:
    """Slurm sends SIGTERM then, as scancel does."""
    now = [1000.0]
    monkeypatch.setattr(ownership, "_WARNINGS", (signal.SIGUSR1,))
    monkeypatch.setattr(ownership, "time", SimpleNamespace(monotonic=lambda: now[0]))
    owner = ownership.Ownership(None)  # type: ignore[arg-type]
    if signum is not None:
        owner.signalled(signal.SIGUSR1, 120.0)
        now[0] += later / 2
        owner.signalled(signal.SIGUSR1, 120.0)  # warned twice
        now[0] += later / 2
    owner.signalled(signum or signal.SIGTERM, 120.0)
    assert (owner.stop is not None) == stop and owner.warned == (signum is not None)


SUCCESSOR = HandOver("successor", "101")


def test_a_controller_that_is_busy_when_it_is_warned_gets_a_successor() -> None:
    loop = Loop(SUCCESSOR)
    loop.warned.set()
    assert loop.asked.wait(10) and loop.standby.end() == SUCCESSOR


def test_one_that_lets_go_in_time_hands_over_itself() -> None:
    loop = Loop(SUCCESSOR, patience=60)
    loop.warned.set()
    assert loop.standby.end() is None and not loop.asked.is_set()


def test_without_a_warning_nobody_stands_in() -> None:
    loop = Loop(SUCCESSOR, patience=0)
    assert not loop.asked.wait(1) and loop.standby.end() is None


def test_where_the_successor_is_refused_the_loop_tries_again() -> None:
    loop = Loop(NotHandedOver("no"))
    loop.warned.set()
    assert loop.asked.wait(10) and loop.standby.end() is None


def test_a_launch_is_a_new_try_after_failures(paths: CampaignPaths, slurm: FakeSlurm, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed under earlier controllers does not count against it."""
    owner = Owner(generation=4, process=ProcessIdentity(host="n1", boot="b", pid=1, start_ticks=1), acquired_at=clock.time, released=True)
    write_json_once(paths.generation(4), owner.model_dump())
    asked: list[int] = []
    plan = subject.make_plan
    monkeypatch.setattr(subject, "make_plan", lambda state, generation, until: (asked.append(generation), plan(state, generation, until))[1])
    go(paths, slurm, clock)
    assert asked == [5]
