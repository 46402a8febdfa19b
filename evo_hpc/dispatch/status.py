"""How far an attempt is: one record, whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from evo_hpc.jobs.spec import Ending, Intent, Record, Result
from evo_hpc.paths import JobPaths

Phase = Literal["planned", "queued", "running", "unknown", "dead", "finished", "recorded"]
FRESH_BEAT_SECONDS = 60.0
"""A heartbeat is written every two seconds; one of this age or younger shows a job that lives, whatever else says nothing of it."""
LIVE: tuple[Phase, ...] = ("queued", "running", "unknown")


@dataclass(frozen=True)
class JobStatus:
    """What files, processes and Slurm say of an attempt."""

    job: JobPaths
    phase: Phase
    """planned: nothing started; queued: waits in Slurm; unknown: nobody can tell at present, so nothing is done; dead: it has
    ended without a final result; finished: a result, not yet committed; recorded: the controller's last word is written."""
    pid: int | None = None
    """Of the launcher, where it is a process of this machine."""
    incarnation: int | None = None
    result: Result | None = None
    record: Record | None = None
    starts: int = 0
    """Starts that count against the limit: not those that were stopped on request."""
    intent: Intent | None = None
    seen: tuple[object, object] = (None, None)
    """Claim and incarnations that this was judged by."""
    host: str | None = None
    """Another machine than this one, whose local executor started it."""
    generation: int | None = None
    """Of the controller that did."""
    slurm_id: str | None = None
    """How Slurm's commands name its newest job: 123, or 123_4."""
    said: str = ""
    """What Slurm says of it, in words for people: `pending (Priority)`."""
    said_at: float | None = None
    """Unix time at which that was so."""
    endings: tuple[Ending, ...] = field(default=())
    """How its starts ended so far, oldest first, where they left no final result."""
    refused: bool = False
    """Whether Slurm will not have it as it is: the profile is to be mended."""
    silent: float = 0.0
    """Seconds since the last heartbeat of one that runs on a cluster."""
    stale: int = 0
    """How many of the last endings in a row came without a step further."""
    not_before: float = 0.0
    """Unix time before which it is not to be started again."""

    ended: bool = False
    """Whether the last of `endings` is that of the last start, whose successor is still to be made."""

    @property
    def live(self) -> bool:
        """Whether it may be running, or will."""
        return self.phase in LIVE
