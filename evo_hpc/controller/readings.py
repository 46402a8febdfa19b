"""Which looks at dev a decision rests on: the parents in order, then the incumbent. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evo_hpc.lineage.comparison import Comparison
from evo_hpc.lineage.decision import Reading, Role

if TYPE_CHECKING:
    from evo_hpc.controller.state import CampaignState, VersionState


def next_look(state: CampaignState, version: VersionState) -> str | None:
    """The version that `version` is to be compared with next on dev; None when the gate has read enough.

    The parents come first, in order. The incumbent is looked at only when all parents are beaten: a look costs alpha.
    """
    if version.stopped_early is not None:
        return None
    parents = scored_parents(state, version)
    comparisons = []
    for parent in parents:
        comparison = version.comparison_with(state.versions[parent])
        if comparison is None:
            return parent
        comparisons.append(comparison)
    incumbent = state.incumbent_before(version.id)
    if incumbent in parents or any(comparison.verdict != "better" for comparison in comparisons):
        return None
    return None if version.comparison_with(state.versions[incumbent]) else incumbent


def scored_parents(state: CampaignState, version: VersionState) -> list[str]:
    """The parents that there is a score of; one that was stopped early or cancelled has none, and the incumbent stands in for it."""
    parents = [state.versions[parent] for parent in version.node.version.parents]
    return [parent.id for parent in parents if parent.stopped_early is None and not parent.cancelled]


def readings_of(state: CampaignState, version: VersionState) -> list[Reading]:
    """The looks that the decision rests on, in their order."""
    if version.stopped_early is not None or version.cancelled:
        return []
    parents, incumbent = scored_parents(state, version), state.incumbent_before(version.id)
    found = []
    for against in [*parents, *([incumbent] if incumbent not in parents else [])]:
        comparison = version.comparison_with(state.versions[against])
        if comparison is not None:
            role: Role = "incumbent" if against not in parents else "parent and incumbent" if against == incumbent else "parent"
            found.append(_reading(comparison, role))
    return sorted(found, key=lambda reading: reading.look)


def _reading(comparison: Comparison, role: Role) -> Reading:
    seen = comparison.at_look_alpha
    return Reading(
        against=comparison.against, role=role, look=comparison.look.number, alpha=comparison.look.alpha, difference=seen.difference,
        ci_low=seen.ci_low, ci_high=seen.ci_high, n_tasks=seen.n_tasks, verdict=comparison.verdict,
    )
