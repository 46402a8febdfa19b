"""What a controller can do next, as records, and the plan that they make up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evo_hpc.agent.proposal import Round
from evo_hpc.config.recipe import Recipe
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.spec import Blame, JobKind
from evo_hpc.lineage.decision import Decision
from evo_hpc.lineage.version import Version


@dataclass(frozen=True)
class MakeTasks:
    """Write the splits."""


@dataclass(frozen=True)
class MakeHarness:
    """Number and copy the analyzers and rules as they lie on disk now."""

    number: int


@dataclass(frozen=True)
class CreateVersion:
    """Make a version's folder."""

    version: Version
    recipe: Recipe

    @property
    def id(self) -> str:
        return self.version.id


@dataclass(frozen=True)
class Submit:
    """Commit the intent of a new attempt."""

    owner: str
    kind: JobKind
    attempt: int
    params: dict[str, Any]
    work: str
    """Identity of what the attempt is for."""
    shard: int | None = None
    """Which part of a divided piece of work it is."""


@dataclass(frozen=True)
class Start:
    """Start attempts (again): one, or the parts of one divided piece of work."""

    statuses: tuple[JobStatus, ...]


@dataclass(frozen=True)
class Commit:
    """Publish what a finished attempt made and write its record."""

    status: JobStatus


@dataclass(frozen=True)
class Publish:
    """Put the parts of a divided evaluation together."""

    version: str
    shards: tuple[JobStatus, ...]


@dataclass(frozen=True)
class GiveUp:
    """Write down that an attempt failed."""

    status: JobStatus
    blame: Blame
    error: str


@dataclass(frozen=True)
class Watch:
    """Have the live analyzers look at a training run up to a step."""

    version: str
    step: int


@dataclass(frozen=True)
class Stop:
    """Ask the training job of a run that the futility rule has ended to end."""

    version: str
    status: JobStatus


@dataclass(frozen=True)
class Kill:
    """End an attempt that runs on a cluster and shows no life; it is tried again."""

    status: JobStatus
    why: str


@dataclass(frozen=True)
class EndEarly:
    """Publish what a run that the futility rule has ended left behind, and write its job's record."""

    version: str
    status: JobStatus


@dataclass(frozen=True)
class Analyse:
    """Have all analyzers look at a version."""

    version: str


@dataclass(frozen=True)
class Compare:
    """Look at dev: a version against a parent or the incumbent."""

    version: str
    against: str


@dataclass(frozen=True)
class Decide:
    """Write a version's decision."""

    version: str


@dataclass(frozen=True)
class Cancel:
    """Write down that a person has cancelled a version."""

    version: str
    decision: Decision


@dataclass(frozen=True)
class Propose:
    """Write down what the agent proposes next."""

    round: Round


Action = MakeTasks | MakeHarness | CreateVersion | Submit | Start | Commit | Publish | GiveUp | Watch | Stop | Kill | EndEarly | Analyse | Compare | Decide | Cancel | Propose


@dataclass(frozen=True)
class Blocker:
    """Work that cannot go on."""

    what: str
    blame: Blame
    error: str


@dataclass(frozen=True)
class Plan:
    """What to do now, what is awaited, and what stands in the way."""

    actions: tuple[Action, ...]
    running: tuple[JobStatus, ...]
    """Live ones: also those that wait in the queue, or of which nobody can tell at present."""
    waiting: tuple[JobStatus, ...]
    """Those that are to be started again later."""
    blockers: tuple[Blocker, ...]
    done: bool
