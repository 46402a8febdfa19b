"""One controller a campaign: ownership by numbered write-once generations, a heartbeat beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import AlreadyWritten, StoreError, dump_json, read_json, write_bytes, write_once
from evo_hpc.store.processes import ProcessIdentity

STALE_SECONDS = 300.0
"""Age of a heartbeat after which an owner on another host, about which nothing else is known, may be displaced by hand."""


JUST_ENDED_SECONDS = 10.0
"""Age that the heartbeat of an owner must have, too, whose Slurm job is over: its last process may be ending yet."""


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
    """The Slurm job that it runs in; null outside one."""
    slurm_job_name: str | None = None
    """Its name: Slurm can reuse an id."""
    slurm_restart: int = 0
    """How often that job had been requeued."""
    since: int = 0
    """The generation at which a person ran the campaign; Slurm running the controller again is no new try."""
    handed_over: bool = False
    """Whether it left on purpose for a successor to go on."""
    acquired_at: float
    """Unix time in seconds."""
    released: bool = False
    heartbeat_at: float = 0.0
    """Unix time in seconds of the last sign of life."""


Ask = Callable[[Owner], bool | None]
"""Whether the Slurm job of an owner lives; None when nobody can tell."""


def slurm_id(environment: Mapping[str, str]) -> str | None:
    """How Slurm's commands name the job that a process runs in; None outside one."""
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment.get("SLURM_JOB_ID")


def slurm_restart(environment: Mapping[str, str]) -> int:
    """How often that job has been requeued."""
    return int(environment.get("SLURM_RESTART_COUNT") or 0)


def _requeued(previous: Owner, owner: Owner) -> bool:
    """Whether the previous owner was an earlier run of this very Slurm job, which Slurm ended before it put it into the queue again."""
    same = previous.slurm_job_id is not None and (previous.slurm_job_id, previous.slurm_job_name) == (owner.slurm_job_id, owner.slurm_job_name)
    return same and owner.slurm_restart > previous.slurm_restart


@dataclass
class Lease:
    """The right to commit, held by this process."""

    paths: CampaignPaths
    owner: Owner

    @property
    def generation(self) -> int:
        return self.owner.generation

    def check(self) -> None:
        """Raise LeaseLost unless the newest generation is this one's own. Called before each commit."""
        generations = _generations(self.paths)
        newest = generations[-1][0] if generations else 0
        if newest > self.generation:
            raise LeaseLost(
                f"{self.paths.controller}: generation {newest} has taken over from {self.generation}; this controller stops"
            )
        if newest < self.generation:
            raise LeaseLost(f"{self.paths.generation(self.generation)}: gone, removed by hand, while its controller ran; this "
                            "controller stops. Run it again: what was committed counts.")
        holder = _read_owner(generations[-1][1], newest)
        if (holder.process, holder.acquired_at) != (self.owner.process, self.owner.acquired_at):
            raise LeaseLost(f"{self.paths.generation(newest)}: was removed by hand and written anew by process "
                            f"{holder.process.pid} on {holder.process.host}; this controller stops")

    def beat(self) -> None:
        """Show that the owner lives."""
        self.check()
        self.owner = self.owner.model_copy(update={"heartbeat_at": time.time()})
        write_bytes(self.paths.lease, dump_json(self.owner.model_dump()), durable=False)

    def release(self, handed_over: bool = False) -> None:
        """Say that the owner has gone on purpose, perhaps for a successor; says nothing when the lease was lost before."""
        try:
            self.check()
        except LeaseLost:
            return
        self.owner = self.owner.model_copy(update={"released": True, "handed_over": handed_over, "heartbeat_at": time.time()})
        write_bytes(self.paths.lease, dump_json(self.owner.model_dump()))


def _generations(paths: CampaignPaths) -> list[tuple[int, Path]]:
    try:
        return paths.generations()
    except FileNotFoundError:  # removed while it was listed
        return []
    except OSError as error:
        raise StoreError(f"{paths.controller}: cannot be read ({error.strerror})") from error


