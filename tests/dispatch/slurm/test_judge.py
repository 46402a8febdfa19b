"""What files and Slurm's answers mean together: every rule, and what must hold of any history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.attempt import Attempt
from evo_hpc.dispatch.slurm.judge import FRESH_BEAT_SECONDS, judge
from evo_hpc.dispatch.slurm.records import Found, SlurmJob
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.jobs.spec import Ended, Identity, Result, Start, Submission
from evo_hpc.paths import JobPaths
from evo_hpc.store.processes import ProcessIdentity

NOW = 1_000_000.0
SLURM = Slurm(settle_seconds=60, submit_seconds=20, backoff_seconds=15)
JOB = JobPaths(Path("/campaign/versions/v0001/jobs/train-000"))
PROCESS = ProcessIdentity(host="n1", boot="b", pid=7, start_ticks=1)


def start(number: int = 0, age: float = 100.0, **more: object) -> Start:
    return Start(number=number, generation=1, written_at=NOW - age, slurm_name=f"evo-c-d-v0001-train-000-s{number}", **more)  # type: ignore[arg-type]


def claim(number: int = 0, of: int = 0, restart: int = 0) -> tuple[int, Identity]:
    return number, Identity(job_name="j", generation=1, start=of, restart=restart, process=PROCESS, claimed_at=NOW - 90)


def attempt(**more: object) -> Attempt:
    plain = Attempt(JOB, None, (start(),), {0: Submission(number=0, job_id="5", written_at=NOW - 99)}, {}, (), {}, {}, {})
    return replace(plain, **more)  # type: ignore[arg-type]


def job(state: str, **more: object) -> SlurmJob:
    return replace(SlurmJob("evo-c-d-v0001-train-000-s0", "5", None, state, NOW - 99), **more)  # type: ignore[arg-type]


def found(*jobs: SlurmJob, asked: float | None = NOW - 1, **more: object) -> Found:
    return replace(Found(jobs, asked, "ok", asked), **more)  # type: ignore[arg-type]


def test_nothing_was_started() -> None:
    assert judge(attempt(starts=(), submissions={}), None, SLURM, NOW).phase == "planned"


@pytest.mark.parametrize("outcome", ["done", "failed"])
@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "CANCELLED", "FAILED", None])
def test_a_result_outranks_all_that_slurm_says(outcome: str, state: str | None) -> None:
    told = found(job(state)) if state else found(asked=None, error="down")
    status = judge(attempt(claims=(claim(),), results={0: Result(outcome=outcome)}), told, SLURM, NOW)  # type: ignore[arg-type]
    assert (status.phase, status.incarnation) == ("finished", 0)


@pytest.mark.parametrize("state, phase", [("PENDING", "queued"), ("REQUEUE_HOLD", "queued"), ("RUNNING", "running"), ("COMPLETING", "running")])
def test_a_live_job_is_live_even_after_it_has_saved(state: str, phase: str) -> None:
    """Stopped by a preemption, and in the queue again."""
    saved = attempt(claims=(claim(),), results={0: Result(outcome="stopped", stopped_by="warning")})
    status = judge(saved, found(job(state)), SLURM, NOW)
    assert (status.phase, status.slurm_id) == (phase, "5")


FAILED = Result(outcome="failed", blame="infrastructure", error="trainer exited with 1", finished_at=NOW - 30)


@pytest.mark.parametrize("state, asked, phase, endings", [
    ("RUNNING", 1.0, "running", ()), ("COMPLETING", 1.0, "running", ()), ("PENDING", 1.0, "queued", ()), ("NODE_FAIL", 1.0, "dead", ("node_fail",)),
    ("NODE_FAIL", 29.0, "unknown", ()), ("COMPLETED", 1.0, "finished", ()), ("FAILED", 1.0, "finished", ()), (None, 1.0, "finished", ()),
])
def test_a_failure_that_a_lost_node_may_explain_waits_for_slurms_word(state: str | None, asked: float, phase: str, endings: tuple[str, ...]) -> None:
    """Ranks notice sooner than Slurm, which then runs the very job again."""
    told = found(*[job(state, ended=NOW - 30)] if state else [], asked=NOW - asked)
    status = judge(attempt(claims=(claim(),), results={0: FAILED}, beats={0: NOW - 1}), told, SLURM, NOW)
    assert (status.phase, status.endings) == (phase, endings)


@pytest.mark.parametrize("told, phase", [(("PENDING",), "queued"), (("RUNNING",), "running"), (("NODE_FAIL",), "unknown"), ((), "unknown")])
def test_such_a_failure_stays_one_once_the_attempt_was_started_again(told: tuple[str, ...], phase: str) -> None:
    """Until the new start has claimed, the failed incarnation is the newest."""
    again = attempt(starts=(start(0), start(1, age=20, after="node_fail")), claims=(claim(),), results={0: FAILED},
                    submissions={1: Submission(number=1, job_id="6", written_at=NOW - 19)})
    status = judge(again, found(*[job(state, ended=NOW - 5) for state in told]), SLURM, NOW)
    assert (status.phase, status.incarnation) == (phase, None)


def test_a_failed_job_that_does_not_come_to_its_end_is_not_waited_for_for_ever() -> None:
    stuck = attempt(claims=(claim(),), results={0: FAILED.model_copy(update={"finished_at": NOW - 599})})
    assert judge(stuck, found(job("COMPLETING")), SLURM, NOW).phase == "running"
    assert judge(stuck, found(job("COMPLETING")), SLURM, NOW + 2).phase == "finished"


def test_only_what_the_machine_may_have_done_waits() -> None:
    running = found(job("RUNNING"))
    theirs = FAILED.model_copy(update={"blame": "user"})
    assert judge(attempt(claims=(claim(),), results={0: theirs}), running, SLURM, NOW).phase == "finished"
    again = attempt(claims=(claim(), claim(1, restart=1)), results={0: FAILED}, beats={1: NOW - 1})
    assert judge(again, running, SLURM, NOW).phase == "running", "the requeued one is what counts"
    down = found(job("RUNNING"), error="down")
    assert judge(attempt(claims=(claim(),), results={0: FAILED}), down, SLURM, NOW).phase == "running"
    never = found(asked=None, error="down")
    assert judge(attempt(claims=(claim(),), results={0: FAILED}), never, SLURM, NOW).phase == "unknown", "a new controller, which has not heard of it yet"
    assert judge(attempt(claims=(claim(),), results={0: FAILED}), never, SLURM, NOW + 600).phase == "finished"


def test_what_it_waits_for_is_said() -> None:
    status = judge(attempt(), found(job("PENDING", reason="JobHeldUser")), SLURM, NOW)
    assert "JobHeldUser" in status.said and "scontrol release" in status.said


def test_an_earlier_submissions_job_does_not_hide_the_requeued_one() -> None:
    ended, again = job("NODE_FAIL", ended=NOW - 50), job("RUNNING")
    assert judge(attempt(), found(ended, again), SLURM, NOW).phase == "running"


@pytest.mark.parametrize("state, exit_code, ending", [
    ("TIMEOUT", 0, "timeout"), ("PREEMPTED", 0, "preempted"), ("NODE_FAIL", 0, "node_fail"), ("OUT_OF_MEMORY", 0, "oom"),
    ("CANCELLED", 0, "user_cancelled"), ("FAILED", 1, "code_error"), ("FAILED", 127, "infrastructure"), ("BOOT_FAIL", 0, "node_fail"),
])
def test_an_end_without_a_result_is_typed(state: str, exit_code: int, ending: str) -> None:
    status = judge(attempt(), found(job(state, ended=NOW - 30, exit_code=exit_code)), SLURM, NOW)
    assert (status.phase, status.endings, status.ended) == ("dead", (ending,), True)


@pytest.mark.parametrize("ending", [None, "infrastructure"])
def test_what_the_controller_cancelled_was_nobodys_hand(ending: str | None) -> None:
    ours = {0: Ended(number=0, ending=ending, why="told to stop", written_at=NOW - 40)}  # type: ignore[arg-type]
    for told in (found(job("CANCELLED", ended=NOW - 30)), found()):
        status = judge(attempt(ended=ours), told, SLURM, NOW)
        assert (status.phase, status.endings, status.said) == ("dead", (ending,) if ending else (), "told to stop")
    beating = attempt(ended=ours, claims=(claim(),), beats={0: NOW - 31})
    assert judge(beating, found(job("CANCELLED", ended=NOW - 30)), SLURM, NOW).endings == ((ending,) if ending else ()), "it showed life until it was killed"
    assert judge(beating, found(), SLURM, NOW).phase == "running", "Slurm has forgotten it, and it may live"
    assert judge(attempt(ended=ours), found(job("RUNNING")), SLURM, NOW).phase == "running", "it was asked for, and is not done yet"


@pytest.mark.parametrize("by", ["controller", "warning"])
def test_what_a_person_cancelled_stays_so_where_it_had_time_to_save(by: str) -> None:
    """scancel sends SIGTERM first, which the job takes for the controller's stop."""
    saved = attempt(claims=(claim(),), results={0: Result(outcome="stopped", stopped_by=by)})  # type: ignore[arg-type]
    status = judge(saved, found(job("CANCELLED", ended=NOW - 30)), SLURM, NOW)
    assert (status.phase, status.endings, status.ended) == ("dead", ("user_cancelled",), True)
    ours = replace(saved, ended={0: Ended(number=0, ending=None, why="told to stop", written_at=NOW - 40)}, beats={0: NOW - 30})
    assert judge(ours, found(job("CANCELLED", ended=NOW - 30)), SLURM, NOW).endings == ()


