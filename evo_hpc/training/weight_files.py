"""Hugging Face model folders: weights read tensor by tensor and checked before; written whole, in one file or several."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from evo_hpc.store.atomic import temp_path, write_bytes
from evo_hpc.training.architectures import ModelShape
from evo_hpc.training.errors import WeightsError
from evo_hpc.training.weight_names import EMBEDDING, LM_HEAD, hf_shapes

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
"""Of one weight file; a single tensor may be larger."""

_READABLE = ("F32", "BF16", "F16")


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a checked folder, each read from disk in float32 when it is asked for: no rank holds them all."""

    def __init__(self, names: Mapping[str, tuple[Path, Any]]) -> None:
        self._files = dict(names)

    def __getitem__(self, name: str) -> Tensor:
        path, file = self._files[name]
        try:
            return file.get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: tensor {name} cannot be read ({error}); copy or save the file again") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_folder(folder: Path, shape: ModelShape) -> FolderTensors:
    """The tensors of a Hugging Face folder, their names, shapes and types checked. Raises WeightsError naming file and tensor."""
    expected = hf_shapes(shape)
    found: dict[str, tuple[Path, Any]] = {}
    for path in _weight_files(Path(folder)):
        try:
            file = safe_open(path, framework="pt")
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            sizes = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: not a complete safetensors file ({error}); copy or save it again") from None
        for name, (size, dtype) in sizes.items():
            _check_tensor(path, name, size, dtype, shape, expected)
            if name in found:
                raise WeightsError(f"{path}: tensor {name} is also in {found[name][0].name}")
            found[name] = (path, file)
    missing = [name for name in expected if name not in found]
    if missing:
        raise WeightsError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are)")
    tensors = FolderTensors({name: found[name] for name in expected})
    if shape.tied and LM_HEAD in found and not torch.equal(FolderTensors(found)[LM_HEAD], tensors[EMBEDDING]):
        raise WeightsError(f"{folder}: tie_word_embeddings is true, but {LM_HEAD} differs from {EMBEDDING}")
    return tensors


def _check_tensor(
    path: Path, name: str, size: tuple[int, ...], dtype: str, shape: ModelShape, expected: Mapping[str, tuple[int, ...]]
) -> None:
    wanted = expected.get(EMBEDDING if shape.tied and name == LM_HEAD else name)
    if wanted is None:
        raise WeightsError(f"{path}: tensor {name} is not part of the model that config.json describes")
    if size != wanted:
        raise WeightsError(f"{path}: tensor {name} has shape {list(size)}, config.json asks for {list(wanted)}")
    if dtype not in _READABLE:
        raise WeightsError(f"{path}: tensor {name} has type {dtype}; readable: {', '.join(_READABLE)}. Give weights that are not quantised")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError(names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise WeightsError(f"{index}: not a safetensors index (JSON with a weight_map of files beside it)") from None
    else:
        names = [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise WeightsError(f"{folder / name} does not exist: a model folder has {SINGLE}, or the files its index names")
    return [folder / name for name in names]


def save_folder(
    folder: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    tokenizer_from: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, the weights in `dtype`, and the tokenizer and generation files of `tokenizer_from`.

    Weights of more than `max_shard_bytes` go to several files with an index, named as transformers names them; of
    `tensors` given as pairs, only about one file's are in memory. Each file is complete or absent; the weights come
    last, and their index after them. Whole-folder completeness is the caller's record to write.
    Raises WeightsError unless `tensors` are those that `shape` asks for.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        source = Path(tokenizer_from) / name
        if source.exists() and source.resolve() != (folder / name).resolve():
            _commit(folder / name, lambda temp, source=source: shutil.copyfile(source, temp))
    config: dict[str, Any] = {name: value for name, value in shape.raw.items() if name != "torch_dtype"}
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    write_bytes(folder / "config.json", text.encode())
    files = plan_files(hf_shapes(shape), dtype.itemsize, max_shard_bytes)
    _remove_weights(folder)
    _write_weights(folder, files, tensors.items() if isinstance(tensors, Mapping) else tensors, dtype)
    if len(files) > 1:
        total = dtype.itemsize * sum(prod(size) for size in hf_shapes(shape).values())
        index = {"metadata": {"total_size": total}, "weight_map": {tensor: file for file, names in files.items() for tensor in names}}
        write_bytes(folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def plan_files(sizes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> dict[str, list[str]]:
    """File name -> tensors, in order; each file is filled as far as the next tensor still fits. One file has no number."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        added = itemsize * prod(size)
        if shards[-1] and filled + added > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += added
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def _remove_weights(folder: Path) -> None:
    """What an earlier save left: readers disagree on which counts, where a whole file and an index are both there."""
    for path in [folder / INDEX, folder / SINGLE, *sorted(folder.glob("model-*-of-*.safetensors"))]:
        path.unlink(missing_ok=True)


def _write_weights(folder: Path, files: Mapping[str, list[str]], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    file_of = {name: file for file, names in files.items() for name in names}
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    for name, tensor in tensors:
        file = file_of.get(name)
        if file is None:
            raise WeightsError(f"{folder}: tensor {name} is not part of the model that config.json describes")
        waiting[file][name] = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        if len(waiting[file]) == len(files[file]):
            part = waiting.pop(file)
            _commit(folder / file, lambda temp, part=part: save_file(part, temp, metadata={"format": "pt"}))
    for file, part in waiting.items():
        missing = next(name for name in files[file] if name not in part)
        raise WeightsError(f"{folder}: tensor {missing} was not given; nothing complete was written")


def _commit(path: Path, write: Callable[[Path], Any]) -> None:
    temp = temp_path(path)
    try:
        write(temp)
        with open(temp, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
