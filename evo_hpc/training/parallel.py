"""Process layout: torch.distributed and Megatron's parallel groups, on GPUs (nccl) or CPUs (gloo)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evo_hpc.training.errors import ParallelError
from evo_hpc.training.mcore import parallel_state, tensor_parallel


@dataclass(frozen=True)
class Layout:
    """This process's place, as the launcher gave it; `address` is None when it is alone and needs no port."""

    rank: int
    world_size: int
    local_rank: int
    address: str | None


def read_layout(env: Mapping[str, str], tensor_parallel_size: int) -> Layout:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of `env`; absent: one process. Raises ParallelError."""
    rank, world_size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    if tensor_parallel_size < 1 or world_size % tensor_parallel_size:
        raise ParallelError(f"tensor_parallel_size {tensor_parallel_size} must divide the world size {world_size}")
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
    return Layout(rank, world_size, int(env.get("LOCAL_RANK", "0")), address)


def initialize(*, tensor_parallel_size: int = 1, seed: int = 0, env: Mapping[str, str] = os.environ) -> None:
    """Join the process group and build Megatron's groups; a second call with the same layout does nothing.

    Ranks left over by tensor parallelism are data-parallel. Raises ParallelError on an impossible layout.
    """
    if parallel_state.model_parallel_is_initialized():
        current = parallel_state.get_tensor_model_parallel_world_size()
        if current != tensor_parallel_size:
            raise ParallelError(
                f"already initialised with tensor_parallel_size {current}, "
                f"asked for {tensor_parallel_size}: one layout a process"
            )
        return
    layout = read_layout(env, tensor_parallel_size)
    if torch.cuda.is_available():
        torch.cuda.set_device(layout.local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=layout.address,
            store=dist.HashStore() if layout.address is None else None,
            rank=layout.rank,
            world_size=layout.world_size,
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


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


def barrier() -> None:
    """Wait for every rank."""
    if dist.get_world_size() > 1:
        dist.barrier()
