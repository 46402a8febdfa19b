"""What Slurm says of a job, as records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Accounting = Literal["ok", "absent", "failed", "not asked"]


@dataclass(frozen=True)
class SlurmJob:
    """One job, or one task of an array, as squeue or sacct shows it. Times are Unix seconds."""

    name: str
    job_id: str
    """Of the job, or of the array that it is a task of: what sbatch printed."""
    array_index: int | None
    """Null where there is no array."""
    state: str
    """Slurm's word, without what follows it: CANCELLED, not `CANCELLED by 0`."""
    submitted: float
    reason: str = ""
    """Why it waits, in Slurm's word; empty where accounting tells of it."""
    started: float | None = None
    ended: float | None = None
    """Of an ended job. (squeue shows the limit's end for a running one; that is not kept.)"""
    exit_code: int | None = None
    signal: int | None = None
    elapsed: float = 0.0
    """Seconds of this run of it; each requeue is a record of its own in accounting."""
    tres: dict[str, float] = field(default_factory=dict)
    """What was allocated: cpu, node, mem (bytes), gres/gpu."""
    nodes: str = ""
    source: Literal["squeue", "sacct"] = "squeue"

    @property
    def id(self) -> str:
        """How Slurm's commands name it: 123, or 123_4."""
        return self.job_id if self.array_index is None else f"{self.job_id}_{self.array_index}"


@dataclass(frozen=True)
class Found:
    """All that is known of the jobs of one name and array index."""

    jobs: tuple[SlurmJob, ...]
    """The last known record of each, oldest submission first; squeue's word before that of accounting, which lags."""
    asked_at: float | None
    """When the last question to squeue that was answered was put; null when none was."""
    accounting: Accounting
    accounting_at: float | None = None
    """The same for sacct."""
    error: str | None = None
    """Why the last question to squeue was not answered."""
