"""The factor of an intervention, computed from the difference of two recipes; never claimed."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import dump_model

Factor = Literal["reward", "data_filter", "rollout", "optimizer", "tool_use", "seed", "init", "budget", "system"]

FACTOR_OF_FIELD: dict[str, Factor] = {
    "reward": "reward", "data_filter": "data_filter", "rollout": "rollout", "optimizer": "optimizer",
    "tool_use": "tool_use", "seed": "seed", "steps": "budget",
    "checkpoint": "system", "token_budget": "system", "compute": "system", "schema_version": "system",
}
"""Which factor each top-level field of a recipe belongs to. `budget` and `system` are not an agent's to change."""

_HOOK_FACTOR: dict[str, Factor] = {"reward.py": "reward", "filter.py": "data_filter"}

AGENT_FACTORS: frozenset[Factor] = frozenset({"reward", "data_filter", "rollout", "optimizer", "tool_use", "seed"})
"""What an agent may change."""


@dataclass(frozen=True)
class Change:
    """One field that differs."""

    field: str
    """Dotted path, e.g. `optimizer.lr`, or `hooks/reward.py`, or `init`."""
    before: Any
    after: Any
    factor: Factor


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            flat.update(_flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
        return flat
    return {prefix: value}


def changes(parent: Recipe, child: Recipe, parent_hooks: Mapping[str, str] | None = None,
            child_hooks: Mapping[str, str] | None = None) -> list[Change]:
    """Fields that differ between two recipes, and hook files (name -> content) that do, in a fixed order."""
    before, after = _flatten(parent.model_dump(mode="json")), _flatten(child.model_dump(mode="json"))
    found = [
        Change(field, before.get(field), after.get(field), FACTOR_OF_FIELD[field.split(".")[0]])
        for field in sorted(before.keys() | after.keys()) if before.get(field) != after.get(field)
    ]
    old, new = parent_hooks or {}, child_hooks or {}
    found += [
        Change(f"hooks/{name}", _digest(old.get(name)), _digest(new.get(name)), _HOOK_FACTOR.get(name, "system"))
        for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)
    ]
    return found


def factors(found: list[Change]) -> list[Factor]:
    """The distinct factors that a list of changes touches; one of them = a single-factor intervention."""
    return sorted({change.factor for change in found})


def _digest(content: str | None) -> str | None:
    return None if content is None else hashlib.sha256(content.encode()).hexdigest()[:12]


def recipe_diff(parent: Recipe, child: Recipe, names: tuple[str, str]) -> str:
    """Unified diff of the two full recipes as YAML; empty when equal."""
    lines = [dump_model(r).decode().splitlines(keepends=True) for r in (parent, child)]
    return "".join(difflib.unified_diff(*lines, fromfile=f"{names[0]}/recipe.yaml", tofile=f"{names[1]}/recipe.yaml", n=2))
