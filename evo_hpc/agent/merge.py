"""Merges: which kept siblings can be joined, and the version that has the changes of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from evo_hpc.agent.barred import tried_in
from evo_hpc.agent.evidence import Evidence, VersionEvidence
from evo_hpc.agent.intervention import InvalidIntervention, check_allowed, join
from evo_hpc.agent.proposal import Considered, Proposal
from evo_hpc.agent.rules import MERGE
from evo_hpc.agent.sentences import shown
from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.findings import Citation
from evo_hpc.lineage.version import Prediction, Version


def merge_partner(versions: Mapping[str, VersionEvidence], version_id: str) -> list[str]:
    """Kept siblings that a version could be joined with, in the order of their ids; empty when there are none.

    The version itself need not be decided yet; its siblings were decided before it.
    """
    return [
        name for name, other in versions.items()
        if name != version_id and other.kept and _obstacle(versions, other, versions[version_id]) is None
    ]


def merges(evidence: Evidence) -> Iterator[tuple[VersionEvidence, VersionEvidence] | Considered]:
    """The pairs that decisions of `merge` ask for and that can be joined, and why the other pairs cannot."""
    seen: set[frozenset[str]] = set()
    for name, version in evidence.versions.items():
        if version.decision is None or version.decision.decision != "merge":
            continue
        for partner in version.decision.merge_with:
            pair = frozenset((partner, name))
            if pair in seen:
                continue
            seen.add(pair)
            other = evidence.versions.get(partner)
            why = f"there is no version {partner}" if other is None else _obstacle(evidence.versions, other, version)
            if other is None or why is not None:
                yield Considered(rule=MERGE, outcome="passed over", why=f"{partner} and {name}: {why}")
            else:
                yield _in_order(evidence, other, version)


def merged(pair: tuple[VersionEvidence, VersionEvidence], parent: Recipe, version_id: str) -> Proposal:
    """The version that joins two siblings with this parent."""
    first, second = pair
    said = [_said(version) for version in pair]
    return Proposal(
        version=Version(
            id=version_id, parents=[first.id, second.id], author="agent",
            hypothesis=f"Both {first.id} ({said[0]}) and {second.id} ({said[1]}) were kept; their changes touch different fields, so together "
                       f"they raise the score on dev over {first.id} alone.",
            prediction=Prediction(metric="dev/avg_at_k", direction="up", by=0.0),
            rollback=f"Go on from {first.id} without the change of {second.id} ({said[1]}): the two do not add up.",
            evidence=_together(first.version.evidence, second.version.evidence),
        ),
        recipe=join(parent, first.recipe, second.recipe),
    )


def _in_order(evidence: Evidence, one: VersionEvidence, other: VersionEvidence) -> tuple[VersionEvidence, VersionEvidence]:
    """The incumbent first where it is one of the two: the merge has to be better than that one, in a single look at dev."""
    return (other, one) if other.id == evidence.incumbent else (one, other)


def _obstacle(versions: Mapping[str, VersionEvidence], one: VersionEvidence, other: VersionEvidence) -> str | None:
    """Why two versions cannot be joined, in words; None when they can.

    Siblings have all parents in common, so neither can be the other's ancestor; kept versions ran to their end.
    """
    if not one.version.parents or one.version.parents != other.version.parents:
        return "are not siblings"
    dropped = [version.id for version in (one, other) if version.decision is not None and not version.kept]
    if dropped:
        return f"{dropped[0]} is not kept"
    if one.init != other.init:
        return f"start from different policies, {one.init} and {other.init}"
    common = {change.field for change in one.changes} & {change.field for change in other.changes}
    if common:
        return f"both change {', '.join(sorted(common))}"
    joined = next((each.id for each in versions.values() if set(each.version.parents) == {one.id, other.id}), None)
    if joined is not None:
        return f"joined in {joined} already"
    parent = versions[one.version.parents[0]].recipe
    try:
        recipe = join(parent, one.recipe, other.recipe)
        for version in (one, other):
            check_allowed(version.recipe, recipe)
    except InvalidIntervention as error:
        return f"joined, the recipe {error}"
    tried = tried_in(versions, recipe, one.init)
    return None if tried is None else f"{tried} has exactly the changes of both"


def _said(version: VersionEvidence) -> str:
    return ", ".join(f"{change.field} {shown(change.before)} -> {shown(change.after)}" for change in version.changes)


def _together(*lists: Sequence[Citation]) -> list[Citation]:
    found: list[Citation] = []
    for citations in lists:
        found += [citation for citation in citations if citation not in found]
    return found
