"""Claims: of several incarnations of an attempt, exactly one may commit; a newer start supersedes an older."""

from __future__ import annotations

from pydantic import ValidationError

from evo_hpc.errors import Failure
from evo_hpc.jobs.spec import Identity
from evo_hpc.paths import IncarnationPaths, JobPaths
from evo_hpc.store.atomic import AlreadyWritten, StoreError, dump_json, read_json, write_once


class Superseded(Failure):
    """A newer incarnation has claimed this attempt: the older one stops and commits nothing."""


def read_claim(job: JobPaths, number: int) -> Identity:
    """The identity behind a claim."""
    path = job.claim(number)
    try:
        return Identity.model_validate(read_json(path))
    except ValidationError as error:
        raise StoreError(f"{path}: not a claim ({error.error_count()} problems)") from error


def current_claim(job: JobPaths) -> tuple[int, Identity] | None:
    """The newest claim and its number, or None before the first."""
    claims = job.claims()
    return (claims[-1][0], read_claim(job, claims[-1][0])) if claims else None


def claim(job: JobPaths, identity: Identity) -> IncarnationPaths:
    """Take the attempt for this incarnation and make its folder.

    Claims are numbered and write-once, so two starts that race both see who was first. Raises Superseded when a start
    of the same or a higher rank holds it.
    """
    if job.record.exists():  # a job that slurmctld replayed after a crash, or that somebody submitted by hand
        raise Superseded(f"{job.root}: the controller has written its last word on this attempt; this start stops")
    while True:
        current = current_claim(job)
        number = 0 if current is None else current[0] + 1
        if current is not None and current[1].rank >= identity.rank:
            raise Superseded(f"{job.root}: start {identity.rank} finds the attempt claimed by {current[1].rank}; it stops")
        try:
            write_once(job.claim(number), dump_json(identity.model_dump()))
        except AlreadyWritten:
            continue
        incarnation = job.incarnation(number)
        incarnation.root.mkdir(exist_ok=True)
        return incarnation


def check_claim(job: JobPaths, incarnation: IncarnationPaths) -> None:
    """Raise Superseded unless this incarnation still holds the attempt. Called before each commit."""
    if job.record.exists():
        # An incarnation of before ended well while its copy, requeued after a node's failure, began: the rest of this would be for nothing.
        raise Superseded(f"{job.root}: the controller has written its last word on this attempt; incarnation {incarnation.number} stops")
    claims = job.claims()
    if not claims:
        raise Superseded(f"{job.root}: its claims are gone (the folder was removed by hand); this incarnation stops")
    if claims[-1][0] != incarnation.number:
        raise Superseded(f"{incarnation.root}: incarnation {claims[-1][0]} has taken over; this one stops")
