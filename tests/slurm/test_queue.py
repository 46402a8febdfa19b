"""The queue, and the commands under it, on a real cluster: ends, requeues, arrays, holds, what is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.commands import Commands, SlurmRefused
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.dispatch.slurm.records import Found, SlurmJob
from evo_hpc.dispatch.slurm.states import ending, held, life
from tests.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def commands(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Of the test cluster, which is left without jobs."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")  # of the caller's shell: must not reach squeue
    commands = Commands.of(Slurm())
    yield commands
    commands.cancel([job.id for job in commands.queue()])
    cluster.wait_idle()


def sbatch(commands: Commands, name: str, script: str, *options: str) -> str:
    answer = commands.run("sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null", *options, f"--wrap={script}")
    assert answer.code == 0, answer.err
    return answer.out.strip()


def until(look: Callable[[], Found], true: Callable[[SlurmJob], bool], seconds: float = 60) -> SlurmJob:
    """The job of a name, once something is true of it."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if len(found.jobs) == 1 and true(found.jobs[0]):
            return found.jobs[0]
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_jobs_end_as_they_do(commands: Commands) -> None:
    begin, queue = time.time(), Queue(commands, 0.5)
    sbatch(commands, "evo-ok", "true")
    sbatch(commands, "evo-code", "exit 3")
    sbatch(commands, "evo-signal", "kill -9 $$")
    cancelled = sbatch(commands, "evo-cancelled", "sleep 300")
    commands.cancel([cancelled, "99999999"])
    how = {"evo-ok": "infrastructure", "evo-code": "code_error", "evo-signal": "infrastructure", "evo-cancelled": "user_cancelled"}
    for name, end in how.items():
        job = until(lambda name=name: queue.look(name, None, begin),
            lambda job: job.source == "sacct" and life(job.state) == "terminal")  # type: ignore[misc]
        assert ending(job) == end and job.submitted >= begin - 1
    commands.cancel([cancelled])  # is over: no error
    commands.cancel([cancelled], signal="TERM", batch=True)
    assert queue.problems == 0 and queue.look("evo-o", None, begin).jobs == ()


def test_a_held_job_says_so_and_starts_when_released(commands: Commands) -> None:
    begin, queue = time.time(), Queue(commands, 0.2)
    job_id = sbatch(commands, "evo-held", "true", "--hold")
    job = until(lambda: queue.look("evo-held", None, begin), lambda job: job.state == "PENDING")
    words = held(job)
    assert words is not None and f"`scontrol release {job_id}`" in words
    begun = time.monotonic()
    commands.cancel([job_id], signal="TERM", batch=True)  # passes over what waits, at once
    assert time.monotonic() - begun < 30 and states(queue, begin, "evo-held") == {"PENDING"}
    assert commands.run("scontrol", "release", job_id).code == 0
    until(lambda: queue.look("evo-held", None, begin), lambda job: job.state == "COMPLETED")


def test_a_requeued_job_is_one_job_of_two_runs(commands: Commands) -> None:
    begin, queue = time.time(), Queue(commands, 0.5)
    job_id = sbatch(commands, "evo-again", "sleep 300")
    first = until(lambda: queue.look("evo-again", None, begin), lambda job: job.state == "RUNNING")
    time.sleep(1.1)  # accounting counts whole seconds
    commands.requeue(job_id)
    seen = set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (seen & {"PENDING", "REQUEUED", "COMPLETING"} and "RUNNING" in states(queue, begin)):
        seen |= states(queue, begin)
        time.sleep(0.1)
    assert not any(life(state) == "terminal" for state in seen)
    commands.cancel([job_id])
    last = until(lambda: queue.look("evo-again", None, begin), lambda job: job.source == "sacct" and life(job.state) == "terminal")
    assert last.submitted > first.submitted and ending(last) == "user_cancelled"
    runs = queue.runs("evo-again", None, begin)
    assert [run.state for run in runs] == ["REQUEUED", "CANCELLED"] and runs[0].elapsed >= 1
    with pytest.raises(SlurmRefused):
        commands.requeue("99999999")


def states(queue: Queue, begin: float, name: str = "evo-again") -> set[str]:
    return {job.state for job in queue.look(name, None, begin).jobs}


def test_tasks_of_an_array_are_found_by_index(commands: Commands) -> None:
    begin, queue = time.time(), Queue(commands, 0.5)
    job_id = sbatch(commands, "evo-array", "test $SLURM_ARRAY_TASK_ID != 2 || exit 1; test $SLURM_ARRAY_TASK_ID != 3 || sleep 300", "--array=0-3")
    for index, state in enumerate(("COMPLETED", "COMPLETED", "FAILED", "RUNNING")):
        job = until(lambda index=index: queue.look("evo-array", index, begin), lambda job, state=state: job.state == state)  # type: ignore[misc]
        assert job.id == f"{job_id}_{index}"
    assert queue.look("evo-array", None, begin).jobs == () and queue.look("evo-array", 4, begin).jobs == ()
    commands.cancel([f"{job_id}_3"])
    until(lambda: queue.look("evo-array", 3, begin), lambda job: job.state == "CANCELLED")


def test_many_jobs_cost_one_question_each(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, asked = time.time(), []
    run = Commands.run
    monkeypatch.setattr(Commands, "run", lambda self, *argv, seconds=None: asked.append(argv[0]) or run(self, *argv, seconds=seconds))
    sbatch(commands, "evo-many", "true", "--array=0-99", "--hold")
    asked.clear()
    queue = Queue(commands, 60)
    assert {len(queue.look("evo-many", index, begin).jobs) for index in range(100)} == {1}
    assert {len(queue.look("evo-none", index, begin).jobs) for index in range(100)} == {0}
    assert asked == ["squeue", "sacct"]


def test_small_questions(commands: Commands) -> None:
    assert commands.version() >= (20, 2) and commands.hostnames("n[1-3],x05") == ["n1", "n2", "n3", "x05"]
