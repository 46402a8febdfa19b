"""Adam as Megatron runs it: parameter groups, gradient clipping, and the schedule of learning rate and weight decay."""

from __future__ import annotations

import math

from evo_hpc.config import recipe
from evo_hpc.training.errors import NonFiniteError, TrainingError
from evo_hpc.training.mcore import (
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    get_megatron_optimizer,
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
            use_distributed_optimizer=False,
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

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self.scheduler.num_steps

    @property
    def lr(self) -> float:
        """Learning rate of the latest update."""
        return float(self.megatron.param_groups[0]["lr"])

    def effective_config(self) -> dict[str, str | int | float | bool]:
        """What the built optimizer really uses, read back from its parameter groups, as plain scalars."""
        groups = [group for group in self.megatron.param_groups if group["params"]]
        decayed = [group for group in groups if group["wd_mult"]]
        adam = getattr(self.megatron, "chained_optimizers", [self.megatron])[0].optimizer
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
            "distributed_optimizer": False,
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
