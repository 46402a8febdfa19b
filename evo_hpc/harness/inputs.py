"""What analyzers may read: Parquet files of one version, and its effective configuration as rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_hpc.errors import UserError
from evo_hpc.lineage.effective import ROLES, EffectiveRow


class BadInputs(UserError):
    """Tables that analyzers may not read, or cannot."""


@dataclass(frozen=True)
class Inputs:
    """The files of one version, in the order of its steps; what is not there is empty."""

    steps: tuple[Path, ...] = ()
    """STEP tables."""
    train: tuple[Path, ...] = ()
    """ROLLOUT tables of the training run."""
    probe: tuple[Path, ...] = ()
    """ROLLOUT tables of the evaluation on probe."""
    effective: Path | None = None
    """effective.yaml of the training run."""


def effective_rows(path: Path | None) -> list[EffectiveRow]:
    """effective.yaml flattened, in the order of the file. Raises ConfigError."""
    from evo_hpc.config.yaml_io import load_tree, plain

    tree = plain(load_tree(path)) if path else {}
    return [(role, field, value) for role in ROLES if isinstance(tree.get(role), dict) for field, value in _leaves(tree[role], "")]


def _leaves(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, str | None]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, str):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json.dumps(value)
