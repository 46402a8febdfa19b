"""decision.yaml: what became of a version, the readings that say so, and the evidence that it cites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from evo_hpc.config.base import Config
from evo_hpc.config.yaml_io import dump_model, load_model
from evo_hpc.errors import UserError
from evo_hpc.lineage.findings import Citation
from evo_hpc.lineage.version import Prediction, VersionId
from evo_hpc.store.atomic import write_once

DecisionKind = Literal["keep", "prune", "revert", "merge"]
Verdict = Literal["better", "not shown", "worse"]
Role = Literal["parent", "incumbent", "parent and incumbent"]
KEPT: frozenset[DecisionKind] = frozenset({"keep", "merge"})


class BadDecision(UserError):
    """A decision that contradicts the campaign's own records."""


class Reading(Config):
    """One look at dev, as the gate read it."""

    against: VersionId
    role: Role
    """Why it was compared."""
    look: int
    alpha: float
    """What this look spent."""
    difference: float
    """Avg@k on dev, this version minus the other."""
    ci_low: float
    """At `alpha`."""
    ci_high: float
    n_tasks: int
    verdict: Verdict
    """Where the interval at `alpha` lies: above zero, around it, below it."""


class PredictionCheck(Config):
    """A prediction against what happened, by code."""

    prediction: Prediction
    against: VersionId
    before: float | None = None
    """The metric of the version it is compared with."""
    after: float | None = None
    difference: float | None = None
    ci_low: float | None = None
    """95 % interval of the difference; null where the metric has no error estimate."""
    ci_high: float | None = None
    outcome: Literal["held", "failed", "inconclusive"]
    why: str
    """In words."""


class Decision(Config):
    """`decision.yaml` of a version."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    version: VersionId
    """Equal to the folder's name."""
    decision: DecisionKind
    """`keep`; `prune`: no shown gain, or stopped early; `revert`: shown harm, its change is undone; `merge`: kept, and joined with kept siblings."""
    promoted: bool = False
    """Whether it is the incumbent from here on: kept, and better than the incumbent too."""
    merge_with: list[VersionId] = Field(default_factory=list)
    """Kept siblings that it is joined with, for `merge`."""
    by: Literal["gate", "person"] = "gate"
    """`person`: overruled by hand; then `because` is the person's."""
    because: str
    """In words."""
    outcome: Literal["completed", "stopped_early", "cancelled"] = "completed"
    """How its training ended; `cancelled`: a person ended the version before it was decided."""
    gate: list[Reading] = Field(default_factory=list)
    """In the order of the looks."""
    prediction: PredictionCheck | None = None
    """Null where the version predicts nothing."""
    evidence: list[Citation] = Field(default_factory=list)
    """Findings on this version."""
    harness: str | None = None
    """The harness that found them."""

    @model_validator(mode="after")
    def _consistent(self) -> Decision:
        if self.promoted and self.decision not in KEPT:
            raise ValueError(f"a version that is not kept ({self.decision}) cannot be promoted")
        if self.outcome == "stopped_early" and self.decision != "prune":
            raise ValueError(f"a run that was stopped early can only be pruned, not `{self.decision}`: its score was never read")
        if self.outcome == "cancelled" and (self.decision, self.by) != ("prune", "person"):
            raise ValueError("a version is cancelled by a person, and pruned: `by: person`, `decision: prune`")
        if bool(self.merge_with) != (self.decision == "merge"):
            raise ValueError("`merge` names the siblings in `merge_with`, and nothing else does")
        if self.by == "person" and not self.because.strip():
            raise ValueError("a decision by a person says why, in `because`")
        return self


def conclude(outcome: Literal["completed", "stopped_early"], readings: Sequence[Reading]) -> tuple[DecisionKind, bool]:
    """What the gate's readings say, and whether the version is promoted. Pure.

    Kept when it is shown better than every parent that has a score (than the incumbent, where none has); reverted when it
    is shown worse than one; pruned otherwise, and when its training was stopped early. Promoted when it is kept and shown
    better than the incumbent too.
    """
    parents = [reading for reading in readings if "parent" in reading.role] or list(readings)
    if outcome == "stopped_early" or not parents:
        return "prune", False
    if any(reading.verdict == "worse" for reading in parents):
        return "revert", False
    if all(reading.verdict == "better" for reading in parents):
        return "keep", any("incumbent" in reading.role and reading.verdict == "better" for reading in readings)
    return "prune", False


def read_decision(path: Path) -> Decision:
    """A decision. Raises ConfigError with file and line, BadDecision when it is another version's."""
    found = load_model(path, Decision)
    if found.version != path.parent.name:
        raise BadDecision(f"{path}: belongs to {found.version}, not to {path.parent.name}; a copied version starts without decision.yaml: remove it here")
    return found


def write_decision(path: Path, decision: Decision) -> None:
    """Commit a decision, once. Raises AlreadyWritten when another is there."""
    write_once(path, dump_model(decision))