def test_how_long_it_shows_no_life() -> None:
    silent = attempt(claims=(claim(),), beats={0: NOW - 700})
    assert judge(silent, found(job("RUNNING", started=NOW - 5000)), SLURM, NOW).silent == 700
    assert judge(silent, found(job("PENDING")), SLURM, NOW).silent == 0
    assert judge(attempt(), found(job("RUNNING", started=NOW - 50)), SLURM, NOW).silent == 50, "it has not claimed yet"


def test_a_suspended_job_is_not_silent() -> None:
    silent = attempt(claims=(claim(),), beats={0: NOW - 7000})
    assert judge(silent, found(job("SUSPENDED", started=NOW - 9000)), SLURM, NOW).silent == 0
    assert judge(silent, found(job("COMPLETING", started=NOW - 9000)), SLURM, NOW).silent == 0


def test_the_word_of_one_that_saved_is_waited_for() -> None:
    """It left with 75 once its result was written, which a network filesystem may hide for a while."""
    assert judge(attempt(claims=(claim(),)), found(job("FAILED", ended=NOW - 10, exit_code=75)), SLURM, NOW).phase == "unknown"
    assert judge(attempt(claims=(claim(),)), found(job("FAILED", ended=NOW - 70, exit_code=75)), SLURM, NOW).phase == "dead"


