"""How much each token of a batch counts: the correction for the engine's log-probabilities, and the normaliser. Pure.

Both are made before the batch is split over micro-batches and ranks, from all of it, so no split changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evo_hpc.config import recipe
from evo_hpc.training.packing import Sample

LARGEST_LOG_WEIGHT = 20.0
"""|log w| beyond which a weight is that of this; exp would overflow."""


def log_weights(sample: Sample, level: str) -> np.ndarray:
    """log(p_trainer / p_engine) of what was sampled: [tokens] float64, 0 where there is no loss; of `sequence` level the sum at
    each token that has a loss. Where the trainer's old log-probabilities are not there, the policy is the one that sampled."""
    assert sample.old_logprobs is not None and sample.sampled_logprobs is not None
    mask = np.asarray(sample.loss_mask, bool)
    logs = np.where(mask, sample.old_logprobs.astype(np.float64) - sample.sampled_logprobs.astype(np.float64), 0.0)
    if level == "sequence":
        logs = np.where(mask, logs.sum(), 0.0)
    return np.clip(logs, -LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)


def mismatch(samples: Sequence[Sample]) -> dict[str, float]:
    """How far the engine's log-probabilities of what it sampled are from the old ones: the mean over tokens of k3, and the largest
    difference. Of all that have a loss, before any are masked for it."""
    found = [
        (sample.sampled_logprobs.astype(np.float64) - sample.old_logprobs.astype(np.float64))[np.asarray(sample.loss_mask, bool)]
        for sample in samples if sample.old_logprobs is not None and sample.sampled_logprobs is not None
    ]
    apart = np.concatenate(found) if found else np.zeros(0)
    if not apart.size:
        return {}
    k3 = np.exp(np.clip(-apart, -LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)) + apart - 1
    return {"sampler_kl": float(k3.mean()), "sampler_logprob_diff_max": float(np.abs(apart).max())}


def corrected(samples: Sequence[Sample], config: recipe.Optimizer) -> tuple[list[Sample], dict[str, float]]:
    """The samples with the weights of `config.importance` on their policy gradient, and what was found.

    `truncated`: min(w, high), arXiv 2505.24298 and TRL's and verl's TIS. `masked`: w within [low, high]; tokens outside leave the
    loss mask, and so the denominator (IcePop). Metrics: importance_mean, importance_max, importance_ess (effective sample size over
    the number of tokens), importance_outside (fraction of tokens beyond a bound).
    """
    if config.importance == "none" or not samples:
        return list(samples), {}
    found, all_weights, outside = [], [], 0
    for sample in samples:
        mask = np.asarray(sample.loss_mask, bool)
        weights = np.exp(log_weights(sample, config.importance_level))
        beyond = mask & ((weights > config.importance_high) | ((config.importance == "masked") & (weights < config.importance_low)))
        all_weights.append(weights[mask])
        outside += int(beyond.sum())
        if config.importance == "truncated":
            found.append(replace(sample, weights=np.where(mask, np.minimum(weights, config.importance_high), 0.0)))
        else:
            kept = mask & ~beyond
            found.append(replace(sample, loss_mask=kept.astype(int).tolist(), weights=np.where(kept, weights, 0.0)))
    flat = np.concatenate(all_weights)
    if not flat.size:
        return found, {}
    return found, {
        "importance_mean": float(flat.mean()), "importance_max": float(flat.max()),
        "importance_ess": float(flat.sum() ** 2 / (flat**2).sum() / flat.size), "importance_outside": outside / flat.size,
    }


def normalised(samples: Sequence[Sample], config: recipe.Optimizer, max_response_tokens: int) -> list[Sample]:
    """The samples with `scale`, by which the loss of each of their tokens counts in a mean over all tokens of the batch.

    With T tokens in S sequences that have any, t of them in this one: `token_mean`: 1; `sequence_mean`: T / (S t);
    `constant`: T / (S max_response_tokens).
    """
    counts = [int(np.sum(sample.loss_mask)) for sample in samples]
    tokens, sequences = sum(counts), sum(count > 0 for count in counts)

    def scale(count: int) -> float:
        if config.loss == "token_mean" or not count:
            return 1.0
        return tokens / (sequences * (count if config.loss == "sequence_mean" else max_response_tokens))

    return [replace(sample, scale=scale(count)) for sample, count in zip(samples, counts, strict=True)]
