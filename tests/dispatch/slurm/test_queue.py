"""The queue in memory: how many questions it puts, what it makes of lags, gaps and failures; a fake Slurm with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.dispatch.slurm.errors import NoAccounting, SlurmMissing, SlurmUnavailable
from evo_hpc.dispatch.slurm.parse import Listing
from evo_hpc.dispatch.slurm.queue import LAG_SECONDS, LONGEST_BACKOFF_SECONDS, MARGIN_SECONDS, OUTAGE_SECONDS, SKEW_SECONDS, Queue
from evo_hpc.dispatch.slurm.records import SlurmJob

POLL = 10.0
NOW = 1_000_000.0


class Cluster:
    """What squeue and sacct would say, and how often they were asked."""

    def __init__(self) -> None:
        self.now = NOW
        self.live: list[SlurmJob] = []
        self.accounts: list[SlurmJob] = []
        self.problems: tuple[str, ...] = ()
        self.fails: Exception | None = None
        self.accounting_fails: Exception | None = None
        self.seconds = 0.0
        self.asked: list[float] = []
        self.sacct: list[tuple[float, float]] = []

    def queue(self) -> Listing:
        self.asked.append(self.now)
        self.now += self.seconds
        if self.fails is not None:
            raise self.fails
        return Listing(self.live, self.problems)

    def accounting(self, since: float) -> Listing:
        self.sacct.append((self.now, since))
        if self.accounting_fails is not None:
            raise self.accounting_fails
        return Listing([job for job in self.accounts if job.ended is None or job.ended >= since])

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def queue(cluster: Cluster) -> Queue:
    return Queue(cluster, POLL, now=lambda: cluster.now)


def job(state: str = "RUNNING", name: str = "evo-job-s0", index: int | None = None, job_id: str = "5", submitted: float = NOW,
    **more: object) -> SlurmJob:
    return SlurmJob(name, job_id, index, state, submitted, **more)  # type: ignore[arg-type]


def ended(state: str = "COMPLETED", at: float = NOW + 5, **more: object) -> SlurmJob:
    return job(state, ended=at, source="sacct", **{"exit_code": 0, **more})  # type: ignore[arg-type]


def look(queue: Queue, name: str = "evo-job-s0", index: int | None = None, since: float = NOW) -> list[str]:
    return [found.state for found in queue.look(name, index, since).jobs]


def test_live_jobs_cost_one_squeue_an_interval_and_no_sacct(cluster: Cluster, queue: Queue) -> None:
    cluster.live = [job(name=f"evo-{n}", job_id=str(n)) for n in range(300)]
    for _ in range(3):
        for n in range(300):
            assert look(queue, f"evo-{n}") == ["RUNNING"]
            cluster.pass_(0.01)
        cluster.pass_(POLL - 3)
    assert len(cluster.asked) == 3 and cluster.sacct == []
    assert queue.look("evo-7", None, NOW).accounting == "not asked"


def test_jobs_that_are_over_cost_one_sacct_an_interval(cluster: Cluster, queue: Queue) -> None:
    cluster.accounts = [ended(name=f"evo-{n}", job_id=str(n)) for n in range(300)]
    for _ in range(3):
        for n in range(300):
            assert look(queue, f"evo-{n}", since=NOW + n) == ["COMPLETED"] if n < SKEW_SECONDS else True
        cluster.pass_(POLL)
    assert (len(cluster.asked), len(cluster.sacct)) == (3, 3)
    assert cluster.sacct[-1][1] == NOW - MARGIN_SECONDS


def test_an_earlier_job_costs_one_more_sacct(cluster: Cluster, queue: Queue) -> None:
    old = NOW - 30 * MARGIN_SECONDS
    cluster.accounts = [ended(name="old", submitted=old, at=old + 5)]
    look(queue, "new")
    look(queue, "a day", since=NOW - MARGIN_SECONDS / 4)  # within the margin of the first question
    assert len(cluster.sacct) == 1
    assert look(queue, "old", since=old) == ["COMPLETED"]
    assert look(queue, "old", since=old) == ["COMPLETED"]
    assert len(cluster.sacct) == 2


@given(st.lists(st.floats(0, 400 * MARGIN_SECONDS), min_size=1, max_size=300), st.booleans())
def test_the_number_of_questions_is_bounded_in_any_order_of_jobs(ages: list[float], downwards: bool) -> None:
    cluster = Cluster()
    queue = Queue(cluster, POLL, now=lambda: cluster.now)
    for age in sorted(ages) if downwards else ages:
        found = queue.look("evo", None, NOW - age)
        assert found.accounting == "ok" and min(since for _, since in cluster.sacct) <= NOW - age - MARGIN_SECONDS / 2
    assert len(cluster.asked) == 1 and len(cluster.sacct) <= 12


@given(st.lists(st.tuples(st.floats(0, 60), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_questions_are_never_closer_than_the_interval_and_looks_never_raise(history: list[tuple[float, bool, bool, bool]]) -> None:
    cluster = Cluster()
    queue = Queue(cluster, POLL, now=lambda: cluster.now)
    for wait, squeue_fails, sacct_fails, lives in history:
        cluster.pass_(wait)
        cluster.fails = SlurmUnavailable("down") if squeue_fails else None
        cluster.accounting_fails = SlurmUnavailable("down") if sacct_fails else None
        cluster.live = [job()] if lives else []
        found = queue.look("evo-job-s0", None, NOW)
        assert found.error is not None or found.asked_at is not None
        assert found.asked_at is None or cluster.now - found.asked_at < POLL or found.error is not None
    for asked in (cluster.asked, [at for at, _ in cluster.sacct]):
        assert all(later - earlier >= POLL for earlier, later in zip(asked, asked[1:], strict=False))


def test_failures_are_asked_about_less_and_less_often(cluster: Cluster, queue: Queue) -> None:
    cluster.live = [job()]
    assert look(queue) == ["RUNNING"]
    cluster.fails = SlurmUnavailable("squeue: nobody there")
    for _ in range(700):
        cluster.pass_(1)
        found = queue.look("evo-job-s0", None, NOW)
        assert [each.state for each in found.jobs] == ["RUNNING"] and found.asked_at == NOW  # as last seen
    assert found.error == "squeue: nobody there"
    gaps = [later - earlier for earlier, later in zip(cluster.asked, cluster.asked[1:], strict=False)]
    assert gaps == [10, 20, 40, 80, *[LONGEST_BACKOFF_SECONDS] * (len(gaps) - 4)] and len(gaps) > 6
    cluster.fails = None
    cluster.pass_(LONGEST_BACKOFF_SECONDS)
    assert queue.look("evo-job-s0", None, NOW).error is None
    before = len(cluster.asked)
    cluster.pass_(POLL)
    look(queue)
    assert len(cluster.asked) == before + 1


def test_a_slow_squeue_is_not_asked_at_every_look(cluster: Cluster, queue: Queue) -> None:
    cluster.seconds, cluster.live = 3 * POLL, [job()]
    for _ in range(20):
        look(queue)
    assert len(cluster.asked) == 1


def test_a_clock_that_is_set_back_does_not_silence_it(cluster: Cluster, queue: Queue) -> None:
    look(queue)
    cluster.pass_(-7200)
    look(queue, since=NOW - 9000)
    assert len(cluster.asked) == 2


def test_after_a_submission_the_next_look_is_a_fresh_one(cluster: Cluster, queue: Queue) -> None:
    assert look(queue) == []
    cluster.pass_(1)
    cluster.live = [job(submitted=NOW + 1)]
    assert look(queue) == []
    queue.invalidate()
    assert look(queue) == ["RUNNING"] and look(queue) == ["RUNNING"]
    assert len(cluster.asked) == 2


def test_a_failing_squeue_keeps_its_time_after_a_submission(cluster: Cluster, queue: Queue) -> None:
    cluster.fails = SlurmUnavailable("down")
    look(queue)
    queue.invalidate()
    look(queue)
    assert len(cluster.asked) == 1


def test_names_and_indexes_are_exact_and_older_jobs_are_of_others(cluster: Cluster, queue: Queue) -> None:
    cluster.live = [
        job(name="evo-job-s01", job_id="1"), job(index=1, job_id="2"), job(index=10, job_id="2"), job(job_id="3", submitted=NOW - SKEW_SECONDS - 1),
        job(job_id="4", submitted=NOW - SKEW_SECONDS), job("PENDING", job_id="6", submitted=NOW + 50),
    ]
    assert [found.job_id for found in queue.look("evo-job-s0", None, NOW).jobs] == ["4", "6"]
    assert [found.id for found in queue.look("evo-job-s0", 1, NOW).jobs] == ["2_1"]


def test_an_end_that_accounting_has_not_heard_of(cluster: Cluster, queue: Queue) -> None:
    cluster.live, cluster.accounts = [job()], [job(source="sacct")]
    assert look(queue) == ["RUNNING"]
    cluster.live = []
    cluster.pass_(POLL)
    assert look(queue) == ["RUNNING"]
    cluster.accounts = [ended("FAILED", exit_code=2)]
    cluster.pass_(POLL)
    (found,) = queue.look("evo-job-s0", None, NOW).jobs
    assert (found.state, found.exit_code, found.source) == ("FAILED", 2, "sacct")


def test_squeue_tells_of_the_end_and_accounting_of_the_exit_code(cluster: Cluster, queue: Queue) -> None:
    cluster.live, cluster.accounts = [job("FAILED", reason="OutOfMemory", ended=NOW + 5)], [job(source="sacct")]
    assert look(queue) == ["FAILED"]
    cluster.accounts = [ended("FAILED", exit_code=0, signal=9)]
    cluster.pass_(POLL)
    (found,) = queue.look("evo-job-s0", None, NOW).jobs
    assert (found.reason, found.signal) == ("OutOfMemory", 9)


@pytest.mark.parametrize("past", ["PREEMPTED", "NODE_FAIL", "REQUEUED", "CANCELLED"])
def test_a_run_before_a_requeue_is_no_end(cluster: Cluster, queue: Queue, past: str) -> None:
    cluster.live, cluster.accounts = [job("PENDING", submitted=NOW + 20)], [ended(past, at=NOW + 20)]
    assert look(queue) == ["PENDING"]
    cluster.live = [job("FAILED", submitted=NOW + 20, ended=NOW + 30)]
    cluster.pass_(POLL)
    (found,) = queue.look("evo-job-s0", None, NOW).jobs
    assert (found.state, found.submitted) == ("FAILED", NOW + 20)
    cluster.live, cluster.accounts = [], [*cluster.accounts, ended("TIMEOUT", submitted=NOW + 20, at=NOW + 30)]
    cluster.pass_(POLL)
    assert look(queue) == ["TIMEOUT"]
    assert [(run.state, run.submitted) for run in queue.runs("evo-job-s0", None, NOW)] == [(past, NOW), ("TIMEOUT", NOW + 20)]


def test_a_live_squeue_outranks_an_end_in_accounting(cluster: Cluster, queue: Queue) -> None:
    cluster.live, cluster.accounts = [job("COMPLETING")], [ended("NODE_FAIL")]
    look(queue, "another")
    assert look(queue) == ["COMPLETING"]


@pytest.mark.parametrize(("accounting", "fails", "seconds"), [
    ([], None, LAG_SECONDS), ([job(source="sacct")], None, LAG_SECONDS), ([], NoAccounting("disabled"), LAG_SECONDS),
    ([], SlurmUnavailable("down"), OUTAGE_SECONDS),
])
def test_a_job_that_slurm_lost_is_given_up_after_a_while(cluster: Cluster, queue: Queue, accounting: list[SlurmJob], fails: Exception | None,
    seconds: float) -> None:
    cluster.live, cluster.accounts, cluster.accounting_fails = [job()], accounting, fails
    assert look(queue) == ["RUNNING"]
    cluster.live = []
    cluster.pass_(POLL)
    gone = cluster.now
    while cluster.now - gone <= seconds:
        assert look(queue) == ["RUNNING"]
        cluster.pass_(POLL)
    assert look(queue) == []
    cluster.live = [job()]
    cluster.pass_(POLL)
    assert look(queue) == ["RUNNING"]


def test_an_end_that_squeue_showed_is_kept_without_accounting(cluster: Cluster, queue: Queue) -> None:
    cluster.live, cluster.accounting_fails = [job("CANCELLED", ended=NOW + 1)], NoAccounting("Slurm accounting storage is disabled")
    assert queue.look("evo-job-s0", None, NOW).accounting == "absent"
    cluster.live = []
    for _ in range(100):
        cluster.pass_(POLL)
        assert look(queue) == ["CANCELLED"]
    assert len(cluster.sacct) <= 1 + 100 * POLL / LONGEST_BACKOFF_SECONDS


def test_what_accounting_said_last_stands_while_it_fails(cluster: Cluster, queue: Queue) -> None:
    cluster.accounts = [ended()]
    assert look(queue) == ["COMPLETED"]
    cluster.accounting_fails = SlurmUnavailable("down")
    cluster.pass_(POLL)
    found = queue.look("evo-job-s0", None, NOW)
    assert [each.state for each in found.jobs] == ["COMPLETED"] and (found.accounting, found.accounting_at) == ("failed", NOW)


def test_lines_that_cannot_be_read_are_counted_and_said_once(cluster: Cluster, queue: Queue) -> None:
    cluster.live, cluster.problems = [job()], ("odd\x1b line",)
    assert look(queue) == ["RUNNING"] and queue.problems == 1
    (warning,) = queue.warnings()
    assert "odd line" in warning or "odd  line" in warning
    cluster.pass_(POLL)
    look(queue)
    assert queue.problems == 2 and queue.warnings() == []


def test_a_line_about_a_job_that_cannot_be_read_leaves_its_fate_open(cluster: Cluster, queue: Queue) -> None:
    cluster.live, cluster.problems = [job(name="other")], ("5|?|evo-job-s0|RUNNING",)
    found = queue.look("evo-job-s0", None, NOW)
    assert found.asked_at is None and "cannot be read" in str(found.error)
    assert queue.look("other", None, NOW).error is None


def test_an_answer_without_a_readable_line_is_no_empty_queue(cluster: Cluster, queue: Queue) -> None:
    cluster.live = [job()]
    look(queue)
    cluster.live, cluster.problems = [], ("JOBID PARTITION NAME", "5 debug evo-job-s0")
    cluster.pass_(POLL)
    found = queue.look("another", None, NOW)
    assert found.error is not None and found.asked_at == NOW


def test_no_squeue_at_all_is_told_at_once_and_later_waited_for(cluster: Cluster, queue: Queue) -> None:
    cluster.fails = SlurmMissing("squeue: no such program")
    with pytest.raises(SlurmMissing):
        look(queue)
    cluster.fails = None
    cluster.pass_(POLL)
    look(queue)
    cluster.fails = SlurmMissing("squeue: no such program")
    cluster.pass_(POLL)
    assert "gone" in str(queue.look("evo-job-s0", None, NOW).error)


STATES = st.sampled_from(["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "NEW_WORD"])
ENDS = st.sampled_from(["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"])


@given(st.lists(st.tuples(st.none() | STATES | ENDS, st.none() | ENDS, st.booleans()), min_size=1, max_size=40))
def test_of_any_history(history: list[tuple[str | None, str | None, bool]]) -> None:
    """A job that an answered squeue shows live is shown so; one that was ever seen has one record until it is given up."""
    cluster = Cluster()
    queue = Queue(cluster, POLL, now=lambda: cluster.now)
    for shown, accounted, fails in history:
        cluster.live = [job(shown)] if shown is not None else []
        cluster.accounts = [ended(accounted)] if accounted is not None else []
        cluster.fails = SlurmUnavailable("down") if fails else None
        found = queue.look("evo-job-s0", None, NOW)
        assert len(found.jobs) <= 1 and all(each.job_id == "5" for each in found.jobs)
        if shown is not None and found.error is None:
            (one,) = found.jobs
            live = shown in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "NEW_WORD")
            assert one.state == shown if live or accounted is None else one.state in (shown, accounted)
        cluster.pass_(LONGEST_BACKOFF_SECONDS)


def seconds_of(act: Callable[[], object]) -> float:
    begin = time.process_time()
    act()
    return time.process_time() - begin


def test_a_look_costs_the_same_whatever_the_number_of_jobs() -> None:
    def cost(count: int) -> float:
        cluster = Cluster()
        cluster.live = [job(name=f"evo-{n}", job_id=str(n)) for n in range(count)]
        cluster.accounts = [replace(ended(), name=f"over-{n}", job_id=str(count + n)) for n in range(10 * count)]
        queue = Queue(cluster, POLL, now=lambda: cluster.now)
        names = ["evo-1", "over-1"] * 500
        queue.look("over-1", None, NOW)
        return min(seconds_of(lambda: [queue.look(name, None, NOW) for name in names]) for _ in range(5)) / len(names)

    few, many = cost(10), cost(2000)
    assert many < 3 * few + 5e-6 and many < 200e-6
