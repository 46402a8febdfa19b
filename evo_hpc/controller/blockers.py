"""What a controller that cannot go on ends with."""

from __future__ import annotations

from collections.abc import Iterable

from evo_hpc.controller.actions import Blocker
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.errors import Failure, UserError


def blocked(blockers: tuple[Blocker, ...]) -> UserError | Failure:
    """The error that a blocked campaign ends with: the user's when any of it is theirs to mend."""
    text = "\n".join(f"{b.what}: {b.error}" for b in blockers)
    if any(b.blame == "user" for b in blockers):
        return UserError(f"{text}\nMend it and run again: a new attempt is made.")
    return Failure(f"{text}\nThe campaign stops here; what was committed stays. Run again for a new attempt.")


def refuse_what_runs_elsewhere(statuses: Iterable[JobStatus]) -> None:
    """Raise UserError for a job of another machine's local executor: from here it can be neither seen nor ended."""
    for status in statuses:
        if status.host is not None:
            raise UserError(f"{status.job.root}: runs on {status.host}, started by the local executor there; go on with the campaign on that machine, "
                            "or remove this job folder if it is gone for good")
