"""Decisions on disk against the records that they rest on: a person may edit a campaign, but not into a contradiction."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import TYPE_CHECKING

from evo_hpc.controller.readings import readings_of
from evo_hpc.lineage.decision import Decision, Reading, conclude

if TYPE_CHECKING:
    from evo_hpc.controller.state import CampaignState, VersionState

_OVERRULE = "Restore it, or remove it: it is made again from the same looks. To overrule the gate write `by: person` and say why in `because`"


def decision_problems(state: CampaignState, right: dict[str, tuple[object, ...]] | None = None) -> Iterator[str]:
    """One message for each decision that disagrees with the campaign's records; a person may overrule the gate, by name.

    `right` is what each was found right by before: while that is the same, it is not looked at again.
    """
    in_order = True
    for name, version in state.versions.items():
        if version.decision is None:
            in_order = in_order and not version.node.version.parents  # what comes after an undecided version is looked at once that is decided
            continue
        by = _rests_on(state, version, version.decision, in_order)
        if right is not None and (before := right.get(name)) is not None and len(before) == len(by) and all(map(is_, before, by)):
            continue
        problems = list(_contradictions(state, version, version.decision))
        if version.decision.by == "gate" and in_order:
            problems += _other_looks(state, version, version.decision)
        yield from problems
        if right is not None and not problems:
            right[name] = by


def _rests_on(state: CampaignState, version: VersionState, decision: Decision, in_order: bool) -> tuple[object, ...]:
    """All that the checks below go by."""
    names = (state.incumbent_before(version.id), *version.node.version.parents, *decision.merge_with)
    return (in_order, version, *(state.versions.get(name) for name in names))


def _contradictions(state: CampaignState, version: VersionState, decision: Decision) -> Iterator[str]:
    path = version.node.paths.decision_yaml
    if not version.node.version.parents:
        yield f"{path}: {version.id} is the root; nothing is decided about it. Remove the file"
    if (decision.outcome == "stopped_early") != (version.stopped_early is not None):
        yield f"{path}: says outcome {decision.outcome}, which its watch/ does not. {_OVERRULE}"
    if decision.promoted and version.evaluations["dev"] is None and not version.comparisons:
        yield f"{path}: promotes a version whose score on dev is not there. {_OVERRULE}"
    for sibling in decision.merge_with:
        if sibling not in state.versions or sibling == version.id:
            yield f"{path}: merge_with names {sibling}, {'itself' if sibling == version.id else 'which does not exist'}. {_OVERRULE}"
    for reading in decision.gate:
        if not _taken(version, reading):
            yield f"{path}: its reading against {reading.against} (look {reading.look}) is not what comparisons/ says. {_OVERRULE}"
    if decision.by == "gate":
        kind, promoted = conclude(decision.outcome, decision.gate)
        shown = "keep" if decision.decision == "merge" else decision.decision
        if (shown, decision.promoted) != (kind, promoted):
            yield (f"{path}: says {_words(decision.decision, decision.promoted)}, but its readings say {_words(kind, promoted)}. {_OVERRULE}")


def _other_looks(state: CampaignState, version: VersionState, decision: Decision) -> Iterator[str]:
    """A decision by the gate rests on all looks that there are to be, by the evaluations and the incumbent of now."""
    involved = [version, *(state.versions[parent] for parent in version.node.version.parents)]
    if any(each.evaluations["dev"] is None and each.stopped_early is None for each in involved):
        return  # being made again
    if decision.gate != readings_of(state, version) and all(_taken(version, reading) for reading in decision.gate):
        yield (f"{version.node.paths.decision_yaml}: rests on other looks at dev than the gate takes now: the evaluations, a parent or the incumbent "
               "before it have changed, or it was edited. Remove it: it is decided again")


def _taken(version: VersionState, reading: Reading) -> bool:
    """Whether a reading is what the comparison of its look says."""
    return any(
        (reading.against, reading.look, reading.alpha, reading.difference, reading.ci_low, reading.ci_high, reading.n_tasks, reading.verdict)
        == (c.against, c.look.number, c.look.alpha, c.at_look_alpha.difference, c.at_look_alpha.ci_low, c.at_look_alpha.ci_high,
            c.at_look_alpha.n_tasks, c.verdict)
        for c in version.comparisons
    )


def _words(kind: str, promoted: bool) -> str:
    return f"{kind} and promoted" if promoted else kind
