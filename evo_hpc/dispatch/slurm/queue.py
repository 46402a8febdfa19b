"""All that is known of this user's Slurm jobs, at the price of one squeue and one sacct a poll interval, whatever the number of jobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from evo_hpc.dispatch.slurm.errors import NoAccounting, SlurmError, SlurmMissing, clean
from evo_hpc.dispatch.slurm.parse import Listing
from evo_hpc.dispatch.slurm.records import Accounting, Found, SlurmJob
from evo_hpc.dispatch.slurm.states import life

Key = tuple[str, int | None]
"""Name and array index."""

SKEW_SECONDS = 60.0
"""How far the clocks of this host and slurmctld's may be apart; what was submitted longer before a start is of somebody else."""
MARGIN_SECONDS = 86_400.0
"""How much earlier than the earliest start accounting is asked from: clocks, and hours that daylight saving shows twice."""
LAG_SECONDS = 300.0
"""How long a job that was live and is gone from squeue counts as it was last seen, while accounting has not heard of its end (it
lags by seconds, by more after an outage). After that it is not known any more: Slurm lost it, or its record was deleted."""
OUTAGE_SECONDS = 3_600.0
"""The same while accounting fails to answer."""
FORGET_SECONDS = 3_600.0
"""A job that nobody asked about for this long is not looked after any more."""
LONGEST_BACKOFF_SECONDS = 120.0
MOST_WARNINGS = 100


class Questions(Protocol):
    """The part of Commands that is needed here."""

    def queue(self) -> Listing: ...
    def accounting(self, since: float) -> Listing: ...


