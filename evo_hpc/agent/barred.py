"""What must not be proposed again: recipes that were tried, and steps beyond one that was found bad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evo_hpc.agent.evidence import VersionEvidence
from evo_hpc.agent.intervention import value_of
from evo_hpc.agent.knobs import knob
from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.identity import learning_fields


Run = tuple[str, dict[str, Any]]
"""A training run as far as its outcome goes: where it starts and what it learns by."""


def run_of(recipe: Recipe, init: str) -> Run:
    """The run of a recipe from a resolved init."""
    return init, learning_fields(recipe)


def tried_in(versions: Mapping[str, VersionEvidence], recipe: Recipe, init: str) -> str | None:
    """The first version that is exactly this run, whoever its parent is."""
    wanted = run_of(recipe, init)
    return next((name for name, version in versions.items() if run_of(version.recipe, version.init) == wanted), None)


def known_bad(versions: Mapping[str, VersionEvidence], start: VersionEvidence, field: str, value: Any) -> VersionEvidence | None:
    """A version that was pruned or reverted for a step which turning `field` to `value` would repeat or outdo.

    It changed this number alone, the same way, and its value lies on the way from the value of `start` to the new one.
    Shown harm (reverted, or stopped early) counts whatever else `start` has changed since; where only no gain was shown,
    all else must be equal.
    """
    now = value_of(start.recipe, field)
    if not _numbers(now, value):
        return None
    for version in versions.values():
        if version.decision is None or version.kept or version.decision.outcome == "cancelled" or version.init != start.init:
            continue
        if len(version.changes) != 1 or version.changes[0].field != field:
            continue
        before, bad = version.changes[0].before, version.changes[0].after
        if not _numbers(before, bad) or (bad > before) != (value > now):
            continue
        between = now < bad <= value if value > now else value <= bad < now
        harmful = version.decision.decision == "revert" or version.decision.outcome == "stopped_early"
        if between and (harmful or _without(field, start.recipe) == _without(field, version.recipe)):
            return version
    return None


def _without(field: str, recipe: Recipe) -> dict[str, Any]:
    """What a recipe learns by, one field left out."""
    *sections, last = knob(field).path
    fields = learning_fields(recipe)
    place = fields
    for part in sections:
        place = place[part]
    place.pop(last, None)
    return fields


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
