"""The knobs of a recipe: what fields there are, of what type, of which factor, and which of them an agent may turn."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from evo_hpc.config.recipe import Recipe
from evo_hpc.errors import UserError
from evo_hpc.lineage.factors import AGENT_FACTORS, FACTOR_OF_FIELD, Factor

KNOB_FACTORS: frozenset[Factor] = AGENT_FACTORS - {"seed"}
"""What an agent may turn: a changed seed is a replicate, not an idea."""


class UnknownKnob(UserError):
    """A dotted name that is no field of a recipe."""


class ForbiddenKnob(UserError):
    """A field that is not an agent's to change."""


@dataclass(frozen=True)
class Knob:
    """One field of a recipe."""

    field: str
    """Dotted, e.g. `optimizer.lr`, or with a key of a mapping: `reward.weights.format`."""
    factor: Factor
    kind: Literal["integer", "number", "other"]

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.field.split("."))


def knob(field: str) -> Knob:
    """The knob of that name. Raises UnknownKnob with the nearest one, or ForbiddenKnob."""
    annotation: Any = Recipe
    parts = field.split(".")
    for place, part in enumerate(parts):
        fields = _fields(annotation)
        if part in fields:
            annotation = fields[part]
        elif get_origin(annotation) is dict and part and place == len(parts) - 1:
            annotation = get_args(annotation)[1]
        else:
            raise UnknownKnob(f"`{field}` is not a field of a recipe; {_hint(field)}")
    factor = FACTOR_OF_FIELD[parts[0]]
    if factor not in KNOB_FACTORS:
        raise ForbiddenKnob(f"`{field}` is not an agent's to change (factor {factor}); it may turn the fields of {', '.join(sorted(KNOB_FACTORS))}")
    if _fields(annotation):
        raise UnknownKnob(f"`{field}` is a whole section; name one of its fields: {', '.join(f'{field}.{name}' for name in _fields(annotation))}")
    types_of = set(_types(annotation))
    return Knob(field, factor, "integer" if int in types_of else "number" if float in types_of else "other")


def knobs() -> list[str]:
    """Every field that an agent may turn, in the order of the recipe."""
    return [field for field in _leaves(Recipe, ()) if FACTOR_OF_FIELD[field.split(".")[0]] in KNOB_FACTORS]


def _hint(field: str) -> str:
    by_last_part = [known for known in knobs() if known.split(".")[-1] == field.split(".")[-1]]
    near = by_last_part or difflib.get_close_matches(field, knobs(), n=1)
    return f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(knobs())}"


def _fields(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: info.annotation for name, info in annotation.model_fields.items()}
    return {}


def _leaves(annotation: Any, path: tuple[str, ...]) -> Iterator[str]:
    for name, inner in _fields(annotation).items():
        if _fields(inner):
            yield from _leaves(inner, (*path, name))
        else:
            yield ".".join((*path, name))


def _types(annotation: Any) -> Iterator[Any]:
    """The plain types of `Annotated` and of `X | None`."""
    if get_origin(annotation) is Annotated:
        yield from _types(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _types(each)
    else:
        yield annotation
