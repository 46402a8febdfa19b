"""What squeue and sacct print, read: recordings of a real cluster, odd lines, any text, and the time it takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evo_hpc.dispatch.slurm.parse import Listing, parse_accounting, parse_queue, parse_tres
from evo_hpc.dispatch.slurm.records import SlurmJob

RECORDED = Path(__file__).parent / "recorded"
QUEUE = parse_queue((RECORDED / "squeue.txt").read_text())
ACCOUNTING = parse_accounting((RECORDED / "sacct.txt").read_text())


def named(jobs: Listing, name: str) -> list[SlurmJob]:
    return [job for job in jobs if job.name == f"rec-{name}"]


def test_every_line_of_the_recordings_is_read() -> None:
    for jobs, file in ((QUEUE, "squeue.txt"), (ACCOUNTING, "sacct.txt")):
        assert jobs.problems == () and len(jobs) == len((RECORDED / file).read_text().splitlines())


@pytest.mark.parametrize(("name", "state", "reason"), [
    ("ok", "COMPLETED", ""), ("pipe|name", "FAILED", "NonZeroExitCode"), ("signal", "FAILED", "JobLaunchFailure"), ("held", "PENDING", "JobHeldUser"),
    ("cancel", "CANCELLED", ""), ("timeout", "TIMEOUT", "TimeLimit"), ("nodes", "RUNNING", ""), ("dependency", "PENDING", "DependencyNeverSatisfied"),
])
def test_squeue_tells_state_and_reason(name: str, state: str, reason: str) -> None:
    (job,) = named(QUEUE, name)
    assert (job.state, job.reason, job.array_index, job.source, job.id) == (state, reason, None, "squeue", job.job_id)


@pytest.mark.parametrize(("name", "state", "code", "signal"), [
    ("ok", "COMPLETED", 0, None), ("pipe|name", "FAILED", 3, None), ("code", "FAILED", 2, None), ("code-130", "FAILED", 2, None),
    ("code-137", "FAILED", 9, None), ("signal", "FAILED", 0, 9), ("log", "FAILED", 0, 53), ("cancel", "CANCELLED", 0, None),
    ("timeout", "TIMEOUT", 0, None), ("nodes", "RUNNING", None, None),
])
def test_sacct_tells_state_and_exit_code(name: str, state: str, code: int | None, signal: int | None) -> None:
    (job,) = named(ACCOUNTING, name)
    assert (job.state, job.exit_code, job.signal, job.source) == (state, code, signal, "sacct")


def test_times_are_those_that_were() -> None:
    for jobs in (QUEUE, ACCOUNTING):
        (over,), (running,) = named(jobs, "timeout"), named(jobs, "nodes")
        assert over.started is not None and over.ended is not None and over.submitted <= over.started <= over.ended
        assert running.started is not None and running.ended is None  # squeue shows the end of its limit
        assert running.nodes == "n[2-4]"
    (waiting,) = named(QUEUE, "held")
    assert waiting.started is None and waiting.ended is None


def test_a_requeued_job_has_a_record_of_each_run() -> None:
    first, second = named(ACCOUNTING, "requeue")
    assert first.job_id == second.job_id and first.state == "REQUEUED" and first.elapsed > 0 and first.submitted < second.submitted
    (now,) = named(QUEUE, "requeue")
    assert now.submitted == second.submitted  # a requeue is a submission of its own to both


def test_tasks_of_an_array_have_its_id_and_their_index() -> None:
    tasks = named(QUEUE, "array")
    (base,) = {job.job_id for job in tasks}
    assert sorted(job.id for job in tasks) == [f"{base}_{index}" for index in range(6)]
    assert {job.job_id for job in named(ACCOUNTING, "array")} == {base}
    assert {1: "CANCELLED", 0: "RUNNING"}.items() <= {job.array_index: job.state for job in named(ACCOUNTING, "array")}.items()


def test_allocated_gpus_and_memory() -> None:
    (job,) = named(ACCOUNTING, "gpu")
    assert job.tres == {"billing": 1.0, "cpu": 1.0, "gres/gpu": 2.0, "mem": 1500 * 2**20, "node": 1.0}
    assert parse_tres("mem=1.50T,gres/gpu:h100=8,energy=18446744073709551614,billing=2K") == {"mem": 1.5 * 2**40, "gres/gpu:h100": 8, "billing": 2048}
    assert parse_tres("") == {}


def accounted(shown: str = "7", state: str = "PENDING", name: str = "n", code: str = "0:0") -> Listing:
    return parse_accounting(f"7|{shown}|{name}|{state}|{code}|5|Unknown|Unknown|0||None assigned\n")


@pytest.mark.parametrize(("shown", "indexes"), [
    ("7_4", [4]), ("7_[2-4]", [2, 3, 4]), ("7_[2-4%2]", [2, 3, 4]), ("7_[1,5-6]", [1, 5, 6]), ("7_[0-10:5]", [0, 5, 10]), ("7", [None]),
])
def test_waiting_tasks_that_share_a_line(shown: str, indexes: list[int | None]) -> None:
    jobs = accounted(shown)
    assert [job.array_index for job in jobs] == indexes and {job.job_id for job in jobs} == {"7"} and jobs.problems == ()


@pytest.mark.parametrize("shown", ["7_[5-4]x", "7_[1-2:0]", "7_[0-999999999]", "7.batch", "7+1", "7_", ""])
def test_ids_that_are_not_understood_are_problems(shown: str) -> None:
    jobs = accounted(shown)
    assert list(jobs) == [] and len(jobs.problems) == 1


def test_the_canceller_is_no_part_of_the_state() -> None:
    assert [job.state for job in accounted(state="CANCELLED by 1000")] == ["CANCELLED"]


GOOD = "12|N/A|name|RUNNING|None|100|110|900|n1|1|12"


@pytest.mark.parametrize("line", [
    GOOD.replace("12|N/A", "x|N/A", 1), GOOD.replace("N/A", "first"), GOOD.replace("|100|", "|2026-11-30T08:00:00|"), GOOD.replace("|100|", "|N/A|"),
    GOOD.replace("RUNNING", "running"), GOOD.replace("|1|12", ""), GOOD.replace("12|", "１２|", 1), "slurm_load_jobs error: whatever", "|" * 20,
    GOOD.replace("100", "9" * 400),
])
def test_a_line_that_cannot_be_read_is_passed_over_and_kept(line: str) -> None:
    jobs = parse_queue(f"{GOOD}\n{line}\n{GOOD}\n")
    assert len(jobs) == 2 and jobs.problems == (line,)


@pytest.mark.parametrize(("middle", "name", "state", "reason"), [
    ("a|b|RUNNING|None", "a|b", "RUNNING", ""), ("a|PENDING|burst|buffer", "a", "PENDING", "burst|buffer"),
    ("a|NEW_WORD|why", "a", "NEW_WORD", "why"),
])
def test_the_separator_in_a_name_or_reason(middle: str, name: str, state: str, reason: str) -> None:
    (job,) = parse_queue(f"12|N/A|{middle}|100|N/A|N/A||1|12\n")
    assert (job.name, job.state, job.reason) == (name, state, reason)


def test_a_name_that_looks_like_a_state_is_not_guessed_at() -> None:
    assert parse_queue("12|N/A|a|RUNNING|PENDING|None|100|N/A|N/A||1|12").problems


FIELD = st.one_of(st.text(max_size=12), st.sampled_from(["N/A", "RUNNING", "5", "0:0", "None", "7_[1-3]", "1e400", "nan", "\x85", "Unknown"]))


@given(st.one_of(st.text(), st.lists(st.lists(FIELD, max_size=14).map("|".join), max_size=5).map("\n".join)))
@example("\n\n|||||||||||")
def test_no_text_raises(text: str) -> None:
    lines = [line for line in text.split("\n") if line]
    for parse in (parse_queue, parse_accounting):
        jobs = parse(text)
        assert len(jobs.problems) <= len(lines) and (jobs or jobs.problems or not lines)


@given(
    name=st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True), job_id=st.integers(1, 10**9), index=st.none() | st.integers(0, 10**6),
    submitted=st.integers(0, 10**10), state=st.sampled_from(["PENDING", "RUNNING", "COMPLETED", "BRAND_NEW"]),
)
def test_what_is_printed_is_what_is_read(name: str, job_id: int, index: int | None, submitted: int, state: str) -> None:
    shown = str(job_id) if index is None else f"{job_id}_{index}"
    jobs = [
        *parse_queue(f"{job_id}|{'N/A' if index is None else index}|{name}|{state}|None|{submitted}|N/A|N/A||1|{shown}"),
        *parse_accounting(f"99|{shown}|{name}|{state}|0:0|{submitted}|Unknown|Unknown|0||None assigned"),
    ]
    assert [(job.name, job.id, job.state, job.submitted) for job in jobs] == [(name, shown, state, float(submitted))] * 2


def test_a_thousand_live_and_ten_thousand_finished_jobs_take_less_than_150_ms() -> None:
    queue = "".join(f"{n}|N/A|evo-campaign-0123abcd-v{n:05d}-train-000-s0|RUNNING|None|100|110|900|n1|1|{n}\n" for n in range(1000))
    over = "".join(
        f"{n}|{n}|evo-campaign-0123abcd-v{n:05d}-train-000-s0|COMPLETED|0:0|100|110|{n + 200}|90|billing=8,cpu=8,gres/gpu=4,mem=64G,node=1|n[1-4]\n"
        for n in range(10_000)
    )
    taken = []
    for _ in range(5):
        begin = time.process_time()  # what others on this machine do is not the parser's time
        assert len(parse_queue(queue)) + len(parse_accounting(over)) == 11_000
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.150, taken
