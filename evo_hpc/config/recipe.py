"""The recipe: everything that determines a training run. Its sections are the factors of an intervention."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, model_validator

from evo_hpc.config.base import Config

PositiveInt = Annotated[int, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Decay = Annotated[float, Ge(0), Lt(1)]


class Rollout(Config):
    """How rollouts are sampled for training. Factor `rollout`."""

    prompts_per_step: PositiveInt = 16
    """Groups sampled for each training step."""
    group_size: Annotated[int, Ge(2)] = 8
    """Rollouts per prompt (G); the advantage is normalised within them."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer scores tokens at the same temperature."""
    max_response_tokens: PositiveInt = 96
    """Token budget of one response; a response that reaches it is truncated."""
    max_staleness: Annotated[int, Ge(0), Le(0)] = 0
    """How many policy updates old a rollout may be. 0 = synchronous, the only mode implemented so far."""


class Reward(Config):
    """What a rollout earns. Factor `reward`."""

    weights: dict[str, float] = Field(default_factory=lambda: {"correct": 1.0})
    """Weight of each reward component, by the name the domain's verifier gives it."""
    clip: Positive | None = None
    """Absolute bound on the total reward; null = none."""
    truncated: Literal["score", "zero"] = "score"
    """A truncated response: `score` it as it stands, or give it `zero`."""

    @model_validator(mode="after")
    def _some_weight(self) -> Reward:
        if not any(self.weights.values()):
            raise ValueError("at least one reward weight must be non-zero")
        return self


class DataFilter(Config):
    """Which tasks are sampled and which groups are learned from. Factor `data_filter`."""

    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal (max == min over the whole group): `drop` from the loss, or `keep`."""
    difficulty: dict[str, list[int]] = Field(default_factory=dict)
    """Restricts training tasks by a task attribute, e.g. `{digits: [3, 4]}`; empty = every training task."""


class Optimizer(Config):
    """The learning algorithm: advantages, loss, regularisation, Adam. Factor `optimizer`."""

    lr: Positive = 1e-4
    """Adam learning rate."""
    lr_warmup_updates: Annotated[int, Ge(0)] = 0
    """Updates over which the learning rate rises linearly from zero."""
    beta1: Decay = 0.9
    """Adam first-moment decay."""
    beta2: Decay = 0.999
    """Adam second-moment decay."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, on matrices only."""
    grad_clip: Positive = 1.0
    """Global gradient-norm bound."""
    advantage: Literal["group_norm", "group_mean"] = "group_norm"
    """`group_norm`: (r - mean) / std (GRPO, arXiv 2402.03300); `group_mean`: r - mean (Dr. GRPO, arXiv 2503.20783)."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """Lower ratio bound: ratio >= 1 - clip_low (PPO)."""
    clip_high: Positive = 0.28
    """Upper ratio bound: ratio <= 1 + clip_high (Clip-Higher, DAPO, arXiv 2503.14476)."""
    kl_coef: NonNegative = 1e-3
    """Weight of the k3 KL to the reference policy (the init), added to the loss; 0 = no reference."""
    mini_batches: PositiveInt = 1
    """Optimizer updates per sampled batch. With 1 the ratio is exactly 1 and the clip never binds."""


class ToolUse(Config):
    """Tools, prompt and turn limits. Factor `tool_use`."""

    max_turns: Annotated[int, Ge(1), Le(1)] = 1
    """Turns of one rollout. Only single-turn domains are implemented so far."""
    system_prompt: str | None = None
    """System message put before the task; null = none."""


class Checkpoint(Config):
    """How often the trainer saves. Not a factor: it must not change what is learned."""

    every: PositiveInt = 25
    """Steps between checkpoints; an unsignalled death loses at most this many."""
    minutes: Annotated[float, Gt(0)] | None = None
    """Minutes after which one is due whatever the step; null = by steps alone."""
    keep: Annotated[int, Ge(1)] = 2
    """Checkpoints kept on disk; the last is always kept."""


class Recipe(Config):
    """`recipe.yaml`: the full effective recipe of one version; it stands alone."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    seed: Annotated[int, Ge(0)] = 0
    """Training seed. A version that changes only this is a replicate."""
    steps: Annotated[int, Ge(0)] = 100
    """Training steps (sampled batches). 0 = the init itself, only evaluated (v0000)."""
    token_budget: PositiveInt = 4096
    """Tokens in one packed micro-batch, at most (a longer sample travels alone). Does not change the gradient."""
    rollout: Rollout = Rollout()
    """Sampling."""
    reward: Reward = Reward()
    """Reward."""
    data_filter: DataFilter = DataFilter()
    """Task and group selection."""
    optimizer: Optimizer = Optimizer()
    """Algorithm."""
    tool_use: ToolUse = ToolUse()
    """Tools and turns."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving."""

    @model_validator(mode="after")
    def _divides(self) -> Recipe:
        if self.rollout.prompts_per_step % self.optimizer.mini_batches:
            raise ValueError(
                f"optimizer.mini_batches ({self.optimizer.mini_batches}) must divide "
                f"rollout.prompts_per_step ({self.rollout.prompts_per_step})"
            )
        return self
