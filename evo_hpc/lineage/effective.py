"""Asked for against ran with: the recipe and the cluster profile, held against what Megatron, torch and vLLM read back inside the job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

EffectiveRow = tuple[str, str, str | None]
"""Role, dotted field, value as text (JSON where it is no text itself); null where the field is null."""

ROLES = ("recipe", "cluster", "trainer", "rollout")
"""Whose account of the configuration effective.yaml holds; the first two are what was asked for."""

_RENAMED: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("recipe", "seed"): (("rollout", "seed"),),
    ("recipe", "optimizer.lr"): (("trainer", "optimizer.lr_max"),),
    ("recipe", "rollout.max_response_tokens"): (("rollout", "sampling.max_tokens"),),
    ("recipe", "compute.tensor_parallel"): (("trainer", "tensor_parallel_size"),),
    ("recipe", "compute.pipeline_parallel"): (("trainer", "pipeline_parallel_size"),),
    ("recipe", "compute.context_parallel"): (("trainer", "context_parallel_size"),),
    ("recipe", "compute.expert_parallel"): (("trainer", "expert_parallel_size"),),
    ("recipe", "compute.precision"): (("trainer", "dtype"),),
    ("cluster", "engine.kv_cache_mib"): (("rollout", "kv_cache_bytes"),),
}
"""Settings that are read back under another name; a place that is not there is passed over."""

_SAME_NAME: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("recipe", "optimizer."): (("trainer", "optimizer."), ("trainer", "loss.")),
    ("recipe", "rollout."): (("rollout", "sampling."),),
    ("recipe", "compute."): (("trainer", ""),),
    ("recipe", ""): (("trainer", ""),),
    ("cluster", "trainer."): (("trainer", ""),),
    ("cluster", "engine."): (("rollout", ""),),
}
"""Sections whose settings are read back under the same name, each with the sections that may have them."""

_FREE = "auto"
"""A value that leaves the choice to the job, as a null of the profile does."""

_SCALE = {("cluster", "engine.kv_cache_mib"): 1 << 20}
"""Factor from the unit of a setting to the unit of what is read back."""


@dataclass(frozen=True)
class Setting:
    """One setting that was asked for and read back."""

    name: str
    """Field of recipe.yaml (`optimizer.lr`), or of cluster.yaml with `cluster.` before it."""
    asked: str | None
    place: str
    """Role and field that it was read back from: `trainer.optimizer.lr_max`."""
    ran_with: str | None
    same: bool


def read_back(rows: Iterable[EffectiveRow]) -> list[Setting]:
    """Every setting of which the job itself says what it ran with, in the order of the file.

    What a role does not say (a role that never started, an older record) is left out: that nothing is known is no difference.
    """
    found: dict[str, dict[str, str | None]] = {role: {} for role in ROLES}
    for role, field, value in rows:
        found.setdefault(role, {})[field] = value
    settings = []
    for role in ("recipe", "cluster"):
        for field, asked in found[role].items():
            if asked == _FREE or (role == "cluster" and asked is None):
                continue
            for where, name in _places(role, field):
                if name in found[where]:
                    ran_with = found[where][name]
                    same = _same(_scaled(role, field, asked), ran_with)
                    settings.append(Setting(field if role == "recipe" else f"cluster.{field}", asked, f"{where}.{name}", ran_with, same))
    return settings


def mismatches(rows: Iterable[EffectiveRow]) -> list[Setting]:
    """The settings that the job did not run with."""
    return [setting for setting in read_back(rows) if not setting.same]


def _places(role: str, field: str) -> Iterator[tuple[str, str]]:
    if (role, field) in _RENAMED:
        yield from _RENAMED[role, field]
        return
    section, _, name = field.rpartition(".")
    for where, prefix in _SAME_NAME.get((role, f"{section}." if section else ""), ()):
        yield where, prefix + name


def _scaled(role: str, field: str, asked: str | None) -> str | None:
    factor = _SCALE.get((role, field))
    return asked if factor is None or asked is None else str(int(asked) * factor)


def _same(asked: str | None, ran_with: str | None) -> bool:
    """As numbers where both are: 5e-05 and 0.00005 are the same."""
    if asked == ran_with:
        return True
    try:
        return math.isclose(float(asked or ""), float(ran_with or ""), rel_tol=1e-9)
    except ValueError:
        return False
