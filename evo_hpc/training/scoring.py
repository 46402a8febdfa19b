"""Log-probabilities and entropy from logits whose vocabulary may be split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evo_hpc.training.mcore import parallel_state, tensor_parallel


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[target]: [..., vocab / tp], [...] -> [...] float32. Differentiable."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return torch.log_softmax(scaled, -1).gather(-1, targets[..., None])[..., 0]
    # the clone: megatron's cross entropy overwrites float32 logits
    return -tensor_parallel.vocab_parallel_cross_entropy(scaled.clone(), targets)


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats: [..., vocab / tp] -> [...] float32. Differentiable."""
    return _Entropy.apply(logits.float() / temperature)  # type: ignore[no-any-return, no-untyped-call]


class _Entropy(torch.autograd.Function):
    """H = log Z - E[x] with Z = sum exp(x), over a vocabulary that may be split over ranks; dH/dx = -p (log p + H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        split = parallel_state.get_tensor_model_parallel_world_size() > 1
        group = parallel_state.get_tensor_model_parallel_group() if split else None
        top = x.amax(-1, keepdim=True)
        if split:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = x - top
        weight = shifted.exp()
        sums = torch.stack([weight.sum(-1), (weight * shifted).sum(-1)])
        if split:
            dist.all_reduce(sums, group=group)
        found = sums[0].log() - sums[1] / sums[0]
        if ctx.needs_input_grad[0]:
            logp = shifted - sums[0].log()[..., None]
            ctx.save_for_backward(logp, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        logp, found = ctx.saved_tensors
        return -gradient[..., None] * logp.exp() * (logp + found[..., None])


def sum_over_context(values: Tensor) -> Tensor:
    """Sum of `values`, any shape, over context-parallel ranks, on each of them. Differentiable."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    return _SumOverContext.apply(values)  # type: ignore[no-any-return, no-untyped-call]


class _SumOverContext(torch.autograd.Function):
    """Every rank's loss depends on the sum, so what flows back is the sum of all their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        return gradient
