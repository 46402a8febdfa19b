"""Log-probabilities and entropy from logits whose vocabulary may be split over tensor-parallel ranks."""

from __future__ import annotations

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


@torch.no_grad()
def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats, not differentiated: [..., vocab / tp] -> [...] float32."""
    scaled = logits.detach().float() / temperature
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        logp = torch.log_softmax(scaled, -1)
        return -(logp.exp() * logp).sum(-1)
    group = parallel_state.get_tensor_model_parallel_group()
    top = scaled.amax(-1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    shifted = scaled - top
    weight = shifted.exp()
    sums = torch.stack([weight.sum(-1), (weight * shifted).sum(-1)])  # H = log Z - E[x] with Z = sum exp(x)
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
