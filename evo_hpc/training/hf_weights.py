"""Hugging Face <-> Megatron weights, exact both ways: joined, split, and sharded over tensor, pipeline and expert ranks.

The names are weight_names', the files weight_files'. Megatron-Bridge converts models, too, but imports only beside
Transformer Engine: this map is the one path on every machine, so that what is tested on CPUs is what runs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evo_hpc.training import parallel
from evo_hpc.training.architectures import ModelShape
from evo_hpc.training.errors import WeightsError
from evo_hpc.training.mcore import parallel_state
from evo_hpc.training.weight_names import Entry, Rule, entry_of, hf_shapes

GATHER_BYTES = 256 << 20
"""Tensors that cross the processes in one message, about: rank 0 holds this much of each rank beside what it returns."""

_AXIS: dict[Rule, int] = {"rows": 0, "columns": 1, "qkv": 0}


@torch.no_grad()
def load_state(model: nn.Module, tensors: Mapping[str, Tensor], shape: ModelShape) -> None:
    """Copy this rank's shard of complete, checked Hugging Face `tensors` into every parameter of the model.

    Raises WeightsError if Megatron built a parameter that the map does not know, or of another size.
    """
    for _, parameter, entry in _parameters(model, shape):
        index, count = _place(entry)
        value = _shard(_join([tensors[part] for part in entry.parts], entry.rule, shape), entry.rule, index, count)
        if value.shape != parameter.shape:
            raise WeightsError(f"{entry.parts[0]}: Megatron asks for {list(parameter.shape)}, the map gives {list(value.shape)}")
        parameter.copy_(value)


def export_state(
    model: nn.Module, shape: ModelShape, select: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.detach()
) -> dict[str, Tensor]:
    """Full Hugging Face tensors on CPU, copied, on rank 0; an empty dict on the others. Every rank must call.

    `select` picks what is exported of a parameter: itself by default, or for instance its gradient.
    """
    return dict(export_stream(model, shape, select))


@torch.no_grad()
def export_stream(
    model: nn.Module, shape: ModelShape, select: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter.detach()
) -> Iterator[tuple[str, Tensor]]:
    """`export_state`, some tensors at a time: (name, tensor) on rank 0, nothing on the others. Every rank must exhaust it."""
    mine = {
        (entry.parts[0], _place(entry)[0]): (entry, parameter)
        for name, parameter, entry in _parameters(model, shape)
        if _exports(name, entry, shape)
    }
    expected = hf_shapes(shape)
    owners = _owners([(entry, index) for (_, index), (entry, _) in mine.items()])
    names = [name for name in expected if name in owners]
    done: set[str] = set()
    for batch in _batches(names, owners, expected):
        parts = {key: select(mine[key][1]).detach().cpu().clone() for name in batch for key in owners[name].keys if key in mine}
        gathered = _gather_to_main(parts)
        for name in batch if parallel.is_main() else ():
            entry, keys = owners[name].entry, owners[name].keys
            full = _unshard([gathered[key] for key in keys], entry.rule)
            for part, tensor in _split(full, entry, shape).items():
                done.add(part)
                yield part, tensor.contiguous()
    if parallel.is_main() and done != set(expected):
        raise WeightsError(f"Megatron's model lacks {sorted(set(expected) ^ done)[0]}, which config.json asks for; report it: the map lacks it")


def _parameters(model: Any, shape: ModelShape) -> Iterator[tuple[str, nn.Parameter, Entry]]:
    """This rank's parameters, with what each is in the whole model."""
    layers = model.decoder.layers
    experts = shape.experts.count if shape.experts else 0
    offset = parallel_state.get_expert_model_parallel_rank() * (experts // parallel_state.get_expert_model_parallel_world_size())
    for name, parameter in model.named_parameters():
        yield name, parameter, entry_of(name, shape, layer_offset=layers[0].layer_number - 1 if len(layers) else 0, expert_offset=offset)


def _place(entry: Entry) -> tuple[int, int]:
    """(index, number) of this rank's shard of a parameter."""
    if entry.rule == "none":
        return 0, 1
    if entry.expert:
        return parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _exports(name: str, entry: Entry, shape: ModelShape) -> bool:
    """Whether this rank answers for its shard: the first of those that hold the same."""
    if name == "output_layer.weight" and shape.tied:
        return False  # the last pipeline stage's copy of the embedding
    if entry.expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return first and (entry.rule != "none" or parallel_state.get_tensor_model_parallel_rank() == 0)


@dataclass(frozen=True)
class _Owned:
    """A parameter of the whole model, and the keys of its shards in order."""

    entry: Entry
    keys: tuple[tuple[str, int], ...]


def _owners(mine: Sequence[tuple[Entry, int]]) -> dict[str, _Owned]:
    """First Hugging Face name of each parameter -> what all ranks together hold of it."""
    indices: dict[str, tuple[Entry, set[int]]] = {}
    for entry, index in [pair for rank in parallel.gather_objects(list(mine)) for pair in rank]:
        indices.setdefault(entry.parts[0], (entry, set()))[1].add(index)
    return {name: _Owned(entry, tuple((name, i) for i in sorted(found))) for name, (entry, found) in indices.items()}


def _batches(names: Sequence[str], owners: Mapping[str, _Owned], sizes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """`names`, in order, in runs of about GATHER_BYTES: the same on every rank."""
    batch: list[str] = []
    total = 0
    for name in names:
        size = 4 * sum(prod(sizes[part]) for part in owners[name].entry.parts)
        if batch and total + size > GATHER_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


def _gather_to_main(parts: dict[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
    """The parts of all ranks on rank 0; elsewhere what was given."""
    if dist.get_world_size() == 1:
        return parts
    gathered: list[Any] | None = [None] * dist.get_world_size() if parallel.is_main() else None
    dist.gather_object(parts, gathered, dst=0)
    return parts if gathered is None else {key: tensor for rank in gathered for key, tensor in rank.items()}


def _join(parts: list[Tensor], rule: Rule, shape: ModelShape) -> Tensor:
    """Hugging Face tensors -> one full Megatron tensor; q, k, v are interleaved by KV group: [its q heads, k, v]."""
    if rule != "qkv":
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    rest = parts[0].shape[1:]
    by_group = [part.reshape(shape.num_kv_heads, -1, shape.head_dim, *rest) for part in parts]
    return torch.cat(by_group, 1).reshape(-1, *rest)


def _split(full: Tensor, entry: Entry, shape: ModelShape) -> dict[str, Tensor]:
    """Inverse of `_join`."""
    if entry.rule == "qkv":
        rest = full.shape[1:]
        heads = shape.num_heads // shape.num_kv_heads
        by_group = full.view(shape.num_kv_heads, heads + 2, shape.head_dim, *rest).split([heads, 1, 1], 1)
        pieces = [part.reshape(-1, *rest) for part in by_group]
    else:
        pieces = list(full.chunk(len(entry.parts)))
    return dict(zip(entry.parts, pieces, strict=True))


def _shard(full: Tensor, rule: Rule, index: int, count: int) -> Tensor:
    if rule == "none" or count == 1:
        return full
    if rule == "gated":
        return torch.cat([half.chunk(count)[index] for half in full.chunk(2)])
    return full.chunk(count, _AXIS[rule])[index]


def _unshard(shards: list[Tensor], rule: Rule) -> Tensor:
    """Inverse of `_shard`, from the shards in order."""
    if rule == "none" or len(shards) == 1:
        return shards[0]
    if rule == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(shards, _AXIS[rule])
