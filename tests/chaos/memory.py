"""A Slurm in memory, and jobs that are no processes: what histories are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from evo_hpc.dispatch.slurm.errors import NoAccounting, SlurmBusy, SlurmRefused, SlurmUnavailable
from evo_hpc.dispatch.slurm.parse import Listing
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.slurm.states import life

Answer = Literal["ok", "slow", "refused", "busy", "lost answer", "lost question", "late", "killed"]
"""`slow`: acknowledged, but not in the queue yet; `killed`: whoever submitted it dies before the answer comes."""
LATE_SECONDS = 50.0
"""How long a job that was submitted may stay unseen; below the profile's settle_seconds."""


class Killed(BaseException):
    """A controller's end, in the middle of a submission."""


@dataclass
class Run:
    """One time that a job ran or waited; each requeue is one more."""

    submitted: float
    state: str = "PENDING"
    ended: float | None = None
    exit_code: int | None = None
    accounted: bool = True


@dataclass
class MemoryJob:
    """A job, whatever anybody knows of it."""

    name: str
    job_id: str
    visible_at: float
    attempt: str
    """Name of the attempt that it is a start of."""
    start: int
    generation: int
    runs: list[Run]
    forgotten: bool = False
    """slurmctld lost it, or has removed its record."""
    deleted: bool = False
    """Accounting has no record of it."""
    dead: bool = False
    """Of a forgotten one: whether its processes have ended."""
    returns_at: float | None = None
    """When Slurm will run one again that shows an end."""
    cancelled_by_us: bool = False

    @property
    def run(self) -> Run:
        return self.runs[-1]

    @property
    def lives(self) -> bool:
        return not self.dead if self.forgotten and life(self.run.state) != "terminal" else life(self.run.state) != "terminal"

    def record(self, run: Run, source: Literal["squeue", "sacct"]) -> SlurmJob:
        """As that program shows it."""
        return SlurmJob(self.name, self.job_id, None, run.state, run.submitted, started=run.submitted, ended=run.ended, exit_code=run.exit_code,
                        source=source)


@dataclass
class MemorySlurm:
    """slurmctld and slurmdbd."""

    now: Callable[[], float]
    jobs: list[MemoryJob] = field(default_factory=list)
    down: bool = False
    accounting_is: Literal["ok", "absent", "down"] = "ok"
    answers: list[Answer] = field(default_factory=list)
    """How the next submissions end; `ok` after these."""
    reused: list[str] = field(default_factory=list)
    submissions: list[str] = field(default_factory=list)
    """Names that were submitted."""
    violations: list[str] = field(default_factory=list)
    submit_seconds: float = 0.0
    """How long sbatch may go on trying after the question was put."""
    meanwhile: Callable[[], None] | None = None
    """What happens, once, between a controller's look at the files and squeue's answer."""
    _next: int = 101

    def visible(self, job: MemoryJob) -> bool:
        """Whether squeue shows it."""
        return not job.forgotten and job.visible_at <= self.now()

    def queue(self) -> Listing:
        """As Commands.queue."""
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            happens()
        if self.down:
            raise SlurmUnavailable("squeue: Unable to contact slurm controller (connect failure)")
        return Listing(job.record(job.run, "squeue") for job in self.jobs if self.visible(job))

    def accounting(self, since: float) -> Listing:
        """As Commands.accounting."""
        if self.accounting_is == "absent":
            raise NoAccounting("sacct: Slurm accounting storage is disabled")
        if self.accounting_is == "down":
            raise SlurmUnavailable("sacct: Problem talking to the database: Connection refused")
        return Listing(
            job.record(run, "sacct") for job in self.jobs if not job.deleted and job.visible_at <= self.now() for run in job.runs
            if run.accounted and (run.ended is None or run.ended >= since)
        )

    def submit(self, environment: Mapping[str, str], text: str, path: Path, *, seconds: float) -> str:
        """As evo_hpc.dispatch.slurm.submit.submit."""
        answer = self.answers.pop(0) if self.answers else "ok"
        if self.down or answer == "lost question":
            raise SlurmUnavailable("sbatch: Socket timed out on send/recv operation")
        if answer == "refused":
            raise SlurmRefused("sbatch: Invalid partition name specified")
        if answer == "busy":
            raise SlurmBusy("sbatch: QOSMaxSubmitJobPerUserLimit")
        name = re.search(r"--job-name=[\"']?([^\s\"']+)", text)
        generation = re.search(r"--generation[ =](\d+)", text)
        assert name is not None and generation is not None, text
        attempt, _, start = name[1].rpartition("-s")
        for other in self.jobs:
            comes = other.lives or other.returns_at is not None
            if other.attempt == attempt and comes and not other.forgotten:  # also one that is acknowledged late: it was to be waited for
                self.violations.append(f"{name[1]} was submitted while {other.name} ({other.run.state}) is in the queue")
        if name[1] in self.submissions:
            self.violations.append(f"{name[1]} was submitted twice")
        self.submissions.append(name[1])
        free = [job_id for job_id in self.reused if not any(job.job_id == job_id and (job.lives or job.returns_at is not None) for job in self.jobs)]
        if free:
            job_id = free[0]
            self.reused.remove(job_id)
        else:
            job_id, self._next = str(self._next), self._next + 1
        visible = self.now() + {"slow": LATE_SECONDS, "late": self.submit_seconds + LATE_SECONDS}.get(answer, 0.0)
        self.jobs.append(MemoryJob(name[1], job_id, visible, attempt, int(start), int(generation[1]), [Run(self.now())]))
        if answer == "killed":
            raise Killed
        if answer in ("lost answer", "late"):
            raise SlurmUnavailable("sbatch: Socket timed out on send/recv operation")
        return job_id

    def cancel(self, ids: list[str], signal: str | None = None, batch: bool = False) -> None:
        """As Commands.cancel, of what the queue shows; these histories send no signals."""
        assert signal is None and not batch, f"nobody asked to signal {ids}"
        if self.down:
            raise SlurmUnavailable("scancel: error: Unable to contact slurm controller (connect failure)")
        for job in self.jobs:
            if job.job_id in ids and self.visible(job) and job.lives:
                job.cancelled_by_us = True
                job.run.state, job.run.ended, job.run.exit_code, job.dead = "CANCELLED", self.now(), 0, True
