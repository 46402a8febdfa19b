"""Hugging Face <-> Megatron weights of a dense Qwen3, exact both ways: the map, tensor-parallel shards, the files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from evo_hpc.store.atomic import temp_path, write_bytes
from evo_hpc.training import parallel
from evo_hpc.training.errors import WeightsError
from evo_hpc.training.mcore import parallel_state
from evo_hpc.training.model import Qwen3Shape, uses_transformer_engine

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SPLIT = {"rows": 0, "columns": 1}
"""How Megatron shards a weight over tensor-parallel ranks; `gated` shards both halves by rows, `none` replicates."""


def hf_shapes(shape: Qwen3Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face checkpoint."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not shape.tied:
        shapes[LM_HEAD] = (shape.vocab_size, hidden)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes.update(
        {f"model.layers.{i}.{name}.weight": size for i in range(shape.num_layers) for name, size in layer.items()}
    )
    return shapes


def _mcore_names(shape: Qwen3Shape) -> dict[str, tuple[list[str], str]]:
    """Megatron parameter -> (Hugging Face tensors it is made of, how it is sharded)."""
    engine = (
        uses_transformer_engine()
    )  # Transformer Engine keeps a norm's weight inside the linear layer that follows it
    names: dict[str, tuple[list[str], str]] = {
        "embedding.word_embeddings.weight": ([EMBEDDING], "rows"),
        "decoder.final_layernorm.weight": (["model.norm.weight"], "none"),
    }
    if not shape.tied:
        names["output_layer.weight"] = ([LM_HEAD], "rows")
    layer = {
        "self_attention.linear_qkv.layer_norm_weight" if engine else "input_layernorm.weight": (
            ["input_layernorm"],
            "none",
        ),
        "mlp.linear_fc1.layer_norm_weight" if engine else "pre_mlp_layernorm.weight": (
            ["post_attention_layernorm"],
            "none",
        ),
        "self_attention.q_layernorm.weight": (["self_attn.q_norm"], "none"),
        "self_attention.k_layernorm.weight": (["self_attn.k_norm"], "none"),
        "self_attention.linear_qkv.weight": (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "rows"),
        "self_attention.linear_proj.weight": (["self_attn.o_proj"], "columns"),
        "mlp.linear_fc1.weight": (["mlp.gate_proj", "mlp.up_proj"], "gated"),
        "mlp.linear_fc2.weight": (["mlp.down_proj"], "columns"),
    }
    for i in range(shape.num_layers):
        for name, (parts, rule) in layer.items():
            names[f"decoder.layers.{i}.{name}"] = ([f"model.layers.{i}.{part}.weight" for part in parts], rule)
    return names


def _join(parts: list[Tensor], shape: Qwen3Shape) -> Tensor:
    """Hugging Face tensors -> one full Megatron tensor; q, k, v are interleaved by KV group: [its q heads, k, v]."""
    if len(parts) < 3:
        return torch.cat(parts)
    groups, dim = shape.num_kv_heads, shape.head_dim
    return torch.cat([part.view(groups, -1, dim, shape.hidden_size) for part in parts], 1).reshape(
        -1, shape.hidden_size
    )


def _split(full: Tensor, names: list[str], shape: Qwen3Shape) -> dict[str, Tensor]:
    """Inverse of `_join`."""
    if len(names) == 1:
        return {names[0]: full}
    if len(names) == 2:
        return dict(zip(names, full.chunk(2), strict=True))
    heads = shape.num_heads // shape.num_kv_heads
    by_group = full.view(shape.num_kv_heads, heads + 2, shape.head_dim, shape.hidden_size)
    parts = by_group.split([heads, 1, 1], 1)
    return {name: part.reshape(-1, shape.hidden_size) for name, part in zip(names, parts, strict=True)}


def _shard(full: Tensor, rule: str, rank: int, world_size: int) -> Tensor:
    if rule == "none" or world_size == 1:
        return full
    if rule == "gated":
        return torch.cat([half.chunk(world_size)[rank] for half in full.chunk(2)])
    return full.chunk(world_size, _SPLIT[rule])[rank]


def _unshard(shards: list[Tensor], rule: str) -> Tensor:
    if rule == "none" or len(shards) == 1:
        return shards[0]
    if rule == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(shards, _SPLIT[rule])


@torch.no_grad()
def load_state(model: nn.Module, tensors: Mapping[str, Tensor], shape: Qwen3Shape) -> None:
    """Copy this rank's shard of complete, checked Hugging Face `tensors` into the model's parameters."""
    rank, world_size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    parameters = dict(model.named_parameters())
    for name, (parts, rule) in _mcore_names(shape).items():
        full = _join([tensors[part] for part in parts], shape)
        parameters[name].copy_(_shard(full, rule, rank, world_size))


@torch.no_grad()
def export_state(
    model: nn.Module, shape: Qwen3Shape, select: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.detach()
) -> dict[str, Tensor]:
    """Full Hugging Face tensors, on CPU, copied; every rank must call, every rank gets all.

    `select` picks what is exported of a parameter: itself by default, or for instance its gradient.
    """
    mine = {name: select(parameter).cpu().clone() for name, parameter in model.named_parameters()}
    world_size = parallel_state.get_tensor_model_parallel_world_size()
    shards = [mine] if world_size == 1 else parallel.gather_objects(mine)[_tp_start() : _tp_start() + world_size]
    tensors: dict[str, Tensor] = {}
    for name, (parts, rule) in _mcore_names(shape).items():
        full = _unshard([shard[name] for shard in shards], rule)
        tensors.update({part: t.contiguous() for part, t in _split(full, parts, shape).items()})
    return tensors


def _tp_start() -> int:
    """Global rank of the first member of this rank's tensor-parallel group, whose ranks are consecutive."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    return torch.distributed.get_rank() // size * size


