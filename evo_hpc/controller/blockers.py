"""What a campaign that cannot go on ends with."""

from __future__ import annotations

from evo_hpc.controller.actions import Blocker
from evo_hpc.errors import Failure, UserError


def blocked(blockers: tuple[Blocker, ...]) -> UserError | Failure:
    """The error that a blocked campaign ends with: the user's when any of it is theirs to mend."""
    text = "\n".join(f"{b.what}: {b.error}" for b in blockers)
    if any(b.blame == "user" for b in blockers):
        return UserError(f"{text}\nMend it and run again: a new attempt is made.")
    return Failure(f"{text}\nThe campaign stops here; what was committed stays. Run again for a new attempt.")
