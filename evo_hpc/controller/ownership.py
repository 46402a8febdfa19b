"""Holding a campaign: the lease, its heartbeat, and the wish to stop, from the first action to the last."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.commands import Commands, SlurmError
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.errors import Failure
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import sweep_temps
from evo_hpc.store.lease import Lease, Owner, acquire, slurm_id

_BEAT_SECONDS = 5.0
_EARLY_SECONDS = 10.0
"""The most that Slurm ends a job before the time that its warning announced."""
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM) if slurm_id(os.environ) else ()


class Interrupted(Failure):
    """The controller was told to stop; its jobs have saved, and running again goes on."""

    exit_code = 130


def job_lives(owner: Owner) -> bool | None:
    """Whether the Slurm job of an owner is in the queue, by id and name; None when Slurm does not answer."""
    try:
        jobs = Commands.of(Slurm()).queue()
    except SlurmError:
        return None
    return any((job.id, job.name) == (owner.slurm_job_id, owner.slurm_job_name) and life(job.state) != "terminal" for job in jobs)


@dataclass
class Ownership:
    """The right to act for a campaign."""

    lease: Lease
    stop: int | None = None
    """The signal that asked to stop; null while none has."""
    warned: bool = False
    """Whether Slurm has warned that the controller's own job is about to end."""
    _warned_at: float = 0.0
    """Reading of the monotonic clock."""
    _beaten: float = 0.0

    def signalled(self, signum: int, warned_seconds: float) -> None:
        """Remember a signal; safe in a handler. SIGTERM that comes when the warning has run out is the end that was warned of: no
        wish of a person's to stop, who comes next goes on."""
        now = time.monotonic()
        if signum in _WARNINGS:
            self._warned_at = self._warned_at if self.warned else now
            self.warned = True
        elif not (self.warned and signum == signal.SIGTERM and now >= self._warned_at + warned_seconds - _EARLY_SECONDS):
            self.stop = signum

    def beat(self) -> None:
        """Show life, now and then. Raises LeaseLost when another controller has taken over."""
        if time.time() - self._beaten > _BEAT_SECONDS:
            self.lease.beat()
            self._beaten = time.time()


@contextmanager
def owned(paths: CampaignPaths, *, take_over: bool = False, warned_seconds: float = float("inf")) -> Iterator[Ownership]:
    """Own the campaign within a `with`: leftovers are swept, SIGINT and SIGTERM are noted in `stop`, warnings of Slurm, which come so
    long before the end, in `warned`. Raises LeaseHeld."""
    ownership = Ownership(acquire(paths, take_over=take_over, ask=job_lives))

    def remember(signum: int, frame: Any) -> None:
        ownership.signalled(signum, warned_seconds)

    previous = {s: signal.signal(s, remember) for s in (signal.SIGINT, signal.SIGTERM, *_WARNINGS)}
    try:
        sweep_temps(paths.root)
        yield ownership
    finally:
        try:
            ownership.lease.release(handed_over=ownership.warned and ownership.stop is None)
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