def read_folder(folder: Path, shape: Qwen3Shape) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder in float32 on CPU. Raises WeightsError naming file and tensor."""
    expected = hf_shapes(shape)
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(Path(folder)):
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: not a complete safetensors file ({error}); copy or save it again") from None
        for name, tensor in found.items():
            if name not in expected and not (shape.tied and name == LM_HEAD):
                raise WeightsError(f"{path}: tensor {name} is not part of the model that config.json describes")
            if name in expected and tuple(tensor.shape) != expected[name]:
                raise WeightsError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(expected[name])}"
                )
            if name in tensors:
                raise WeightsError(f"{path}: tensor {name} is also in another file of the folder")
            tensors[name] = tensor.float()
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise WeightsError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are)")
    head = tensors.pop(LM_HEAD) if shape.tied and LM_HEAD in tensors else None
    if head is not None and not torch.equal(head, tensors[EMBEDDING]):
        raise WeightsError(f"{folder}: tie_word_embeddings is true, but {LM_HEAD} differs from {EMBEDDING}")
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError):
            raise WeightsError(f"{index}: not a safetensors index (JSON with a weight_map)") from None
        paths = [folder / name for name in names]
    else:
        paths = [single]
    for path in paths:
        if not path.exists():
            raise WeightsError(
                f"{path} does not exist: a model folder has model.safetensors, or the files its index names"
            )
    return paths


def save_folder(folder: Path, tensors: Mapping[str, Tensor], shape: Qwen3Shape, tokenizer_from: Path) -> None:
    """Write config.json, model.safetensors (float32) and the tokenizer and generation files of `tokenizer_from`.

    Each file is complete or absent; the weights come last. Whole-folder completeness is the caller's record to write.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        source = Path(tokenizer_from) / name
        if source.exists() and source.resolve() != (folder / name).resolve():
            _commit(folder / name, lambda temp, source=source: shutil.copyfile(source, temp))
    config: dict[str, Any] = {name: value for name, value in shape.raw.items() if name != "torch_dtype"}
    text = json.dumps({**config, "dtype": "float32"}, indent=2) + "\n"
    write_bytes(folder / "config.json", text.encode())
    _commit(folder / "model.safetensors", lambda temp: save_file(dict(tensors), temp, metadata={"format": "pt"}))


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