@dataclass
class _Source:
    """One question to Slurm: when it may be put again, and what it last answered."""

    poll_seconds: float
    jobs: dict[Key, tuple[SlurmJob, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    asked_at: float | None = None
    """When the last question that was answered was put."""
    put_at: float = float("-inf")
    """When the last question was put."""
    next_at: float = float("-inf")
    answers: int = 0
    failures: int = 0
    error: str | None = None

    def due(self, now: float) -> bool:
        """Whether it may be put again; at once when the clock was set back."""
        return now >= self.next_at or now < self.put_at

    def answered(self, listing: Listing, at: float) -> None:
        """Take over an answer that came at `at`."""
        if listing.problems and not listing:  # not one line is what it should be: another program, or a version not known
            self.failed(f"not one line of the answer can be read: {clean(listing.problems[0])!r}", at)
            return
        self.jobs, self.unread, self.asked_at, self.answers = _by_key(listing), listing.problems, self.put_at, self.answers + 1
        self.failures, self.error, self.next_at = 0, None, at + self.poll_seconds

    def failed(self, words: str, at: float) -> None:
        self.failures, self.error = self.failures + 1, words
        self.next_at = at + max(self.poll_seconds, min(self.poll_seconds * 2.0 ** min(self.failures, 32), LONGEST_BACKOFF_SECONDS))


@dataclass
class _Watch:
    """A job that was asked about."""

    since: float
    looked_at: float
    seen: dict[str, SlurmJob] = field(default_factory=dict)
    """What squeue last showed, by job id; kept when it is gone from there."""
    gone_since: dict[str, float] = field(default_factory=dict)
    """Since when a live one has been absent from squeue's answers."""
    answer: int = 0
    """Number of squeue's answer that `seen` and `gone_since` go back to."""
    found: Found | None = None
    """What was last found of one that lives, which holds until one of the two is asked again."""
    found_by: tuple[object, ...] = ()


class Queue:
    """Asks when it must, answers from memory otherwise. Slurm's failures never raise here: they are in what `look` returns."""

    def __init__(self, commands: Questions, poll_seconds: float, now: Callable[[], float] = time.time) -> None:
        self.commands = commands
        self.poll_seconds = poll_seconds
        self.problems = 0
        """Lines of Slurm's that could not be read so far."""
        self._now = now
        self._squeue, self._sacct = _Source(poll_seconds), _Source(poll_seconds)
        self._accounting: Accounting = "not asked"
        self._window = float("inf")
        """What the last answer of sacct goes back to."""
        self._watched: dict[Key, _Watch] = {}
        self._warnings: dict[str, bool] = {}

    def look(self, name: str, index: int | None, since: float) -> Found:
        """All that is known of the jobs of that exact name and array index, submitted at `since` (Unix seconds) or later.

        Constant time, but for the two questions that the first look in a poll interval may put. Raises SlurmMissing where there is
        no squeue from the beginning, UserError where this user has no name.
        """
        key, now = (name, index), self._now()
        if self._squeue.due(now):
            self._ask_squeue(now)
        watch = self._watched.get(key)
        if watch is None:
            watch = self._watched[key] = _Watch(since, now)
        watch.looked_at = now
        by = (since, self._squeue.answers, self._squeue.failures, self._sacct.answers, self._sacct.failures)
        if watch.found is not None and watch.found_by == by:
            return watch.found
        watch.since = since
        self._follow(key, watch)
        live = self._live(key, since)
        if not live:
            self._ask_sacct(since)
        found = self._found(key, watch, live)
        watch.found, watch.found_by = (found, by) if live else (None, ())
        return found

    def runs(self, name: str, index: int | None, since: float) -> tuple[SlurmJob, ...]:
        """Every run of it that the last answer of accounting holds, oldest first: each requeue is one of its own. Asks nothing."""
        return tuple(job for job in self._sacct.jobs.get((name, index), ()) if job.submitted >= since - SKEW_SECONDS)

    def waiting(self, prefix: str) -> list[SlurmJob]:
        """The jobs whose names begin so that wait in the queue, by the last answer of squeue; nothing while it does not answer. Asks nothing."""
        if self._squeue.error is not None:
            return []
        return [job for (name, _), jobs in self._squeue.jobs.items() if name.startswith(prefix) for job in jobs if life(job.state) == "queued"]

    def invalidate(self) -> None:
        """Put a fresh question to squeue at the next look: the queue was changed. A failing squeue is given its time all the same."""
        if self._squeue.error is None:
            self._squeue.next_at = float("-inf")

    def warnings(self) -> list[str]:
        """What people should know of answers that could not be read; each said once."""
        new = [text for text, told in self._warnings.items() if not told]
        self._warnings.update(dict.fromkeys(new, True))
        return new

    def _ask_squeue(self, now: float) -> None:
        self._squeue.put_at = now
        try:
            listing = self.commands.queue()
        except SlurmMissing:
            if not self._squeue.answers:
                raise
            self._squeue.failed("squeue has gone from this host", self._now())
            return
        except SlurmError as error:
            self._squeue.failed(str(error), self._now())
            return
        self._complain("squeue", listing.problems)
        self._squeue.answered(listing, self._now())

    def _ask_sacct(self, since: float) -> None:
        """Where its last answer is too old, or does not go back far enough."""
        now = self._now()
        uncovered = self._sacct.error is None and since < self._window - MARGIN_SECONDS / 2
        if not self._sacct.due(now) and not uncovered:
            return
        self._watched = {key: watch for key, watch in self._watched.items() if now - watch.looked_at <= FORGET_SECONDS}
        earliest = min((watch.since for watch in self._watched.values()), default=since)
        if not self._sacct.due(now):
            earliest = min(earliest, now - 2 * (now - since))  # earlier and earlier ones may follow: a few questions at most for all of them
        self._sacct.put_at = now
        try:
            listing = self.commands.accounting(earliest - MARGIN_SECONDS)
        except NoAccounting as error:
            self._sacct.jobs = {}
            self._sacct.failed(str(error), self._now())
            self._sacct.next_at = self._now() + LONGEST_BACKOFF_SECONDS  # a cluster seldom gets one
            self._accounting = "absent"
            return
        except SlurmError as error:
            self._sacct.failed(str(error), self._now())
            self._accounting = "failed"
            return
        self._complain("sacct", listing.problems)
        self._sacct.answered(listing, self._now())
        self._accounting = "ok" if self._sacct.error is None else "failed"
        if self._accounting == "ok":
            self._window = earliest

    def _complain(self, program: str, problems: Iterable[str]) -> None:
        for line in problems:
            self.problems += 1
            if len(self._warnings) < MOST_WARNINGS:
                self._warnings.setdefault(f"{program}: a line that cannot be read, passed over: {clean(line)!r}", False)

    def _follow(self, key: Key, watch: _Watch) -> None:
        """Take over what squeue's newest answer shows, and since when it shows nothing."""
        asked_at = self._squeue.asked_at
        if asked_at is None or watch.answer == self._squeue.answers:
            return
        watch.answer = self._squeue.answers
        shown = {job.job_id: job for job in self._squeue.jobs.get(key, ())}
        watch.seen.update(shown)
        for job_id in shown:
            watch.gone_since.pop(job_id, None)
        for job_id in watch.seen.keys() - shown.keys():
            watch.gone_since.setdefault(job_id, asked_at)

    def _live(self, key: Key, since: float) -> bool:
        return any(life(job.state) != "terminal" and job.submitted >= since - SKEW_SECONDS for job in self._squeue.jobs.get(key, ()))

    def _found(self, key: Key, watch: _Watch, live: bool) -> Found:
        accounted = {job.job_id: job for job in self._sacct.jobs.get(key, ())}  # of each id its newest run: they are in order
        shown = {job.job_id for job in self._squeue.jobs.get(key, ())}
        jobs = []
        for job_id in watch.seen.keys() | accounted.keys():
            job = _newest(watch.seen.get(job_id), accounted.get(job_id), job_id in shown)
            if job.submitted >= watch.since - SKEW_SECONDS and not (job_id not in shown and self._lost(watch, job)):
                jobs.append(job)
        unread = next((line for line in (*self._squeue.unread, *(() if live else self._sacct.unread)) if key[0] in line), None)
        return Found(
            tuple(sorted(jobs, key=lambda job: (job.submitted, int(job.job_id)))),
            # An answer with a line that may be about this very job says nothing of it.
            asked_at=None if unread is not None else self._squeue.asked_at, accounting=self._accounting, accounting_at=self._sacct.asked_at,
            error=self._squeue.error if unread is None else f"a line about it cannot be read: {clean(unread)!r}",
        )

    def _lost(self, watch: _Watch, job: SlurmJob) -> bool:
        """Whether one that should live has been absent from squeue for so long that it does not."""
        asked_at = self._squeue.asked_at
        if asked_at is None or life(job.state) == "terminal":
            return False
        since = watch.gone_since.setdefault(job.job_id, asked_at)
        return asked_at - since > (OUTAGE_SECONDS if self._accounting == "failed" else LAG_SECONDS)


def _newest(seen: SlurmJob | None, accounted: SlurmJob | None, shown: bool) -> SlurmJob:
    """Which of two records of one job counts: squeue's, but that accounting knows more of a run that has ended."""
    if seen is None or accounted is None:
        job = seen or accounted
        assert job is not None
        return job
    if accounted.submitted < seen.submitted or life(accounted.state) != "terminal":
        return seen  # an earlier run, before a requeue; or an end that accounting has not heard of
    if shown and life(seen.state) != "terminal":
        return seen
    return replace(accounted, reason=seen.reason) if accounted.submitted == seen.submitted and life(seen.state) == "terminal" else accounted


def _by_key(jobs: Iterable[SlurmJob]) -> dict[Key, tuple[SlurmJob, ...]]:
    found: dict[Key, list[SlurmJob]] = defaultdict(list)
    for job in jobs:
        found[job.name, job.array_index].append(job)
    return {key: tuple(each) if len(each) == 1 else tuple(sorted(each, key=lambda job: job.submitted)) for key, each in found.items()}
