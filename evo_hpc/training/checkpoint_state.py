"""What a checkpoint holds of a training run, as Megatron's sharded tensors, and which run may load it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from evo_hpc.training import parallel
from evo_hpc.training.checkpoint_convert import ask_for_other, from_other
from evo_hpc.training.mcore import ShardedObject, parallel_state, tensor_parallel
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy

_REFERENCE = "reference."
"""Before the names of the reference's weights, so that they are not those of the policy."""


def sharded_state(policy: Policy, optimizer: Optimizer, reference: Policy | None, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Model, optimizer, schedule, and a reference whose weights change: to be saved, or to be loaded from a checkpoint whose writer is described by `saved`.

    A distributed optimizer's state is saved parameter by parameter, whole (`fully_reshardable`): any number of ranks can
    load it, but for expert parallelism, which must be the writer's.
    """
    optimizer.allocate_state()
    metadata = {
        "chained_optim_avoid_prefix": True, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    state: dict[str, Any] = {"model": policy.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.megatron.sharded_state_dict(state, is_loading=saved is not None, metadata=metadata)
    if saved is not None and _is_other_kind(saved, policy):
        ask_for_other(state["optimizer"], optimizer.parts()[0], has_masters=policy.module.config.bf16)
    state["scheduler"] = optimizer.scheduler.state_dict()
    if reference is not None:  # after the optimizer's, which looks through all of `state` for its parameters
        state["reference"] = reference.module.sharded_state_dict(prefix=_REFERENCE, metadata=metadata)
    return state


def _is_other_kind(saved: dict[str, Any], policy: Policy) -> bool:
    return saved.get("distributed_optimizer", False) != policy.shares_out_optimizer


def load_sharded_state(
    policy: Policy, optimizer: Optimizer, reference: Policy | None, state: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Inverse of `sharded_state`, of what was read into it."""
    policy.module.load_state_dict(state["model"])
    if reference is not None:
        reference.module.load_state_dict({name.removeprefix(_REFERENCE): value for name, value in state["reference"].items()})
    if _is_other_kind(saved, policy):
        state["optimizer"] = from_other(state["optimizer"], optimizer.parts()[0])
    if optimizer.counts_by_parameter:
        _restore_zero_steps(state["optimizer"])
    optimizer.megatron.load_state_dict(state["optimizer"])
    optimizer.allocate_state()
    optimizer.scheduler.num_steps = 0  # its load adds the saved count to its own
    optimizer.scheduler.load_state_dict(state["scheduler"])


def _restore_zero_steps(saved: dict[Any, Any]) -> None:
    """Megatron's plain optimizers leave the number of steps out where it is 0, and then miss it."""
    for part in [saved] if "param_groups" in saved or "optimizer" in saved else saved.values():
        moments = part.get("optimizer", part).get("state")
        if moments is not None:
            moments.setdefault("common_step", torch.zeros(()))


def sharded_rng() -> ShardedObject:
    """torch's generators and Megatron's named states of every rank."""
    states = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def set_rng(states: dict[str, Any]) -> None:
    """Inverse of `sharded_rng`, for this rank."""
    torch.set_rng_state(states["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def describe(policy: Policy, optimizer: Optimizer) -> dict[str, Any]:
    """The writer, for the completion record: its model, layout, precision and kind of optimizer. Plain JSON."""
    shape = {name: value for name, value in asdict(policy.shape).items() if name != "raw"}
    return json.loads(json.dumps({
        "updates": optimizer.updates, "model": shape, "layout": asdict(parallel.current_layout(sequence=policy.compute.sequence_parallel)),
        "dtype": str(policy.module.config.params_dtype).removeprefix("torch."),
        "distributed_optimizer": policy.shares_out_optimizer,
    }))


def misfit(saved: dict[str, Any], own: dict[str, Any]) -> str | None:
    """Why a run described by `own` cannot load what a run described by `saved` wrote; None where it can. Pure."""
    if saved.get("model") != own["model"]:
        return f"holds another model ({saved.get('model')}) than this one ({own['model']})"
    dtype = saved.get("dtype", "float32")
    if dtype != own["dtype"]:
        return f"was trained in {dtype}, this run computes in {own['dtype']}: set compute.precision to {dtype}"
    before, now = (each.get("layout", {}).get("expert", 1) for each in (saved, own))
    if before != now:  # Megatron has one optimizer where experts are not spread, two where they are
        return f"was written with expert_parallel {before}, this run has {now}, for which Megatron cannot divide it anew: set it to {before}"
    distributed = saved.get("distributed_optimizer", False)
    if now > 1 and distributed != own["distributed_optimizer"]:
        return (f"was written {'with' if distributed else 'without'} a distributed optimizer, this run is the other way, and experts are spread "
                "over ranks: set compute.distributed_optimizer, or the number of ranks, to what it was")
    return None