def test_one_that_was_stopped_and_saved_has_no_ending() -> None:
    saved = attempt(claims=(claim(),), results={0: Result(outcome="stopped")})
    status = judge(saved, found(job("FAILED", ended=NOW - 30, exit_code=75)), SLURM, NOW)
    assert (status.phase, status.endings, status.not_before) == ("dead", (), 0.0)


def test_a_late_result_is_waited_for() -> None:
    """A network filesystem can hide a new file for a while."""
    assert judge(attempt(), found(job("COMPLETED", ended=NOW - 10)), SLURM, NOW).phase == "unknown"
    assert judge(attempt(), found(job("COMPLETED", ended=NOW - 61)), SLURM, NOW).phase == "dead"


def test_a_job_that_slurm_may_run_again_is_waited_for() -> None:
    assert judge(attempt(), found(job("NODE_FAIL", ended=NOW - 5)), SLURM, NOW).phase == "unknown"


def test_accounting_alone_does_not_end_a_job() -> None:
    """While slurmctld is down, slurmdbd still says PREEMPTED of a job that is in the queue again."""
    told = found(job("PREEMPTED", ended=NOW - 500, source="sacct"), error="Unable to contact slurm controller")
    assert judge(attempt(), told, SLURM, NOW).phase == "unknown"


def test_a_submission_of_uncertain_end_has_time_to_show_up() -> None:
    unanswered = attempt(submissions={}, starts=(start(age=30),))
    assert judge(unanswered, found(), SLURM, NOW).phase == "unknown"
    assert judge(replace(unanswered, starts=(start(age=70),)), found(), SLURM, NOW).phase == "unknown", "sbatch may be trying yet"
    late = judge(replace(unanswered, starts=(start(age=90),)), found(), SLURM, NOW)
    assert (late.phase, late.endings) == ("dead", ("infrastructure",)) and "not taken" in late.said


def test_a_question_put_before_the_job_had_time_proves_nothing() -> None:
    unanswered = attempt(submissions={}, starts=(start(age=500),))
    assert judge(unanswered, found(asked=NOW - 490), SLURM, NOW).phase == "unknown"


def test_a_job_that_slurm_forgot_lives_by_its_heartbeat() -> None:
    """slurmctld restarted without it, or it is off the queue and there is no accounting."""
    alive = attempt(claims=(claim(),), beats={0: NOW - 3})
    assert judge(alive, found(accounting="absent"), SLURM, NOW).phase == "running"
    silent = judge(replace(alive, beats={0: NOW - FRESH_BEAT_SECONDS - 1}), found(accounting="absent"), SLURM, NOW)
    assert (silent.phase, silent.endings) == ("dead", ("infrastructure",))


def test_a_failing_queue_ends_nothing() -> None:
    for told in (None, found(asked=None, error="down"), found(asked=NOW - 200, error="down")):
        assert judge(attempt(), told, SLURM, NOW).phase == "unknown"


