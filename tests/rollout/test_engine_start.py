"""An engine that cannot start says why before it spends seconds on importing vLLM."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import TinyPolicy, make_policy

from evo_hpc.rollout.engine import Engine
from evo_hpc.rollout.errors import EngineUnavailable, ModelFolderError
from evo_hpc.rollout.model_folder import require_same_tensors, tensor_shapes


def test_a_missing_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_spec = importlib.util.find_spec

    def without_vllm(name: str, *args: Any) -> Any:
        return None if name == "vllm" else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without_vllm)
    with pytest.raises(EngineUnavailable, match="make setup"):
        Engine(tmp_path, max_model_len=64)


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("damage", "culprit"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (_truncate, "model.safetensors is torn"),
    ],
)
def test_a_broken_model_folder_is_named_and_vllm_is_not_imported(
    tmp_path: Path, damage: Callable[[Path], None], culprit: str
) -> None:
    folder = make_policy(tmp_path / "model", 0, layers=1).folder
    damage(folder)
    with pytest.raises(ModelFolderError, match=culprit) as caught:
        Engine(folder, max_model_len=64)
    assert str(folder) in str(caught.value)
    assert "vllm" not in sys.modules


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="nowhere"):
        Engine(tmp_path / "nowhere", max_model_len=64)


def test_more_tokens_than_the_model_has_positions_are_refused(policies: tuple[TinyPolicy, TinyPolicy]) -> None:
    with pytest.raises(ModelFolderError, match="512 positions"):
        Engine(policies[0].folder, max_model_len=513)


def test_a_sharded_folder_is_read_through_its_index(tmp_path: Path) -> None:
    whole = make_policy(tmp_path / "whole", 0)
    whole.model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert tensor_shapes(tmp_path / "shards") == tensor_shapes(whole.folder)

    index = tmp_path / "shards" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match="ghost"):
        tensor_shapes(tmp_path / "shards")
    for broken in ({}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"model.ghost.weight": 3}}):
        index.write_text(json.dumps(broken))
        with pytest.raises(ModelFolderError, match=r"index\.json: no weight_map"):
            tensor_shapes(tmp_path / "shards")


def test_a_head_that_only_copies_the_embedding_may_be_left_out() -> None:
    tied, untied = {"embed": (4, 2)}, {"embed": (4, 2), "lm_head.weight": (4, 2)}
    require_same_tensors(Path("policy"), tied, untied)
    require_same_tensors(Path("policy"), untied, tied)
    with pytest.raises(ModelFolderError, match="embed"):
        require_same_tensors(Path("policy"), {"lm_head.weight": (4, 2)}, tied)


def test_importing_the_engine_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, evo_hpc.rollout.engine; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
