"""What a controller can do next, as records, and the plan that they make up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evo_hpc.agent.proposal import Round
from evo_hpc.config.recipe import Recipe
from evo_hpc.dispatch.local import JobStatus
from evo_hpc.jobs.spec import Blame, JobKind
from evo_hpc.lineage.version import Version
from evo_hpc.paths import JobPaths


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


@dataclass(frozen=True)
class Start:
    """Start an attempt (again)."""

    job: JobPaths


@dataclass(frozen=True)
class Commit:
    """Publish what a finished attempt made and write its record."""

    status: JobStatus


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
class Propose:
    """Write down what the agent proposes next."""

    round: Round


Action = MakeTasks | MakeHarness | CreateVersion | Submit | Start | Commit | GiveUp | Watch | Stop | EndEarly | Analyse | Compare | Decide | Propose


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
    blockers: tuple[Blocker, ...]
    done: bool