def test_a_refusal_is_the_users_and_a_full_queue_is_waited_for() -> None:
    refused = {0: Submission(number=0, refused="Invalid partition", written_at=NOW)}
    status = judge(attempt(submissions=refused), found(), SLURM, NOW)
    assert (status.phase, status.refused, status.said) == ("dead", True, "Invalid partition")
    busy = {0: Submission(number=0, refused="QOSMaxSubmitJobPerUserLimit", busy=True, written_at=NOW)}
    status = judge(attempt(submissions=busy), found(), SLURM, NOW)
    assert (status.refused, status.endings, status.not_before) == (False, (), NOW + 15)


def test_the_machines_failures_are_retried_later_and_later() -> None:
    starts = (start(0), start(1, after="node_fail"), start(2, after="infrastructure"))
    told = found(replace(job("NODE_FAIL", ended=NOW - 30), name="evo-c-d-v0001-train-000-s2"))
    assert judge(attempt(starts=starts), told, SLURM, NOW).not_before == NOW - 30 + 15 * 4
    preempted = judge(attempt(starts=starts), found(job("PREEMPTED", ended=NOW - 30)), SLURM, NOW)
    assert (preempted.not_before, preempted.endings) == (0.0, ("node_fail", "infrastructure", "preempted"))


def test_incarnations_that_came_no_further_are_counted() -> None:
    claims = tuple(claim(n, restart=n) for n in range(4))
    assert judge(attempt(claims=claims, steps={0: 3, 1: 7, 2: 7, 3: 5}), found(job("RUNNING")), SLURM, NOW).stale == 2


def test_a_task_of_an_array_is_named_as_slurm_names_it() -> None:
    shard = attempt(starts=(start(array_index=3),))
    assert judge(shard, found(job("RUNNING", array_index=3)), SLURM, NOW).slurm_id == "5_3"
    assert judge(shard, found(asked=None, error="down"), SLURM, NOW).slurm_id == "5_3"


STATES = ("PENDING", "RUNNING", "COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "REQUEUED",
          "REQUEUE_HOLD", "SUSPENDED", "SPECIAL_EXIT", "NEW_IN_SLURM_99")


@st.composite
def histories(draw: st.DrawFn) -> tuple[Attempt, Found | None]:
    age = st.floats(0, 10_000)
    n = draw(st.integers(1, 4))
    starts = tuple(start(i, draw(age), after=draw(st.sampled_from([None, "preempted", "node_fail", "infrastructure"])) if i else None) for i in range(n))
    submissions = {s.number: Submission(number=s.number, job_id="5", written_at=s.written_at) for s in starts if draw(st.booleans())}
    claims = tuple(claim(i, of=min(i, n - 1), restart=i) for i in range(draw(st.integers(0, 4))))
    results = {i: Result(outcome=draw(st.sampled_from(["done", "failed", "stopped"]))) for i, _ in claims if draw(st.booleans())}  # type: ignore[arg-type]
    beats = {i: NOW - draw(age) for i, _ in claims if draw(st.booleans())}
    made = attempt(starts=starts, submissions=submissions, claims=claims, results=results, beats=beats)
    if draw(st.integers(0, 9)) == 0:
        return made, None
    jobs = tuple(
        job(draw(st.sampled_from(STATES)), ended=draw(st.one_of(st.none(), age.map(lambda a: NOW - a))), source=draw(st.sampled_from(["squeue", "sacct"])))
        for _ in range(draw(st.integers(0, 3)))
    )
    asked = draw(st.one_of(st.none(), age.map(lambda a: NOW - a)))
    return made, Found(jobs, asked, draw(st.sampled_from(["ok", "absent", "failed", "not asked"])), asked, draw(st.sampled_from([None, "down"])))  # type: ignore[arg-type]


@given(histories())
def test_whatever_has_happened(history: tuple[Attempt, Found | None]) -> None:
    made, told = history
    status = judge(made, told, SLURM, NOW)
    last = made.starts[-1]
    final = made.claims and (result := made.results.get(made.claims[-1][0])) and result.outcome != "stopped"
    assert (status.phase == "finished") == bool(final), "the holder's own result decides, and nothing else does"
    if status.phase == "dead":
        assert told is not None and told.asked_at is not None, "nobody dies unasked"
        assert not any(life(j.state) != "terminal" for j in told.jobs), "nobody dies who is in the queue"
        known_end = bool(told.jobs)
        assert known_end or told.asked_at >= last.written_at + SLURM.settle_seconds, "nobody dies before he can have shown up"
        own = made.of_start(last.number)
        assert known_end or own is None or NOW - made.beats.get(own[0], 0) >= FRESH_BEAT_SECONDS, "nobody dies who shows life"
    assert status.starts == len(made.starts) and len(status.endings) <= len(made.starts)
