"""Process layout: torch.distributed and Megatron's parallel groups, on GPUs (nccl) or CPUs (gloo)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evo_hpc.config.layout import Layout, layout_of
from evo_hpc.config.recipe import Compute
from evo_hpc.training.errors import ParallelError
from evo_hpc.training.mcore import parallel_state, tensor_parallel

T = TypeVar("T")
_LONGEST_WAIT = timedelta(days=7)
"""Of one rank for another: the first may wait long for rollouts. Torch's own limits, minutes, would end the job; that it stands still is
seen by its launcher."""


@dataclass(frozen=True)
class Place:
    """This process's place, as the launcher gave it; `address` is None when it is alone and needs no port."""

    rank: int
    world_size: int
    local_rank: int
    address: str | None


def read_place(env: Mapping[str, str]) -> Place:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of `env`; absent: one process. Raises ParallelError."""
    rank, world_size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise ParallelError(f"RANK {rank} is outside WORLD_SIZE {world_size}")
    address = None
    if world_size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise ParallelError(
                f"WORLD_SIZE is {world_size} but {' and '.join(missing)} is not set: launch with torchrun"
            )
        address = f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    return Place(rank, world_size, int(env.get("LOCAL_RANK", "0")), address)


def initialize(compute: Compute = Compute(), *, seed: int = 0, env: Mapping[str, str] = os.environ) -> Layout:  # noqa: B008
    """Join the process group and build Megatron's groups; a second call with the same layout does nothing.

    Experts are never split by tensor parallelism (Megatron's expert-tensor-parallel size is 1): a whole expert lies on
    one rank. Raises LayoutError or ParallelError on an impossible layout.
    """
    place = read_place(env)
    layout = layout_of(compute, place.world_size)
    if parallel_state.model_parallel_is_initialized():
        if (found := current_layout(sequence=layout.sequence)) != layout:
            raise ParallelError(f"already initialised with {found}, asked for {layout}: one layout a process")
        return layout
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())  # one, where srun binds a device to each task
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=place.address,
            store=dist.HashStore() if place.address is None else None,
            rank=place.rank,
            world_size=place.world_size,
            timeout=_LONGEST_WAIT,
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return layout


def current_layout(*, sequence: bool = False) -> Layout:
    """The sizes of Megatron's groups in this process; whether tokens are split is the model's matter, and passed through."""
    return Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        sequence=sequence,
    )


def dtype_of(compute: Compute) -> torch.dtype:
    """Of weights and activations; `auto` is bfloat16 where CUDA is."""
    if compute.precision == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return torch.bfloat16 if compute.precision == "bfloat16" else torch.float32


def shutdown() -> None:
    """Leave the process group; for the end of a job."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def set_num_threads(n: int) -> int:
    """Set torch's intra-op threads and return what torch really uses (an earlier vLLM import can pin it)."""
    torch.set_num_threads(n)
    return torch.get_num_threads()


def device() -> torch.device:
    """Where this process keeps its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def is_main() -> bool:
    """Whether this process is rank 0, the one that writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def shares_out_optimizer(compute: Compute) -> bool:
    """Whether master weights and Adam's moments are sharded: where it is wanted, and several ranks would have the same ones."""
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    return compute.distributed_optimizer and ranks > 1


def is_last_stage() -> bool:
    """Whether this rank has the model's last layers, its logits and so its losses."""
    return bool(parallel_state.is_pipeline_last_stage())


def from_last_stage(tensor: Tensor) -> Tensor:
    """`tensor` as the last pipeline stage has it, on every stage; elsewhere only its shape and type count. Every rank must call."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def object_from_last_stage(value: T) -> T:
    """The last pipeline stage's `value`, any that can be pickled, on every stage. Every rank must call."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return values[0]


def barrier() -> None:
    """Wait for every rank."""
    if dist.get_world_size() > 1:
        dist.barrier()
