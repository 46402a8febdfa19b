"""The equations of GRPO as pure functions: group advantages, the clipped surrogate, the k3 KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

STD_EPSILON = 1e-6


def zero_variance(rewards: np.ndarray) -> bool:
    """Whether a group teaches nothing: all its rewards are equal, exactly."""
    return bool(np.max(rewards) == np.min(rewards))


def group_advantages(rewards: np.ndarray, kind: Literal["group_norm", "group_mean"]) -> np.ndarray:
    """Advantage of each rollout against its group: [G] -> [G] float64.

    `group_norm`: (r - mean) / (std + 1e-6), GRPO, arXiv 2402.03300, section 4.1.2; std with G - 1, as TRL and verl do
    (the paper does not say). `group_mean`: r - mean, Dr. GRPO, arXiv 2503.20783. Exactly zero for equal rewards.
    """
    rewards = np.asarray(rewards, np.float64)
    if zero_variance(rewards):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if kind == "group_mean":
        return centred
    return centred / (rewards.std(ddof=1) + STD_EPSILON)


def k3(logprob: Tensor, other: Tensor) -> Tensor:
    """Per-token estimate of KL(p || q) from tokens sampled from p, never negative: q/p - log(q/p) - 1.

    `logprob` is log p, `other` log q (Schulman's k3; GRPO equation 4 with p the policy and q the reference).
    """
    difference = other - logprob
    return torch.exp(difference) - difference - 1


@dataclass(frozen=True)
class TokenTerms:
    """Terms of the loss, each [tokens]: ratio, surrogate (to minimise), KL to the reference, bounds hit."""

    ratio: Tensor
    surrogate: Tensor
    kl: Tensor
    hit_low: Tensor
    hit_high: Tensor

    def loss(self, kl_coef: float) -> Tensor:
        """surrogate + kl_coef * KL (GRPO equation 3, sign turned)."""
        return self.surrogate + kl_coef * self.kl if kl_coef else self.surrogate


def token_terms(
    logprob: Tensor, old: Tensor | None, ref: Tensor | None, advantage: Tensor, *, clip_low: float, clip_high: float
) -> TokenTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p / p_old (PPO; two bounds: DAPO, arXiv 2503.14476).

    `old` None: the policy being updated is the one that sampled, r is exactly 1 and its gradient that of log p.
    `ref` None: no reference, KL is zero. A bound is hit where it acts, where the clipped branch is the smaller one.
    """
    ratio = torch.exp(logprob - (logprob.detach() if old is None else old))
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return TokenTerms(
        ratio=ratio,
        surrogate=-torch.minimum(ratio * advantage, clipped * advantage),
        kl=torch.zeros_like(logprob) if ref is None else k3(logprob, ref),
        hit_low=(ratio < 1 - clip_low) & (advantage < 0),
        hit_high=(ratio > 1 + clip_high) & (advantage > 0),
    )
