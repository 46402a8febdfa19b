"""What analyzers say, as records: measures, findings, and the citations of them in versions and decisions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.config.campaign import FindingId

Severity = Literal["info", "warning", "critical"]

class Measure(Config):
    """One number that an analyzer took of a version."""

    value: float | None
    """Null where there was nothing to measure."""
    se: float | None = None
    """Its standard error, where the analyzer gives one."""


class Finding(Config):
    """A typed statement: a measure on the wrong side of a threshold."""

    id: FindingId
    severity: Severity
    measure: str
    """`analyzer.measure`."""
    value: float
    above: float | None = None
    """The threshold that the value exceeds; or null."""
    below: float | None = None
    """The threshold that the value falls short of; or null."""
    text: str
    """For people, in one sentence."""
    evidence: list[dict[str, Any]] = Field(default_factory=list)
    """Rows of the analyzer's table that show it."""


class AnalyzerReport(Config):
    """`findings.json` of one analyzer on one version."""

    schema_version: Literal[1] = 1
    analyzer: str
    layer: str
    version: str
    up_to_step: int | None
    """Only trainer steps up to here were looked at; null = all."""
    measures: dict[str, Measure]
    """By bare name, e.g. `dead_group_fraction`."""
    findings: list[Finding]
    rows: int
    """Rows of the table beside it."""


class Citation(Config):
    """Evidence that a version or a decision rests on."""

    finding: FindingId
    version: str
    """Whose rollouts and metrics it speaks of."""
    severity: Severity
    value: float
    threshold: float
    text: str
    source: str
    """The findings.json that has it, relative to the campaign."""


def cite(finding: Finding, version: str, source: str) -> Citation:
    """A finding as evidence."""
    threshold = finding.above if finding.above is not None else finding.below
    assert threshold is not None
    return Citation(
        finding=finding.id, version=version, severity=finding.severity, value=finding.value, threshold=threshold, text=finding.text, source=source,
    )
