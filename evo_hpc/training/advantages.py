"""What a rollout's reward means against those of its group. Pure."""

from __future__ import annotations

from typing import Literal

import numpy as np

STD_EPSILON = 1e-6


def zero_variance(rewards: np.ndarray) -> bool:
    """Whether a group teaches nothing: all its rewards are equal, exactly."""
    return bool(np.max(rewards) == np.min(rewards))


def group_advantages(
    rewards: np.ndarray, kind: Literal["group_norm", "group_mean", "leave_one_out"], clip: float | None = None
) -> np.ndarray:
    """Advantage of each rollout against its group: [G] -> [G] float64, bounded to +-clip.

    `group_norm`: (r - mean) / (std + 1e-6), GRPO, arXiv 2402.03300, section 4.1.2; std with G - 1, as TRL and verl do
    (the paper does not say). `group_mean`: r - mean, Dr. GRPO, arXiv 2503.20783. `leave_one_out`: r - mean of the other G - 1,
    RLOO, arXiv 2402.14740, equation 8. Exactly zero for equal rewards.
    """
    rewards = np.asarray(rewards, np.float64)
    if zero_variance(rewards):
        return np.zeros_like(rewards)
    advantages = rewards - rewards.mean()
    if kind == "group_norm":
        advantages = advantages / (rewards.std(ddof=1) + STD_EPSILON)
    elif kind == "leave_one_out":
        advantages = advantages * len(rewards) / (len(rewards) - 1)
    return advantages if clip is None else np.clip(advantages, -clip, clip)
