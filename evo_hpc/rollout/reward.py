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


def total_reward(reward: Reward, components: Mapping[str, float], *, truncated: bool) -> float:
    """sum_i weight_i component_i, clipped to +-reward.clip; zero for a truncated response where the recipe says so."""
    if truncated and reward.truncated == "zero":
        return 0.0
    total = sum(weight * components[name] for name, weight in reward.weights.items())
    return total if reward.clip is None else max(-reward.clip, min(reward.clip, total))
