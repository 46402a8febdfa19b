"""What an agent is given to decide by: recipes, findings on probe and train, verdicts; never a row of dev."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.decision import KEPT, Decision
from evo_hpc.lineage.factors import Change
from evo_hpc.lineage.findings import Citation, Measure
from evo_hpc.lineage.version import Version


@dataclass(frozen=True)
class VersionEvidence:
    """One version, as far as an agent may see it."""

    version: Version
    recipe: Recipe
    init: str
    """Where training starts, resolved: `base` or `v0001@60`."""
    changes: tuple[Change, ...]
    """Against its first parent."""
    decision: Decision | None
    """Null for the root, which nothing is decided about."""
    dev_estimate: float | None
    """Avg@k on dev, rounded to a whole point; null where it was never read."""
    measures: Mapping[str, Measure]
    """By full name, e.g. `signal.dead_group_fraction`."""
    findings: tuple[Citation, ...]

    @property
    def id(self) -> str:
        return self.version.id

    @property
    def parent(self) -> str | None:
        return self.version.parents[0] if self.version.parents else None

    @property
    def kept(self) -> bool:
        return self.decision is not None and self.decision.decision in KEPT


@dataclass(frozen=True)
class Evidence:
    """A campaign whose versions are all decided."""

    incumbent: str
    """The version to beat."""
    versions: Mapping[str, VersionEvidence]
    """In the order of their ids."""
    domain: str
    harness: str

    @property
    def start(self) -> str:
        """The version whose recipe is changed next: the incumbent, or the first that trains while the base policy is not beaten."""
        if self.versions[self.incumbent].recipe.steps:
            return self.incumbent
        return next((name for name, version in self.versions.items() if version.recipe.steps), self.incumbent)
