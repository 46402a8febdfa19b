"""Checks of a published model folder (HF layout, safetensors) before an engine is asked to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evo_hpc.rollout.errors import ModelFolderError

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in `folder`, from the file headers alone.

    Raises `ModelFolderError` if `config.json` or the weights are missing, unreadable or truncated, or if the index
    of a sharded model and its files disagree.
    """
    from safetensors import SafetensorError, safe_open

    _read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    indexed = _indexed(index) if index.is_file() else None
    names = sorted(set(indexed.values())) if indexed is not None else ["model.safetensors"]
    shapes: Shapes = {}
    for name in names:
        file = folder / name
        if not file.is_file():
            raise ModelFolderError(f"{file} is missing; publish the whole model folder again")
        try:
            with safe_open(file, framework="numpy") as tensors:
                for key in tensors.keys():
                    shapes[key] = tuple(tensors.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{file} is torn or unreadable ({error}); publish it again") from error
    if indexed is not None and set(indexed) != set(shapes):
        raise ModelFolderError(f"{index} and the files beside it disagree about {_some(set(indexed) ^ set(shapes))}")
    return shapes


def _indexed(index: Path) -> dict[str, str]:
    """Tensor -> file of a sharded model."""
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise ModelFolderError(f"{index}: no weight_map of tensors to files; publish the folder again")
    return found


def require_same_tensors(folder: Path, found: Shapes, expected: Shapes) -> None:
    """Raise `ModelFolderError` unless `found` has the names and shapes of `expected`.

    A `lm_head.weight` that only one of the two has is tolerated: with tied embeddings it is a copy.
    """
    optional = {"lm_head.weight"} if ("lm_head.weight" in found) != ("lm_head.weight" in expected) else set()
    if missing := set(expected) - set(found) - optional:
        raise ModelFolderError(f"{folder} lacks {_some(missing)}; publish the whole policy again")
    if surplus := set(found) - set(expected) - optional:
        raise ModelFolderError(f"{folder} has {_some(surplus)}, which the loaded model has not; is it another model?")
    for name in expected.keys() & found.keys():
        if found[name] != expected[name]:
            raise ModelFolderError(
                f"{folder}: {name} has shape {list(found[name])}, the loaded model {list(expected[name])}; "
                "an engine keeps its architecture, so start a new one"
            )


def longest_score(folder: Path, max_model_len: int) -> int:
    """Longest sequence that can be scored: `max_model_len`, less one where the model has no position to spare.

    vLLM samples one token after whatever it scores. Raises `ModelFolderError` if the model is shorter than
    `max_model_len`.
    """
    positions = _read_json(folder / "config.json").get("max_position_embeddings")
    if positions is None:
        return max_model_len
    if max_model_len > positions:
        raise ModelFolderError(
            f"{folder}/config.json: the model has {positions} positions, fewer than max_model_len={max_model_len}; "
            "lower max_model_len"
        )
    return min(max_model_len, positions - 1)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{file} is missing; point at a folder in HF layout") from error
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file} is unreadable ({error}); publish the folder again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file} is not a JSON object; publish the folder again")
    return value


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
