"""What a rollout earns: the recipe's weights over the verifier's components. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from evo_hpc.config.recipe import Reward
from evo_hpc.errors import UserError


class RewardError(UserError):
    """The recipe weighs a component that the domain does not have."""


def check_weights(reward: Reward, component_names: tuple[str, ...]) -> None:
    """Raise RewardError when a weight names an unknown component."""
    if unknown := set(reward.weights) - set(component_names):
        raise RewardError(f"reward.weights: unknown component {', '.join(sorted(unknown))}; this domain's verifier gives "
                          f"{', '.join(component_names)}")


def total_reward(reward: Reward, components: Mapping[str, float], *, truncated: bool, tokens: int = 0, max_tokens: int = 0) -> float:
    """sum_i weight_i component_i, or zero for a truncated response where the recipe says so; less the penalty of one that is almost as
    long as `max_tokens`; clipped to +-reward.clip."""
    total = sum(weight * components[name] for name, weight in reward.weights.items())
    if truncated and reward.truncated == "zero":
        total = 0.0
    total -= overlong(reward, tokens, max_tokens)
    return total if reward.clip is None else max(-reward.clip, min(reward.clip, total))


def overlong(reward: Reward, tokens: int, max_tokens: int) -> float:
    """The penalty of a response of so many tokens: 0 up to max_tokens - overlong_tokens, then linear up to overlong_penalty."""
    if reward.overlong_tokens is None:
        return 0.0
    over = tokens - (max_tokens - reward.overlong_tokens)
    return reward.overlong_penalty * min(1.0, max(0.0, over / reward.overlong_tokens))