def _read_owner(path: Path, generation: int | None = None) -> Owner:
    """An owner from its file. Raises StoreError when it is damaged or of another generation than its name says."""
    advice = "when no controller runs, remove this one file and run again"
    try:
        owner = Owner.model_validate(read_json(path))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"])) or "content"
        raise StoreError(f"{path}: not a record of an owner ({field}: {problem['msg']}); {advice}") from error
    except StoreError as error:
        raise StoreError(f"{error}; {advice}" if path.exists() else str(error)) from error
    if generation is not None and owner.generation != generation:
        raise StoreError(f"{path}: says generation {owner.generation} inside; {advice}")
    return owner


def current_owner(paths: CampaignPaths) -> Owner | None:
    """The newest owner, with its last heartbeat where there is one; None when nobody ever ran the campaign.

    Raises StoreError, naming the file, when its record is damaged.
    """
    generations = _generations(paths)
    if not generations:
        return None
    number, path = generations[-1]
    owner = _read_owner(path, number)
    if paths.lease.exists():
        lease = _read_owner(paths.lease)
        if lease.generation == owner.generation:
            return lease
    return owner


def owner_of(paths: CampaignPaths, generation: int) -> Owner | None:
    """Who held a generation; None where its record is gone. Raises StoreError when it is damaged."""
    path = paths.generation(generation)
    return _read_owner(path, generation) if path.exists() else None


def owner_may_live(owner: Owner, now: float, ask: Ask | None = None) -> bool:
    """Whether the owner may still act: judged by its process here, elsewhere by its Slurm job, and by its heartbeat where
    nobody can be asked."""
    if owner.released:
        return False
    if owner.process.here():
        return owner.process.alive()
    if owner.slurm_job_id is not None and ask is not None and (answer := ask(owner)) is not None:
        return answer or now - owner.heartbeat_at < JUST_ENDED_SECONDS
    return now - owner.heartbeat_at < STALE_SECONDS


def _how_to_stop(owner: Owner) -> str:
    process = owner.process
    if owner.slurm_job_id is not None:
        return f"with `scancel {owner.slurm_job_id}`"
    if process.here():
        return f"with `kill {process.pid}`"
    if process.host == ProcessIdentity.current().host:  # a kill by name could hit a stranger on this machine
        return f"on the other machine named {process.host}, where it is process {process.pid}"
    return f"with `ssh {process.host} kill {process.pid}`"


def acquire(paths: CampaignPaths, *, take_over: bool = False, ask: Ask | None = None) -> Lease:
    """Own the campaign. `ask` says whether an owner's Slurm job lives; None of it: nobody can tell.

    Raises LeaseHeld while another controller lives (naming it), or when nobody can tell and `take_over` was
    not said. Two that try at once: one wins the next generation, the other is told.
    """
    previous = current_owner(paths)
    now = time.time()
    owner = Owner(
        generation=1 + (previous.generation if previous else 0), process=ProcessIdentity.current(), slurm_job_id=slurm_id(os.environ),
        slurm_job_name=os.environ.get("SLURM_JOB_NAME"), slurm_restart=slurm_restart(os.environ), acquired_at=now,
        heartbeat_at=now,
    )
    goes_on = previous is not None and (_requeued(previous, owner) or (previous.handed_over and previous.slurm_job_name == owner.slurm_job_name))
    owner = owner.model_copy(update={"since": previous.since if goes_on and previous is not None else owner.generation})
    if previous is not None and not previous.released and not _requeued(previous, owner):
        job = f"Slurm job {previous.slurm_job_id}, " if previous.slurm_job_id else ""
        where = f"{job}process {previous.process.pid} on {previous.process.host} (generation {previous.generation})"
        answer = ask(previous) if ask is not None and previous.slurm_job_id is not None and not previous.process.here() else None
        if owner_may_live(previous, now, (lambda _: answer)):
            raise LeaseHeld(f"{paths.root}: a controller runs this campaign already: {where}. Watch it with `evo-hpc status`, "
                            f"or stop it {_how_to_stop(previous)}.")
        if not previous.process.here() and answer is None and not take_over:
            raise LeaseHeld(f"{paths.root}: owned by {where}, silent for {time.time() - previous.heartbeat_at:.0f} s; this host "
                            "cannot tell whether it is dead. If you know that it is, run again with --take-over.")
    try:
        write_once(paths.generation(owner.generation), dump_json(owner.model_dump()))
    except AlreadyWritten:
        raise LeaseHeld(f"{paths.root}: another controller took generation {owner.generation} at this very moment") from None
    lease = Lease(paths, owner)
    lease.beat()
    return lease
