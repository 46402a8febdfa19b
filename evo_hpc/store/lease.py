"""One controller a campaign: ownership by numbered write-once generations, a heartbeat beside them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import AlreadyWritten, StoreError, dump_json, read_json, write_bytes, write_once
from evo_hpc.store.processes import ProcessIdentity

STALE_SECONDS = 300.0
"""Age of a heartbeat after which an owner on another host, about which nothing else is known, may be displaced by hand."""


class LeaseHeld(UserError):
    """Another controller owns the campaign."""


class LeaseLost(StoreError):
    """A newer controller owns the campaign: this one may not commit."""


class Owner(BaseModel):
    """Who holds a generation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: int
    process: ProcessIdentity
    slurm_job_id: str | None = None
    acquired_at: float
    """Unix time in seconds."""
    released: bool = False
    heartbeat_at: float = 0.0
    """Unix time in seconds of the last sign of life."""


@dataclass
class Lease:
    """The right to commit, held by this process."""

    paths: CampaignPaths
    owner: Owner

    @property
    def generation(self) -> int:
        return self.owner.generation

    def check(self) -> None:
        """Raise LeaseLost unless this generation is still the newest. Called before each commit."""
        newest = self.paths.generations()[-1][0]
        if newest != self.generation:
            raise LeaseLost(
                f"{self.paths.controller}: generation {newest} has taken over from {self.generation}; this controller stops"
            )

    def beat(self) -> None:
        """Show that the owner lives."""
        self.check()
        self.owner = self.owner.model_copy(update={"heartbeat_at": time.time()})
        write_bytes(self.paths.lease, dump_json(self.owner.model_dump()), durable=False)

    def release(self) -> None:
        """Say that the owner has gone on purpose."""
        if self.paths.generations()[-1][0] == self.generation:
            self.owner = self.owner.model_copy(update={"released": True, "heartbeat_at": time.time()})
            write_bytes(self.paths.lease, dump_json(self.owner.model_dump()))


def current_owner(paths: CampaignPaths) -> Owner | None:
    """The newest owner, with its last heartbeat where there is one; None when nobody ever ran the campaign."""
    generations = paths.generations()
    if not generations:
        return None
    try:
        owner = Owner.model_validate(read_json(generations[-1][1]))
        if paths.lease.exists():
            lease = Owner.model_validate(read_json(paths.lease))
            if lease.generation == owner.generation:
                return lease
        return owner
    except ValidationError as error:
        raise StoreError(f"{paths.controller}: not a lease ({error.error_count()} problems); move the folder "
                         "aside when no controller runs") from error


def owner_may_live(owner: Owner, now: float) -> bool:
    """Whether the owner may still act: judged by its process here, by its heartbeat elsewhere."""
    if owner.released:
        return False
    if owner.process.here():
        return owner.process.alive()
    return now - owner.heartbeat_at < STALE_SECONDS


def acquire(paths: CampaignPaths, *, take_over: bool = False) -> Lease:
    """Own the campaign.

    Raises LeaseHeld while another controller lives (naming it), or when its host cannot be asked and `take_over` was
    not said. Two that try at once: one wins the next generation, the other is told.
    """
    previous = current_owner(paths)
    if previous is not None and not previous.released:
        where = f"process {previous.process.pid} on {previous.process.host} (generation {previous.generation})"
        if owner_may_live(previous, time.time()):
            stop = f"kill {previous.process.pid}" if previous.process.here() else f"ssh {previous.process.host} kill {previous.process.pid}"
            raise LeaseHeld(f"{paths.root}: a controller runs this campaign already: {where}. Watch it with `evo-hpc status`, "
                            f"or stop it with `{stop}`.")
        if not previous.process.here() and not take_over:
            raise LeaseHeld(f"{paths.root}: owned by {where}, silent for {time.time() - previous.heartbeat_at:.0f} s; this host "
                            "cannot tell whether it is dead. If you know that it is, run again with --take-over.")
    generation = 1 + (previous.generation if previous else 0)
    now = time.time()
    owner = Owner(
        generation=generation, process=ProcessIdentity.current(), slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        acquired_at=now, heartbeat_at=now,
    )
    try:
        write_once(paths.generation(generation), dump_json(owner.model_dump()))
    except AlreadyWritten:
        raise LeaseHeld(f"{paths.root}: another controller took generation {generation} at this very moment") from None
    lease = Lease(paths, owner)
    lease.beat()
    return lease
