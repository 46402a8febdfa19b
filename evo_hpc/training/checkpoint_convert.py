"""A checkpoint of the distributed optimizer read by a plain one, and the other way: their moments lie under the same names.

What differs is where the master weights and the number of steps are: both have them as far as they have any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evo_hpc.training.mcore import DistributedOptimizer, MegatronOptimizer

_SHARED, _PLAIN = "optimizer.state.param.", "optimizer.state.fp32_param."
"""Prefixes of master weights. A plain optimizer of a float32 model has none: the weights are the model's."""
_GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells one parameter group from another."""


def ask_for_other(wanted: dict[str, Any], own: MegatronOptimizer, *, has_masters: bool) -> None:
    """Turn what `own` asks for into what the other kind wrote, in place."""
    if isinstance(own, DistributedOptimizer):
        for tensors in wanted["param_state"].values():
            asked = tensors.pop("param")
            if has_masters:
                tensors["param"] = _renamed(asked, _SHARED, _PLAIN)
    elif has_masters:
        wanted["fp32_from_fp16_params"] = [[_renamed(each, _PLAIN, _SHARED) for each in group] for group in wanted["fp32_from_fp16_params"]]


def from_other(saved: dict[str, Any], own: MegatronOptimizer) -> dict[str, Any]:
    """What the other kind wrote, as `own` loads it; the model must have been loaded."""
    return _to_distributed(saved, own) if isinstance(own, DistributedOptimizer) else _to_plain(saved, own)


def _renamed(asked: Any, before: str, after: str) -> Any:
    assert asked.key.startswith(before), asked.key
    return replace(asked, key=after + asked.key.removeprefix(before))


def _to_distributed(saved: dict[str, Any], own: Any) -> dict[str, Any]:
    inner = saved.get("optimizer", saved)
    steps = inner.get("state", {}).get("common_step")
    groups = [{name: value for name, value in group.items() if name != "params"} for group in inner["param_groups"]]
    for group in groups:
        if steps is not None:
            group["step"] = float(steps)
        group.setdefault("step", 0.0)
    for tensors, weight in zip(saved["param_state"].values(), _weights(own), strict=True):
        tensors.setdefault("param", weight.detach())
    return {"optimizer": {"param_groups": groups}, "param_state": saved["param_state"], "param_state_sharding_type": "fully_reshardable"}


def _weights(own: Any) -> Iterator[Tensor]:
    """The model's parameters in the order of a distributed optimizer's state."""
    for buffer in own.buffers:
        yield from buffer.param_index_map


def _to_plain(saved: dict[str, Any], own: Any) -> dict[str, Any]:
    inner = saved["optimizer"]
    written = {tuple(group[name] for name in _GROUP): group for group in inner["param_groups"]}
    by_parameter = isinstance(own.optimizer, torch.optim.Adam | torch.optim.AdamW)
    groups = []
    for group in own.optimizer.state_dict()["param_groups"]:
        found = dict(written[tuple(group[name] for name in _GROUP)])
        steps = found.pop("step", 0.0) if by_parameter else None
        groups.append({**found, "params": group["params"]})
    holder = inner if "state" in inner else saved
    if by_parameter:
        holder["state"]["common_step"] = torch.tensor(float(steps))
    if holder is saved:
        return {"state": saved["state"], "param_groups": groups}
    return {"optimizer": {"state": inner["state"], "param_groups": groups}, "fp32_from_fp16_params": saved["fp32_from_fp16_params"]}
