"""The histories have teeth: each deliberate defect, put in by itself, is found by them within a few tries."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from evo_hpc.controller import commit, plan
from evo_hpc.dispatch import executor as dispatch
from evo_hpc.dispatch.attempt import Attempt, read_attempt
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm import executor, judge, queue
from evo_hpc.dispatch.slurm.errors import SlurmBusy, SlurmUnavailable
from evo_hpc.dispatch.slurm.parse import Listing
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.jobs import claims
from evo_hpc.jobs.spec import Identity
from evo_hpc.store.lease import Lease
from tests.chaos import histories
from tests.chaos.histories import CLUSTER, Histories
from tests.chaos.memory import MemorySlurm

pytestmark = pytest.mark.slow
MOST_HISTORIES = 400
Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}
TELLING = ("failing_squeue_is_empty", "uncertain_submission_is_none", "lease_is_not_checked", "first_claim_counts", "failure_is_final_at_once",
           "queue_is_not_asked_again")
"""Those that are tried more often than the others."""


def mutant(put_in: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Registers a defect under its function's name."""
    MUTANTS[put_in.__name__] = put_in
    return put_in


def _profile(patch: Patch, **slurm: Any) -> None:
    patch.setattr(Histories, "cluster", CLUSTER.model_copy(update={"slurm": CLUSTER.slurm.model_copy(update=slurm)}))


def _nothing(*args: Any, **more: Any) -> None:
    pass


# Slurm's answers.


@mutant
def failing_squeue_is_empty(patch: Patch) -> None:
    def ask(self: Queue, now: float) -> None:
        self._squeue.put_at = now
        try:
            listing = self.commands.queue()
        except SlurmUnavailable:
            listing = Listing()
        self._squeue.answered(listing, now)

    patch.setattr(Queue, "_ask_squeue", ask)


@mutant
def accounting_outranks_squeue(patch: Patch) -> None:
    newest = queue._newest
    patch.setattr(queue, "_newest", lambda seen, accounted, shown: (
        accounted if accounted is not None and life(accounted.state) == "terminal" else newest(seen, accounted, shown)))


@mutant
def uncertain_submission_is_none(patch: Patch) -> None:
    submit = MemorySlurm.submit

    def refused(self: MemorySlurm, *args: Any, **more: Any) -> str:
        try:
            return submit(self, *args, **more)
        except SlurmUnavailable as error:
            raise SlurmBusy(str(error)) from error

    patch.setattr(MemorySlurm, "submit", refused)


@mutant
def start_is_written_after_sbatch(patch: Patch) -> None:
    write, kept = executor.write_json_once, []

    def later(path: Any, data: Any) -> None:
        if path.name.startswith("start-"):
            kept[:] = [(path, data)]
            return
        for each in kept:
            write(*each)
        kept.clear()
        write(path, data)

    patch.setattr(executor, "write_json_once", later)


@mutant
def settles_within_a_second(patch: Patch) -> None:
    _profile(patch, settle_seconds=1.0)


@mutant
def sbatch_is_not_waited_for(patch: Patch) -> None:
    _profile(patch, submit_seconds=1.0)


@mutant
def requeue_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(judge, "RERUN_SECONDS", 0.0)


@mutant
def forgotten_job_is_dead(patch: Patch) -> None:
    patch.setattr(judge, "FRESH_BEAT_SECONDS", 0.0)


@mutant
def unknown_state_is_an_end(patch: Patch) -> None:
    patch.setattr(judge, "life", lambda state: life(state) if state in ("PENDING", "RUNNING") else "terminal")
    patch.setattr(judge, "ending", lambda job: "infrastructure")


@mutant
def answer_of_before_the_start_counts(patch: Patch) -> None:
    patch.setattr(Queue, "invalidate", _nothing)
    verdict = judge._verdict
    patch.setattr(judge, "_verdict", lambda attempt, last, found, slurm, now: (
        verdict(attempt, last.model_copy(update={"written_at": 0.0}), found, slurm, now)))


# What is tried again.


@mutant
def caps_are_ignored(patch: Patch) -> None:
    patch.setattr(plan, "exhausted", _nothing)


@mutant
def one_ending_too_many(patch: Patch) -> None:
    _retries(patch, 1)


@mutant
def one_ending_too_few(patch: Patch) -> None:
    _retries(patch, -1)


def _retries(patch: Patch, more: int) -> None:
    retries = histories.RETRIES
    _profile(patch, retries=retries.model_copy(update={name: getattr(retries, name) + more for name in ("node_fail", "infrastructure", "oom")}))


@mutant
def standstill_is_ignored(patch: Patch) -> None:
    patch.setattr(Attempt, "stale", property(lambda self: 0))


@mutant
def one_attempt_too_many(patch: Patch) -> None:
    patch.setattr(Histories, "cluster", CLUSTER.model_copy(update={"max_attempts": 3}))


@mutant
def advance_does_not_end_a_row(patch: Patch) -> None:
    patch.setattr(commit, "reached", lambda job: 0)


@mutant
def every_attempt_advances(patch: Patch) -> None:
    patch.setattr(plan, "_in_a_row", lambda failed: 1)


@mutant
def starts_do_not_wait(patch: Patch) -> None:
    patch.setattr(judge, "backoff", lambda *args: 0.0)


@mutant
def attempts_do_not_wait(patch: Patch) -> None:
    patch.setattr(plan, "backoff", lambda *args: 0.0)


