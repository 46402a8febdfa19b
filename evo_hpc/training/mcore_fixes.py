"""Defects of megatron-core 0.16 that are mended here, on CPUs and GPUs alike; each says what happens without."""

from __future__ import annotations

from typing import Any

import torch


def fix_distributed_load(distributed_optimizer: Any) -> None:
    """Have the distributed optimizer load a checkpoint where neither Transformer Engine nor Apex is there.

    Without: KeyError 'step', since the loaded tensors of a parameter lack what torch's Adam counts; and one step tensor
    shared by all parameters, which each of them would advance.
    """
    plain = distributed_optimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        plain(self, model_param, tensors)

    distributed_optimizer._set_main_param_and_optimizer_states = set_states
