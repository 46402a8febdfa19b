"""One optimizer update from samples: the GRPO step and the supervised step, both a mean over all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evo_hpc.config import recipe
from evo_hpc.training import parallel
from evo_hpc.training.batch import MicroBatch
from evo_hpc.training.errors import NonFiniteError, SampleError, TrainingError
from evo_hpc.training.mcore import get_forward_backward_func, parallel_state
from evo_hpc.training.objective import Sequences, kl_estimate, token_terms
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.packing import Sample
from evo_hpc.training.policy import Policy
from evo_hpc.training.scoring import entropy, sum_over_context, token_logprobs

Terms = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""Loss of each token [n]; values of each token to average; values of each token to take the maximum of."""


def grpo_step(
    policy: Policy, optimizer: Optimizer, samples: Sequence[Sample], config: recipe.Optimizer, *, temperature: float
) -> dict[str, float]:
    """One update on the mean over tokens of scale (w surrogate + kl_coef KL - entropy_coef H); the terms: training/objective.py, w and
    scale: `samples` bring them (training/weighting.py).

    Every rank passes the same samples. `old_logprobs` None on all of them: exactly on-policy, ratio 1. No token with a
    loss: no update, `skipped` is 1 and no loss is reported. Raises SampleError on missing log-probabilities and
    NonFiniteError, before the weights change, on a NaN or infinite loss or gradient norm.
    """
    for name in ("old_logprobs", "ref_logprobs", "sampled_logprobs", "weights"):
        have = sum(getattr(sample, name) is not None for sample in samples)
        if 0 < have < len(samples):
            raise SampleError(f"{have} of {len(samples)} samples have {name}: all must, or none")
    if config.kl_coef and config.kl_in == "loss" and any(sample.ref_logprobs is None for sample in samples):
        raise SampleError(
            f"kl_coef is {config.kl_coef} but the samples have no ref_logprobs: score them with the reference first"
        )

    def terms(logits: Tensor, batch: MicroBatch) -> Terms:
        logprob = token_logprobs(logits, batch.loss_targets, temperature)
        token = token_terms(logprob, batch.old, batch.ref, batch.advantage, config, Sequences(batch.sequence, len(batch.rows), sum_over_context))
        with torch.set_grad_enabled(config.entropy_coef > 0):
            spread = entropy(logits, temperature)
        loss = token.surrogate if batch.weights is None else batch.weights * token.surrogate
        if config.kl_coef and config.kl_in == "loss":
            loss = loss + config.kl_coef * token.kl
        if config.entropy_coef:
            loss = loss - config.entropy_coef * spread
        with torch.no_grad():
            mean = {
                "surrogate": token.surrogate,
                "kl": token.kl,
                "entropy": spread.detach(),
                "clip_fraction_low": token.hit_low,
                "clip_fraction_high": token.hit_high,
                "approx_kl_old": torch.zeros_like(logprob) if batch.old is None else kl_estimate(batch.old, logprob, "k3"),
            }
            if config.dual_clip is not None:
                mean["clip_fraction_dual"] = token.hit_dual
            most = {"ratio_max": token.ratio, "negative_ratio_min": -token.ratio}
            if batch.sampled is not None:
                # Against the trainer's view of the policy that sampled, not of the one that later mini-batches have moved.
                behaviour = logprob if batch.old is None or config.old_logprobs == "sampled" else batch.old
                mean["sampler_kl"] = kl_estimate(batch.sampled, behaviour, "k3")
                most["sampler_logprob_diff_max"] = (batch.sampled - behaviour).abs()
        return batch.scale * loss, mean, most

    metrics = _update(policy, optimizer, samples, terms)
    if "negative_ratio_min" in metrics:
        metrics["ratio_min"] = -metrics.pop("negative_ratio_min")
    return metrics


def supervised_step(policy: Policy, optimizer: Optimizer, samples: Sequence[Sample]) -> dict[str, float]:
    """One update on the mean cross entropy of the tokens whose loss_mask is 1; the rest as in `grpo_step`."""

    def terms(logits: Tensor, batch: MicroBatch) -> Terms:
        with torch.no_grad():
            spread = entropy(logits, 1.0)
        return -token_logprobs(logits, batch.loss_targets, 1.0), {"entropy": spread}, {}

    return _update(policy, optimizer, samples, terms)


def _update(
    policy: Policy, optimizer: Optimizer, samples: Sequence[Sample], terms: Callable[[Tensor, MicroBatch], Terms]
) -> dict[str, float]:
    """Forward and backward over all micro-batches, then Adam on the sum over tokens divided by their global number."""
    if policy.trained is None:
        raise TrainingError("the policy was loaded with trainable=False; it can only be scored")
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    if tokens == 0:
        return {"skipped": 1.0, "samples": float(len(samples)), "tokens": 0.0}
    batches = [batch for _, batch in policy.micro_batches(samples)] or [policy.idle_batch(samples[0])]

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(iterator)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            per_token, mean, most = terms(logits[0].index_select(0, batch.loss_rows), batch)
            sums = {name: value.detach().float().sum() for name, value in {"loss": per_token, **mean}.items()}
            tops = {name: value.detach() for name, value in most.items()}
            return per_token.sum(), torch.tensor(len(per_token), dtype=torch.int, device=logits.device), (sums, tops)

        return policy.forward(batch, model), loss

    policy.trained.zero_grad_buffer()
    optimizer.megatron.zero_grad()
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[policy.trained],
        num_microbatches=len(batches),
        seq_length=1,  # the stages tell one another the sizes
        micro_batch_size=1,
        forward_only=False,
    )
    metrics = parallel.object_from_last_stage(_reduce(reported, tokens) if parallel.is_last_stage() else None)
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteError(
            f"update {optimizer.updates + 1}: loss is {metrics['loss']}; weights are as before the update"
        )
    metrics["grad_norm"] = optimizer.step()
    metrics["grad_clipped"] = float(metrics["grad_norm"] > optimizer.grad_clip)
    metrics["lr"] = optimizer.lr
    return {
        "skipped": 0.0,
        "samples": float(len(samples)),
        "tokens": float(tokens),
        "micro_batches": float(len(batches)),
        **metrics,
    }


def _reduce(reported: list[Any], tokens: int) -> dict[str, float]:
    """Sums over micro-batches and data- and context-parallel ranks, divided by `tokens`; maxima stay maxima."""
    sums = {name: torch.stack([s[name] for s, _ in reported]).double().sum() for name in reported[0][0]}
    low = torch.tensor([-math.inf], device=parallel.device())
    tops = {name: torch.cat([low, *(t[name] for _, t in reported)]).max() for name in reported[0][1]}
    total, top = torch.stack(list(sums.values())), torch.stack(list(tops.values())) if tops else low
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    means = {name: float(value) / tokens for name, value in zip(sums, total, strict=True)}
    return {**means, **{name: float(value) for name, value in zip(tops, top, strict=False)}}