@mutant
def waits_are_of_one_length(patch: Patch) -> None:
    backoff = judge.backoff
    patch.setattr(judge, "backoff", lambda slurm, failures: backoff(slurm, 1))


@mutant
def own_cancel_is_by_hand(patch: Patch) -> None:
    patch.setattr(executor.SlurmExecutor, "_will_end", _nothing)


# Whose word counts.


@mutant
def failure_is_final_at_once(patch: Patch) -> None:
    patch.setattr(judge, "_may_be_the_nodes", lambda *args: False)


@mutant
def lost_node_is_forgiven_only_while_it_runs(patch: Patch) -> None:
    patch.setattr(judge, "NODES_FAULT", ())


@mutant
def lease_is_not_checked(patch: Patch) -> None:
    patch.setattr(Lease, "check", _nothing)


@mutant
def claim_is_not_checked(patch: Patch) -> None:
    patch.setattr(histories, "check_claim", _nothing)


@mutant
def first_claim_counts(patch: Patch) -> None:
    judged = judge.judge
    patch.setattr(dispatch, "judge", lambda attempt, *more: judged(replace(attempt, claims=attempt.claims[:1]), *more))


@mutant
def any_result_counts(patch: Patch) -> None:
    judged = judge.judge

    def wrong(attempt: Attempt, *more: Any) -> Any:
        told = [(number, identity) for number, identity in attempt.claims if number in attempt.results]
        return judged(replace(attempt, claims=tuple(told[-1:]) or attempt.claims), *more)

    patch.setattr(dispatch, "judge", wrong)


@mutant
def older_start_takes_over(patch: Patch) -> None:
    class Any_(tuple):  # type: ignore[type-arg]
        def __ge__(self, other: object) -> bool:
            return False

    patch.setattr(Identity, "rank", property(lambda self: Any_((self.generation, self.start, self.restart))))


@mutant
def record_does_not_bar_a_claim(patch: Patch) -> None:
    claim = claims.claim

    def claims_anyway(job: Any, identity: Identity) -> Any:
        aside = job.record.with_suffix(".aside")
        there = job.record.exists()
        if there:
            job.record.rename(aside)
        try:
            return claim(job, identity)
        finally:
            if there:
                aside.rename(job.record)

    patch.setattr(histories, "claim", claims_anyway)


# What is remembered.


@mutant
def queue_is_not_asked_again(patch: Patch) -> None:
    observe = Dispatch.observe_again

    def again(self: Dispatch, status: Any) -> Any:
        known = self._attempts.get(status.job.root)
        if known is not None and status.live and not any(map(os.path.exists, known.results)):
            return status
        return observe(self, status)

    patch.setattr(Dispatch, "observe_again", again)


@mutant
def result_is_not_looked_for_again(patch: Patch) -> None:
    patch.setattr(dispatch, "os", SimpleNamespace(path=SimpleNamespace(exists=lambda path: False), environ=os.environ))


@mutant
def heartbeat_is_not_read_again(patch: Patch) -> None:
    patch.setattr(Attempt, "beaten", lambda self: self)


@mutant
def what_is_unknown_is_remembered(patch: Patch) -> None:
    observe = Dispatch.observe_again

    def again(self: Dispatch, status: Any) -> Any:
        known = self._attempts.get(status.job.root)
        if status.phase == "unknown" and known is not None and status.said_at is not None and self.now() < status.said_at + 60.0:
            return status
        return observe(self, status)

    patch.setattr(Dispatch, "observe_again", again)


@mutant
def files_are_not_read_again_before_a_death(patch: Patch) -> None:
    read: dict[Any, tuple[float, Attempt]] = {}

    def once(job: Any) -> Attempt:
        """One look at the files serves all of one moment."""
        now = executor.time.time()
        if job.root not in read or read[job.root][0] != now:
            read[job.root] = (now, read_attempt(job))
        return read[job.root][1]

    patch.setattr(dispatch, "read_attempt", once)


@mutant
def queue_is_remembered_for_good(patch: Patch) -> None:
    look = Queue.look

    def remembers(self: Queue, name: str, index: int | None, since: float) -> Any:
        watch = self._watched.get((name, index))
        return watch.found if watch is not None and watch.found is not None else look(self, name, index, since)

    patch.setattr(Queue, "look", remembers)


def tries_until_found(put_in: Callable[[Patch], None], patch: Patch) -> int | None:
    """How many histories it takes to find a defect; None where none of them does."""
    begun = 0
    found: int | None = None

    class Counted(Histories):
        def __init__(self) -> None:
            nonlocal begun
            begun += 1
            super().__init__()

        def teardown(self) -> None:
            nonlocal found
            wrong = isinstance(sys.exc_info()[1], AssertionError)
            try:
                super().teardown()
            except AssertionError:
                wrong = True
                raise
            finally:
                found = begun if wrong and found is None else found

    put_in(patch)
    try:
        run_state_machine_as_test(Counted, settings=settings(
            max_examples=MOST_HISTORIES, stateful_step_count=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        ))
    except AssertionError:
        assert found is not None
        return found
    return None


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in TELLING else [pytest.mark.rare]) for name in MUTANTS])
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = tries_until_found(MUTANTS[name], monkeypatch)
    assert tries is not None, f"not found in {MOST_HISTORIES} histories"
    print(f"{name}: {tries} histories")  # shown by -rP
