"""Whether a rule's condition holds of a version, and how people say so."""

from __future__ import annotations

from evo_hpc.agent.evidence import VersionEvidence
from evo_hpc.agent.rules import Condition
from evo_hpc.lineage.findings import Citation


def holds(condition: Condition, version: VersionEvidence) -> bool:
    """Whether it does; a measure that was not taken, or came out empty, is beyond nothing."""
    if condition.measure is None:
        return bool(cited(condition, version))
    value = _value(condition.measure, version)
    return value is not None and (condition.above is None or value > condition.above) and (condition.below is None or value < condition.below)


def cited(condition: Condition, version: VersionEvidence) -> list[Citation]:
    """The version's findings that the condition names."""
    return [citation for citation in version.findings if citation.finding in condition.findings]


def fact(condition: Condition, version: VersionEvidence) -> str:
    """A condition that holds, in words."""
    if condition.measure is None:
        return f"{version.id} has {' and '.join(dict.fromkeys(citation.finding for citation in cited(condition, version)))}"
    return f"{condition.measure} is {_value(condition.measure, version):.3g} on {version.id}, {condition.bounds}"


def lack(condition: Condition, version: VersionEvidence) -> str:
    """A condition that does not hold, in words."""
    if condition.measure is None:
        *others, last = condition.findings
        return f"{', '.join(others)}{' or ' if others else ''}{last}, which {version.id} does not have"
    value = _value(condition.measure, version)
    found = f"it is {value:.3g} on {version.id}" if value is not None else f"it was not measured on {version.id}"
    return f"{condition.measure} {condition.bounds}; {found}"


def _value(measure: str, version: VersionEvidence) -> float | None:
    found = version.measures.get(measure)
    return None if found is None else found.value
