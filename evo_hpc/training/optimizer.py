"""Adam as Megatron runs it: parameter groups, gradient clipping, and the schedule of learning rate and weight decay."""

from __future__ import annotations

import math

import torch

from evo_hpc.config import recipe
from evo_hpc.training.errors import NonFiniteError, TrainingError
from evo_hpc.training.mcore import (
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    get_megatron_optimizer,
    parallel_state,
)
from evo_hpc.training.policy import Policy


class Optimizer:
    """Megatron's Adam and scheduler over one trainable policy; `step` is one update from finished gradients."""

    def __init__(self, policy: Policy, config: recipe.Optimizer) -> None:
        if policy.trained is None:
            raise TrainingError("the policy was loaded with trainable=False; an optimizer needs trainable=True")
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            clip_grad=config.grad_clip,
            use_distributed_optimizer=policy.shares_out_optimizer,
            bf16=policy.module.config.bf16,
            params_dtype=policy.module.config.params_dtype,
        )
        self.megatron: MegatronOptimizer = get_megatron_optimizer(settings, [policy.trained])
        # Always there, even for a constant rate: without it Megatron's weight decay falls on the norms as well.
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.lr,
            lr_warmup_steps=config.lr_warmup_updates,
            lr_decay_steps=config.lr_warmup_updates + 1,
            lr_decay_style="constant",
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
        self.grad_clip = config.grad_clip
        policy.module.config.grad_scale_func = self.megatron.scale_loss

    def allocate_state(self) -> None:
        """Give Adam its zero moments where it has none yet, as its first update would: Megatron saves and loads only what is there.

        Megatron's own way of doing this leaves out the steps that torch's Adam counts.
        """
        for optimizer in self.parts():
            adam = optimizer.optimizer
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                state = adam.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter.data)
                if self.counts_by_parameter and "step" not in state:
                    state["step"] = torch.zeros(())

    @property
    def counts_by_parameter(self) -> bool:
        """Whether Adam is torch's, which keeps a number of steps with each parameter."""
        return isinstance(self.parts()[0].optimizer, torch.optim.Adam | torch.optim.AdamW)

    def parts(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers that have parameters on this rank: one for dense weights, one for experts where there are some."""
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in parts if getattr(part, "optimizer", None) is not None]

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self.scheduler.num_steps

    @property
    def lr(self) -> float:
        """Learning rate of the latest update."""
        return float(self.megatron.param_groups[0]["lr"])

    def effective_config(self) -> dict[str, str | int | float | bool]:
        """What the built optimizer really uses, read back from its parameter groups, as plain scalars.

        `decayed_parameters` and `undecayed_parameters` are those that this rank updates.
        """
        groups = [group for group in self.megatron.param_groups if group["params"]]
        decayed = [group for group in groups if group["wd_mult"]]
        part = self.parts()[0]
        adam, first, shared = part.optimizer, groups[0]["params"][0], isinstance(part, DistributedOptimizer)
        return {
            "optimizer": type(adam).__name__,
            "beta1": groups[0]["betas"][0],
            "beta2": groups[0]["betas"][1],
            "eps": groups[0]["eps"],
            "lr_max": self.scheduler.max_lr,
            "lr_warmup_updates": self.scheduler.lr_warmup_steps,
            "weight_decay": decayed[0]["weight_decay"] if decayed else 0.0,
            "decayed_parameters": sum(p.numel() for group in decayed for p in group["params"]),
            "undecayed_parameters": sum(p.numel() for group in groups if not group["wd_mult"] for p in group["params"]),
            "grad_clip": self.grad_clip,
            "distributed_optimizer": shared,
            "sharded_over": parallel_state.get_data_parallel_group(with_context_parallel=True).size() if shared else 1,
            "master_dtype": str(first.dtype).removeprefix("torch."),
            "updates": self.updates,
        }

    def step(self) -> float:
        """Clip and apply the gradients; return their norm before clipping.

        Update k (from 1) uses lr * min(1, k / lr_warmup_updates). Raises NonFiniteError before any weight changes.
        """
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteError(
                f"update {self.updates + 1}: gradient norm is {grad_norm}; weights are as before the update"
            )
        self.scheduler.step(1)
        success, _, _ = self.megatron.step()
        if not success:
            raise NonFiniteError(
                f"update {self.updates}: Megatron refused the gradients; weights are as before the update"
            )
        return grad_norm
