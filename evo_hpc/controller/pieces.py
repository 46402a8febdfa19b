"""The parts that one evaluation is divided into, and how far each is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evo_hpc.dispatch.status import JobStatus


@dataclass(frozen=True)
class Piece:
    """One part of an evaluation, or the whole of it."""

    shard: int | None
    params: dict[str, Any]
    work: str
    attempts: list[JobStatus]

    @property
    def last(self) -> JobStatus | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def is_of_last(self) -> bool:
        """Whether the last attempt is at this very work."""
        return self.last is not None and self.last.intent is not None and self.last.intent.work == self.work

    @property
    def ready(self) -> bool:
        """Whether the last attempt has made it, recorded or not."""
        if self.last is None or not self.is_of_last:
            return False
        return is_done(self.last) or (self.last.record is not None and self.last.record.state == "done")


def is_done(status: JobStatus) -> bool:
    """Whether an attempt has its result, a good one, and no record yet."""
    return status.phase == "finished" and status.result is not None and status.result.outcome == "done"


def divided(status: JobStatus) -> tuple[str, str] | None:
    """Whose work of which kind an attempt is a part of; None where it is the whole."""
    return None if status.job.shard is None else (str(status.job.owner), status.job.kind)
