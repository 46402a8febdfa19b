"""One intervention on a recipe: set a field, move a number, join two changes; what comes out is valid and of one factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from evo_hpc.agent.knobs import KNOB_FACTORS, Knob, knob
from evo_hpc.config.recipe import Recipe
from evo_hpc.errors import UserError
from evo_hpc.lineage.factors import Factor, changes, factors

_ABSENT = object()


class InvalidIntervention(UserError):
    """A changed recipe that is not a recipe, or that changes more than an agent may."""

    def __init__(self, message: str, places: tuple[tuple[str, ...], ...] = ()) -> None:
        super().__init__(message)
        self.places = places
        """Where the recipe is wrong; () in it = a rule over several fields."""

    def within(self, path: tuple[str, ...]) -> bool:
        """Whether it is wrong at this field itself, whatever the other fields hold."""
        return any(place[: len(path)] == path for place in self.places)


def value_of(recipe: Recipe, field: str) -> Any:
    """What a dotted field holds; None where a mapping has no such key."""
    value: Any = recipe.model_dump(mode="json")
    for part in knob(field).path:
        value = value.get(part)
    return value


def apply(recipe: Recipe, field: str, value: Any) -> Recipe:
    """The recipe with one field set, validated anew. Raises InvalidIntervention, UnknownKnob or ForbiddenKnob."""
    *sections, last = knob(field).path
    data = recipe.model_dump(mode="json")
    place = data
    for part in sections:
        place = place[part]
    place[last] = value
    return _validated(data, f"{field} = {value!r}")


def multiply(value: float, by: float, turned: Knob) -> float:
    """`value` times `by`, to the nearest integer or to 3 significant digits, so that twice 1e-4 is 2e-4."""
    return _rounded(value * by, turned)


def add(value: float, amount: float, turned: Knob) -> float:
    """`value` plus `amount`, rounded like a product."""
    return _rounded(value + amount, turned)


def _rounded(value: float, turned: Knob) -> float:
    return round(value) if turned.kind == "integer" else float(f"{value:.3g}")


def check_allowed(parent: Recipe, child: Recipe) -> Factor:
    """The one factor that a child changes, computed from the two recipes.

    Raises InvalidIntervention when nothing changes, when two factors do, or when the factor is not an agent's to change.
    """
    found = changes(parent, child)
    touched = factors(found)
    fields = ", ".join(change.field for change in found)
    if not touched:
        raise InvalidIntervention("changes nothing")
    if len(touched) > 1:
        raise InvalidIntervention(f"touches {len(touched)} factors, {' and '.join(touched)} ({fields}); an intervention touches one")
    if touched[0] not in KNOB_FACTORS:
        raise InvalidIntervention(f"touches {touched[0]} ({fields}), which is not an agent's to change")
    return touched[0]


def join(parent: Recipe, one: Recipe, other: Recipe) -> Recipe:
    """The parent's recipe with the changes of both children. Raises InvalidIntervention when both set the same field."""
    data = [recipe.model_dump(mode="json") for recipe in (parent, one, other)]
    return _validated(_join(*data, ()), "the two changes together")


def _join(parent: Any, one: Any, other: Any, path: tuple[str, ...]) -> Any:
    if one == parent:
        return other
    if other == parent:
        return one
    if not all(isinstance(value, Mapping) for value in (parent, one, other)):
        raise InvalidIntervention(f"both change {'.'.join(path)}")
    keys = [*one, *(key for key in other if key not in one)]
    joined = {key: _join(*(value.get(key, _ABSENT) for value in (parent, one, other)), (*path, key)) for key in keys}
    return {key: value for key, value in joined.items() if value is not _ABSENT}


def _validated(data: Mapping[str, Any], what: str) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, p['loc']))}: {p['msg']}".removeprefix(": ").replace("Value error, ", "") for p in error.errors()]
        places = tuple(tuple(map(str, p["loc"])) for p in error.errors())
        raise InvalidIntervention(f"{what} is not valid: {'; '.join(problems)}", places) from error
