"""version.yaml: what a version is, where it came from, and what it predicts."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from evo_hpc.config.base import Config
from evo_hpc.lineage.findings import Citation

VersionId = Annotated[str, Field(pattern=r"^v\d{4,}$")]
_INIT = re.compile(r"^(base|v\d{4,}@\d+)$")


class Prediction(Config):
    """A falsifiable effect: `metric` moves by at least `by` against the parent."""

    metric: str
    """A score, `dev/avg_at_k` or `probe/avg_at_k`, or an analyzer's measure, e.g. `signal.dead_group_fraction`."""
    direction: Literal["up", "down"]
    """Which way."""
    by: float
    """At least this much, in the metric's unit."""


class Version(Config):
    """`version.yaml` of one node of the tree."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    id: VersionId
    """Equal to the folder's name."""
    parents: list[VersionId] = Field(default_factory=list)
    """None for the root, one for an intervention or a replicate, two for a merge."""
    init: str | None = None
    """Where training starts: `base` or `v0003@50` (that version's policy at its last step); null = where the parent started."""
    author: Literal["campaign", "agent", "person"] = "person"
    """Who proposed it."""
    hypothesis: str = ""
    """Change X, then metric Y moves, because Z."""
    prediction: Prediction | None = None
    """What would show that the hypothesis holds."""
    rollback: str = ""
    """What to do if it does not."""
    rule: str | None = None
    """The rule that proposed it, where the rule-based agent did."""
    evidence: list[Citation] = Field(default_factory=list)
    """Findings that the proposal rests on."""

    @field_validator("init")
    @classmethod
    def _init(cls, value: str | None) -> str | None:
        if value is not None and not _INIT.match(value):
            raise ValueError("must be `base` or `vNNNN@STEP`")
        return value
