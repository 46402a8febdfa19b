"""What an agent proposes, and the record of the round that it was proposed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import load_model
from evo_hpc.lineage.signed import Signed
from evo_hpc.lineage.version import Version


class Proposal(Config):
    """A version to be made: its version.yaml (id included) and its full recipe."""

    version: Version
    recipe: Recipe


class Considered(Config):
    """A rule that was looked at, and what became of it."""

    rule: str
    outcome: Literal["proposed", "passed over"]
    why: str
    """In words: what held or did not, e.g. `needs optimisation.inert_clip, which v0001 does not have`."""


class Round(Config, Signed):
    """`rounds/round-N.yaml`, write-once: one time that the agent was asked."""

    schema_version: Literal[1] = 1
    number: int
    harness: str
    """Whose findings and rules."""
    incumbent: str
    """What it went on from."""
    decided: list[str]
    """The versions that it knew the decisions of."""
    proposals: list[Proposal]
    """Empty when there was nothing left to propose: the search ends there."""
    considered: list[Considered] = Field(default_factory=list)
    generation: int

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return self.model_dump(mode="json")


def read_round(path: Path) -> Round:
    """A round. Raises ConfigError with file and line."""
    return load_model(path, Round)
