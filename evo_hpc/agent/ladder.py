"""A rule's ladder: the values that it would try in order, and why each one that is passed over is barred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evo_hpc.agent.barred import Run, known_bad, run_of, tried_in
from evo_hpc.agent.evidence import Evidence, VersionEvidence
from evo_hpc.agent.intervention import InvalidIntervention, add, apply, check_allowed, multiply, value_of
from evo_hpc.agent.knobs import Knob, knob
from evo_hpc.agent.rules import Turn
from evo_hpc.agent.sentences import shown
from evo_hpc.config.recipe import Recipe

_FATE = {"keep": "kept", "merge": "kept", "prune": "pruned", "revert": "reverted"}


def climb(evidence: Evidence, turn: Turn, taken: Sequence[Run]) -> tuple[Recipe | None, list[str]]:
    """The incumbent's recipe with the first value that is not barred (None: all are), and why those before it are.

    `taken`: the runs that this round proposes already.
    """
    barred: list[str] = []
    for rung in turn.rungs:
        found = _step(evidence, turn, knob(turn.field), rung, taken)
        if isinstance(found, Recipe):
            return found, barred
        barred.append(found)
    return None, barred


def _step(evidence: Evidence, turn: Turn, turned: Knob, rung: Any, taken: Sequence[Run]) -> Recipe | str:
    """The recipe that one rung gives, or why it is barred."""
    incumbent = evidence.versions[evidence.start]
    now = value_of(incumbent.recipe, turn.field)
    if turn.ladder != "set" and now is None:
        return f"it is unset in {incumbent.id}, so there is no number to change"
    wanted = rung if turn.ladder == "set" else (multiply if turn.ladder == "multiply" else add)(now, rung, turned)
    try:
        recipe = apply(incumbent.recipe, turn.field, wanted)
    except InvalidIntervention as error:
        return str(error)
    value = value_of(recipe, turn.field)
    if value == now:
        return f"it is {shown(value)} already"
    outside = _outside(turn, turned, value)
    if outside is not None:
        return outside
    tried = tried_in(evidence.versions, recipe, incumbent.init)
    if tried is not None:
        return f"{shown(value)} was tried in {_and_fate(evidence.versions[tried])}"
    if run_of(recipe, incumbent.init) in taken:
        return f"{shown(value)} is proposed in this round already"
    bad = known_bad(evidence.versions, incumbent, turn.field, value)
    if bad is not None:
        return f"{shown(value)} lies beyond {shown(bad.changes[0].after)}, tried in {_and_fate(bad)}"
    try:
        check_allowed(incumbent.recipe, recipe)
    except InvalidIntervention as error:
        return f"{shown(value)} {error}"
    return recipe


def _outside(turn: Turn, turned: Knob, value: Any) -> str | None:
    """Beyond the rule's own bounds, in words; null is no number and has none."""
    if turned.kind == "other" or value is None:
        return None
    if turn.at_least is not None and value < turn.at_least:
        return f"{shown(value)} is below the rule's bound of {turn.at_least:g}"
    if turn.at_most is not None and value > turn.at_most:
        return f"{shown(value)} is above the rule's bound of {turn.at_most:g}"
    return None


def _and_fate(version: VersionEvidence) -> str:
    return version.id if version.decision is None else f"{version.id} and {_FATE[version.decision.decision]}"
