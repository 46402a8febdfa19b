"""Who runs attempts, as cluster.yaml says, and who can tell how they are; the rest of the controller sees only this."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch import local
from evo_hpc.dispatch.attempt import Attempt, campaign_root, load, load_intent, load_record, read_attempt
from evo_hpc.dispatch.slurm.commands import Commands, SlurmMissing
from evo_hpc.dispatch.slurm.executor import SlurmExecutor
from evo_hpc.dispatch.slurm.judge import judge
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.dispatch.slurm.records import Found
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.dispatch.status import FRESH_BEAT_SECONDS, JobStatus
from evo_hpc.jobs.spec import Ending, Start, root_digest
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.lease import Lease, owner_of, slurm_id, slurm_restart

_MORE_SECONDS = 15.0
"""Beyond the time to save, for the job to end and be seen to have."""
Observe = Callable[[JobPaths], JobStatus]


class Executor(Protocol):
    """Starts and stops attempts."""

    cluster: Cluster

    def start(self, statuses: Sequence[JobStatus], lease: Lease) -> str:
        """Start attempts once more, on disk before anything runs; in words, what they are now."""

    def stop(self, status: JobStatus) -> bool:
        """Ask an attempt to save and end; whether it had not been asked before."""

    def end(self, status: JobStatus, ending: Ending | None, why: str) -> bool:
        """Kill one that did not; `ending` is how that counts, null where it was to stop anyway. Whether it was done just now."""

    def reap(self) -> None:
        """Collect what has ended."""


@dataclass(frozen=True)
class _Live:
    """A live attempt as it was last read and judged."""

    attempt: Attempt
    results: list[str]
    """Files that it will leave its results in."""
    found: Found
    status: JobStatus
    until: float
    """Unix time until which that holds while the queue says the same: a heartbeat that is too old is to be read again, and what is
    not known for sure is judged anew each time."""

    @classmethod
    def of(cls, attempt: Attempt, results: list[str], found: Found, status: JobStatus, now: float) -> _Live:
        """As judged now."""
        certain = status.phase in ("queued", "running") and found.jobs and found.error is None
        return cls(attempt, results, found, status, now + FRESH_BEAT_SECONDS - status.silent if certain else float("-inf"))


@dataclass
class Dispatch:
    """One controller's executor and its view of all attempts; `status` and its like only look."""

    cluster: Cluster
    now: Callable[[], float] = time.time
    _local: local.LocalExecutor | None = None
    _slurm: SlurmExecutor | None = None
    _queue: Queue | None = None
    _asked: dict[tuple[Path, str | int | None, int | None], float] = field(default_factory=dict)
    """When attempts were told to stop."""
    _attempts: dict[Path, _Live] = field(default_factory=dict)
    """Live ones that Slurm was asked about, as they were last read."""

    def use(self, cluster: Cluster) -> None:
        """Go on with a profile that may have been edited."""
        if cluster.slurm != self.cluster.slurm:
            self._queue, self._slurm = None, None
        self.cluster = cluster
        for each in (self._local, self._slurm):
            if each is not None:
                each.cluster = cluster

    @property
    def executor(self) -> Executor:
        """Of new starts."""
        return self.of(self.cluster.executor)

    def of(self, name: str) -> Executor:
        """The executor of that name."""
        if name == "slurm":
            if self._slurm is None:
                self._slurm = SlurmExecutor(self.cluster, self._ask().commands, forget=self._ask().invalidate)
            return self._slurm
        if self._local is None:
            self._local = local.LocalExecutor(self.cluster)
        return self._local

    def executor_of(self, status: JobStatus) -> Executor:
        """Of an attempt that there is: it stays where it was begun."""
        return self.of(status.intent.executor if status.intent is not None else self.cluster.executor)

    def stop(self, status: JobStatus) -> str:
        """Ask an attempt to save and end, and end it when its time for that is over; in words, what was done just now, if anything."""
        executor = self.executor_of(status)
        key = (status.job.root, status.slurm_id or status.pid, status.incarnation)
        if executor.stop(status):
            self._asked[key] = self.now()
            return "told to save and end"
        asked = self._asked.get(key)
        if asked is not None and self.now() > asked + self.cluster.grace_seconds + _MORE_SECONDS:
            self._asked[key] = self.now()
            why = f"told to stop, it did not end within {self.cluster.grace_seconds + _MORE_SECONDS:.0f} s: killed"
            executor.end(status, None, why)
            return why
        return ""

    def observe(self, job: JobPaths) -> JobStatus:
        """How far an attempt is. Raises StoreError on damaged records."""
        intent = load_intent(job)
        if intent is None or intent.executor == "local":
            status = local.observe(job)
            if status.phase == "dead" and self._local is not None and (pid := self._local.starting(job)) is not None:
                return replace(status, phase="running", pid=pid)
            return status if status.host is None else self._elsewhere(status)
        if (record := load_record(job)) is not None:
            return JobStatus(job, "recorded", incarnation=record.incarnation, record=record, intent=intent)
        attempt = read_attempt(job)
        found = None
        if attempt.starts and (name := attempt.starts[-1].slurm_name) is not None:
            if f"-{root_digest(campaign_root(job))}-" not in name:  # a copied campaign: what runs under that name is the original's
                return JobStatus(job, "dead", intent=intent, said="was copied from another campaign")
            found = self._ask().look(name, attempt.starts[-1].array_index, attempt.starts[-1].written_at)
        now = self.now()
        status = judge(attempt, found, self.cluster.slurm, now)
        if status.phase == "dead" and (again := read_attempt(job)) != attempt:
            # It claimed or ended between the look at its files and the one at the queue.
            status = judge(again, found, self.cluster.slurm, now)
        self._attempts.pop(job.root, None)
        if status.live and found is not None:
            results = [str(job.incarnation(number).result) for number, _ in attempt.claims if number not in attempt.results]
            self._attempts[job.root] = _Live.of(attempt, results, found, status, now)
        return status

    def _elsewhere(self, status: JobStatus) -> JobStatus:
        """One of another host, which nobody can look at: where its controller was a Slurm job, what it started ended with that."""
        owner = owner_of(CampaignPaths.of_job(status.job), status.generation or 0)
        if owner is None or owner.slurm_job_id is None or owner.slurm_job_name is None:
            return status
        try:
            found = self._ask().look(owner.slurm_job_name, None, 0.0)
        except SlurmMissing:
            return status
        if found.asked_at is None or found.error is not None:
            return replace(status, host=None, said=f"{status.said}; Slurm does not answer")
        run = next((job for job in found.jobs if job.id == owner.slurm_job_id and life(job.state) != "terminal"), None)
        requeued = slurm_id(os.environ) == owner.slurm_job_id and slurm_restart(os.environ) > owner.slurm_restart  # as this very process's job
        if status.phase != "running" and (run is None or requeued):
            return replace(status, phase="dead", host=None, said=f"ended with its controller, Slurm job {owner.slurm_job_id}")
        return replace(status, host=None, said=f"{status.said}; part of its controller's Slurm job {owner.slurm_job_id}")

    def observe_again(self, status: JobStatus) -> JobStatus:
        """How far an attempt is by now whose own files (not those of its incarnations) have not changed since `status` was made.

        While the queue shows its job alive and no result has come, all that was read of it holds. Its heartbeat is read again once the
        one that is known is too old to show life, and its progress when its job has ended.
        """
        known = self._attempts.get(status.job.root)
        if known is not None and status.live and not any(map(os.path.exists, known.results)):
            last = known.attempt.starts[-1]
            found = self._ask().look(last.slurm_name or "", last.array_index, last.written_at)
            if found.asked_at is not None and found.error is None:
                now = self.now()
                if found.jobs == known.found.jobs and now < known.until:
                    return known.status
                attempt = known.attempt.beaten()
                again = judge(attempt, found, self.cluster.slurm, now)
                if again.phase in ("queued", "running"):
                    self._attempts[status.job.root] = _Live.of(attempt, known.results, found, again, now)
                    return again
        return self.observe(status.job)

    def cancel_strays(self, prefix: str, statuses: Sequence[JobStatus]) -> list[str]:
        """Cancel the jobs of a campaign that wait though nobody waits for them; their ids.

        A slurmctld that was killed can bring back a job whose attempt is over, or was submitted again meanwhile. Names of
        attempts that are not over yet are left alone, whatever their state; so are jobs that run: those find their claim taken.
        """
        if self._queue is None:
            return []
        waiting = self._queue.waiting(prefix)
        if not waiting:
            return []
        known = {name for status in statuses if status.record is None and (name := _last_name(status.job)) is not None}
        strays = [job.id for job in waiting if job.name not in known]
        if strays:
            self._queue.commands.cancel(strays)
            self._queue.invalidate()
        return strays

    def reap(self) -> None:
        """Collect what has ended."""
        for each in (self._local, self._slurm):
            if each is not None:
                each.reap()

    def _ask(self) -> Queue:
        if self._queue is None:
            self._queue = Queue(Commands.of(self.cluster.slurm), self.cluster.slurm.poll_seconds)
        return self._queue


def _last_name(job: JobPaths) -> str | None:
    """Name of the Slurm job of an attempt's last start."""
    starts = job.starts()
    return load(Start, starts[-1][1]).slurm_name if starts else None
