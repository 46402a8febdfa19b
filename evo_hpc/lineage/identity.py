"""What ties results to what made them: identities of policies and of training runs. Pure but for reading manifests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.factors import FACTOR_OF_FIELD
from evo_hpc.paths import COMPLETE
from evo_hpc.store.manifest import read_complete, sha256

_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def digest(value: Any) -> str:
    """16 hex digits of the canonical JSON of `value`."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def policy_identity(folder: Path) -> str:
    """Identity of a model folder: by the hashes of its completion record, which every policy of ours has.

    A folder from elsewhere has none: then its small files count by content and its weights by name and size, since
    hashing them on every look would cost minutes. Raises Torn when the record and the files disagree.
    """
    if (folder / COMPLETE).exists():
        return digest(sorted((f["name"], f["sha256"]) for f in read_complete(folder)["files"]))
    small = [(name, sha256(folder / name)) for name in _SMALL_FILES if (folder / name).is_file()]
    weights = sorted((p.name, p.stat().st_size) for p in folder.glob("*.safetensors"))
    return digest([small, weights])


def learning_fields(recipe: Recipe) -> dict[str, Any]:
    """The recipe without what must not change the result (saving, packing, parallelism)."""
    return {k: v for k, v in recipe.model_dump(mode="json").items() if FACTOR_OF_FIELD[k] != "system"}


def run_identity(recipe: Recipe, hooks: Mapping[str, str], *, init: str, seed: int, task_set: str) -> str:
    """Identity of a training run: recipe, hooks, the init policy's identity, the campaign's seed, the training tasks."""
    return digest([learning_fields(recipe), dict(hooks), init, seed, task_set])
