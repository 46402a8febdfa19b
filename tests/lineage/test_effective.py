"""What was asked for against what ran: every setting that is read back, and exactly the one that was tampered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Optimizer, Recipe
from evo_hpc.config.yaml_io import dump_tree
from evo_hpc.harness.inputs import effective_rows
from evo_hpc.lineage.effective import mismatches, read_back

RECIPE = Recipe.model_validate({"seed": 3, "optimizer": {"lr": 5e-5, "dual_clip": 3.0}})
PROFILE = Cluster.model_validate({"engine": {"threads": 2, "kv_cache_mib": 64}, "trainer": {"threads": 4}})
BUILT = ("lr_warmup_updates", "beta1", "beta2", "weight_decay", "grad_clip")


def effective() -> dict[str, Any]:
    """As a job that did what it was asked writes it (training/policy.py, training/optimizer.py, training/train_job.py, rollout/worker.py)."""
    optimizer = RECIPE.optimizer
    return {
        "job": "x", "run": "y", "recipe": RECIPE.model_dump(mode="json"),
        "cluster": {"trainer": PROFILE.trainer.model_dump(mode="json"), "engine": PROFILE.engine.model_dump(mode="json")},
        "trainer": {
            "threads": 4, "token_budget": 4096, "dtype": "float32", "device": "cpu",
            "optimizer": {"optimizer": "AdamW", "eps": 1e-8, "lr_max": 0.00005, **{name: getattr(optimizer, name) for name in BUILT}},
            "loss": {name: getattr(optimizer, name) for name in Optimizer.model_fields if name not in ("lr", *BUILT)},
        },
        "rollout": {
            "threads": 2, "dtype": "float32", "kv_cache_bytes": 64 << 20, "seed": 3, "max_model_len": 128,
            "sampling": {"temperature": 1, "top_p": 1.0, "max_tokens": 96},
        },
    }


def rows(tree: dict[str, Any], folder: Path) -> list[Any]:
    (folder / "effective.yaml").write_bytes(dump_tree(tree))
    return effective_rows(folder / "effective.yaml")


def test_a_job_that_did_as_asked(tmp_path: Path) -> None:
    given = rows(effective(), tmp_path)
    assert mismatches(given) == []
    names = {setting.name for setting in read_back(given)}
    assert names == {
        "seed", "token_budget", "rollout.temperature", "rollout.max_response_tokens", *(f"optimizer.{name}" for name in Optimizer.model_fields),
        "cluster.trainer.threads", "cluster.engine.threads", "cluster.engine.kv_cache_mib", "cluster.engine.dtype",
    }


@pytest.mark.parametrize(("place", "value", "name", "asked", "ran_with"), [
    ("trainer.optimizer.lr_max", 1e-4, "optimizer.lr", "5e-05", "0.0001"),
    ("trainer.loss.clip_high", 0.2, "optimizer.clip_high", "0.28", "0.2"),
    ("trainer.loss.dual_clip", None, "optimizer.dual_clip", "3.0", None),
    ("trainer.loss.advantage_clip", 5.0, "optimizer.advantage_clip", None, "5.0"),
    ("trainer.loss.loss", "sequence_mean", "optimizer.loss", "token_mean", "sequence_mean"),
    ("trainer.token_budget", 512, "token_budget", "4096", "512"),
    ("trainer.threads", 1, "cluster.trainer.threads", "4", "1"),
    ("rollout.sampling.temperature", 0.7, "rollout.temperature", "1.0", "0.7"),
    ("rollout.sampling.max_tokens", 64, "rollout.max_response_tokens", "96", "64"),
    ("rollout.kv_cache_bytes", 128 << 20, "cluster.engine.kv_cache_mib", "64", str(128 << 20)),
    ("rollout.dtype", "bfloat16", "cluster.engine.dtype", "float32", "bfloat16"),
    ("rollout.seed", 0, "seed", "3", "0"),
])
def test_one_that_did_not(place: str, value: Any, name: str, asked: str | None, ran_with: str | None, tmp_path: Path) -> None:
    tree = effective()
    *sections, field = place.split(".")
    node = tree
    for section in sections:
        node = node[section]
    assert field in node
    node[field] = value
    (found,) = mismatches(rows(tree, tmp_path))
    assert (found.name, found.asked, found.place, found.ran_with) == (name, asked, place, ran_with)


def test_a_role_that_said_nothing_is_no_mismatch(tmp_path: Path) -> None:
    tree = effective()
    del tree["rollout"], tree["cluster"]
    found = rows(tree, tmp_path)
    assert mismatches(found) == [] and not any(setting.place.startswith("rollout") for setting in read_back(found))
    assert mismatches([]) == []


def test_a_null_of_the_profile_leaves_the_choice_but_one_of_the_recipe_does_not() -> None:
    assert read_back([("cluster", "engine.threads", None), ("rollout", "threads", "8")]) == []
    assert read_back([("recipe", "compute.precision", "auto"), ("trainer", "dtype", "bfloat16")]) == []
    assert [s.name for s in mismatches([("recipe", "compute.precision", "float32"), ("trainer", "dtype", "bfloat16")])] == ["compute.precision"]
    assert [s.name for s in mismatches([("recipe", "optimizer.dual_clip", None), ("trainer", "loss.dual_clip", "3.0")])] == ["optimizer.dual_clip"]
