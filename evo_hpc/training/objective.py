"""The terms of the policy-gradient loss of each token, as pure functions of log-probabilities and advantages.

How tokens are weighed against one another, and what they are divided by, is training/weighting.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evo_hpc.config import recipe


def kl_estimate(logprob: Tensor, ref: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens sampled from p; `logprob` is log p, `ref` log q, any shape.

    With d = log p - log q: k1: d (unbiased); k2: d^2 / 2; k3: exp(-d) + d - 1 (unbiased, never negative). Schulman,
    joschu.net/blog/kl-approx.html; k3 is equation 4 of GRPO, arXiv 2402.03300.
    """
    difference = logprob - ref
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    return torch.exp(-difference) + difference - 1


@dataclass(frozen=True)
class Sequences:
    """To which sequence of a micro-batch each of n tokens belongs."""

    index: Tensor
    """[n], of 0 .. count - 1."""
    count: int
    over_ranks: Callable[[Tensor], Tensor] = lambda total: total
    """Differentiable sum of a tensor [count] over the ranks that share these sequences, where several do."""

    def mean(self, values: Tensor) -> Tensor:
        """For each token the mean of `values` [n] over the tokens of its sequence: [n]. Differentiable."""
        def total(of: Tensor) -> Tensor:
            return self.over_ranks(torch.zeros(self.count, dtype=of.dtype, device=of.device).index_add(0, self.index, of))

        return (total(values) / total(torch.ones_like(values)).clamp(min=1))[self.index]


@dataclass(frozen=True)
class TokenTerms:
    """Terms of the loss, each [n]: ratio, surrogate (to minimise), KL to the reference, bounds hit."""

    ratio: Tensor
    surrogate: Tensor
    kl: Tensor
    hit_low: Tensor
    hit_high: Tensor
    hit_dual: Tensor


def token_terms(
    logprob: Tensor, old: Tensor | None, ref: Tensor | None, advantage: Tensor, config: recipe.Optimizer, sequences: Sequences | None = None
) -> TokenTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p / p_old (PPO; two bounds: DAPO, arXiv 2503.14476).

    logprob, old, ref, advantage: [n]; `sequences` where `config.ratio` is `sequence`: r is then exp of the mean of log p - log p_old
    over the tokens of a sequence, and so is its gradient (GSPO, arXiv 2507.18071, equation 7). `old` None: the policy being updated
    is the one that sampled, r is exactly 1 and its gradient that of log p. `ref` None: no reference, KL is zero. `dual_clip`: not
    above c |A| where A < 0 (arXiv 1912.09729). A bound is hit where it acts, where the clipped branch is the smaller one.
    """
    difference = logprob - (logprob.detach() if old is None else old)
    if config.ratio == "sequence":
        assert sequences is not None
        difference = sequences.mean(difference)
    ratio = torch.exp(difference)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    surrogate = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    hit_dual = torch.zeros_like(ratio, dtype=torch.bool)
    if config.dual_clip is not None:
        most = config.dual_clip * advantage.abs()
        hit_dual = (advantage < 0) & (surrogate > most)
        surrogate = torch.where(advantage < 0, torch.minimum(surrogate, most), surrogate)
    return TokenTerms(
        ratio=ratio, surrogate=surrogate, kl=torch.zeros_like(logprob) if ref is None else kl_estimate(logprob, ref, config.kl),
        hit_low=(ratio < low) & (advantage < 0), hit_high=(ratio > high) & (advantage > 0), hit_dual=hit_dual,
    )
