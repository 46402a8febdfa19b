"""The recipe: everything that determines a training run. Its sections are the factors of an intervention."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

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
    max_staleness: Annotated[int, Ge(0), Le(8)] = 0
    """How many steps old the weights that sampled a rollout may be (k). 0 = synchronous; 1 = one step off: step t + 1 is sampled while step t
    is learned from."""
    weights: Literal["exact", "newest"] = "exact"
    """`exact`: the rollouts of step t are sampled with the weights of step t - 1 - k (where training has just begun or resumed, with those it
    began with), whoever samples them and how fast; `newest`: with the newest that are published when their batch is begun."""
    oversample: Annotated[float, Ge(1), Le(8)] = 1.0
    """Times prompts_per_step: the groups that a step asks for. At most prompts_per_step of them are learned from."""
    late_groups: Literal["wait", "carry", "drop"] = "wait"
    """`wait`: a step begins when all its groups are complete. Else as soon as prompts_per_step are: those that it did not take are used by a
    later step while their staleness allows (`carry`), or not sampled to the end (`drop`). Which those are depends on who is fast."""

    @property
    def groups_asked(self) -> int:
        """Groups that a step asks for before any are filtered."""
        return math.ceil(self.prompts_per_step * self.oversample - 1e-9)

    @model_validator(mode="after")
    def _late_groups_need_time(self) -> Rollout:
        if self.late_groups == "carry" and not self.max_staleness:
            raise ValueError("late_groups: carry needs max_staleness of at least 1: a group that is used a step later is a step older")
        if self.late_groups == "carry" and self.weights == "exact":
            raise ValueError("late_groups: carry needs weights: newest: with exact ones a group has the staleness that is allowed already")
        return self


class Reward(Config):
    """What a rollout earns. Factor `reward`."""

    weights: dict[str, float] = Field(default_factory=lambda: {"correct": 1.0})
    """Weight of each reward component, by the name the domain's verifier gives it."""
    clip: Positive | None = None
    """Absolute bound on the total reward; null = none."""
    truncated: Literal["score", "zero", "mask"] = "score"
    """A truncated response: `score` it as it stands, give it `zero`, or `mask`: score it, but learn nothing from its tokens (overlong
    filtering, DAPO, arXiv 2503.14476)."""
    overlong_tokens: PositiveInt | None = None
    """The last tokens before max_response_tokens, over which the penalty grows from zero to all of it (soft overlong punishment, DAPO,
    equation 13); null = none."""
    overlong_penalty: Positive = 1.0
    """Taken off the reward of a response of max_response_tokens."""

    @model_validator(mode="after")
    def _some_weight(self) -> Reward:
        if not any(self.weights.values()):
            raise ValueError("at least one reward weight must be non-zero")
        return self


class DataFilter(Config):
    """Which tasks are sampled and which groups are learned from. Factor `data_filter`."""

    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal (max == min over the whole group): `drop` from the loss, or `keep`."""
    pass_rate: tuple[Annotated[float, Ge(0), Le(1)], Annotated[float, Ge(0), Le(1)]] | None = None
    """Groups whose mean score is outside [low, high] are left out; null = none are."""
    std_top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """Of the groups with different rewards the widest, whose standard deviations make up this share of all (RAGEN, arXiv 2504.20073)."""
    std_ema: Decay | None = None
    """Decay, for each group, of a moving average of the groups' reward standard deviation; narrower ones are left out; null = no such rule."""
    std_ema_factor: Positive = 1.0
    """Times that average: the least that a group must have."""
    std_warmup: Annotated[int, Ge(0)] = 20
    """Groups that the average is made of before it leaves any out."""
    keep_at_least: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of the groups with different rewards that `std_top_p` and `std_ema` leave in, the widest."""
    refill_rounds: Annotated[int, Ge(0), Le(64)] = 0
    """Times that a step asks for as many more groups as were left out, until prompts_per_step are learned from (dynamic sampling, DAPO,
    arXiv 2503.14476); 0 = it learns from what is left."""
    difficulty: dict[str, list[int]] = Field(default_factory=dict)
    """Restricts training tasks by a task attribute, e.g. `{digits: [3, 4]}`; empty = every training task."""


    @model_validator(mode="after")
    def _band(self) -> DataFilter:
        if self.pass_rate is not None and self.pass_rate[0] > self.pass_rate[1]:
            raise ValueError(f"pass_rate: [{self.pass_rate[0]}, {self.pass_rate[1]}] leaves every group out; give [low, high]")
        return self


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
    advantage: Literal["group_norm", "group_mean", "leave_one_out"] = "group_norm"
    """`group_norm`: (r - mean) / std (GRPO, arXiv 2402.03300); `group_mean`: r - mean (Dr. GRPO, arXiv 2503.20783);
    `leave_one_out`: r - mean of the others (RLOO, arXiv 2402.14740)."""
    advantage_clip: Positive | None = None
    """Absolute bound on an advantage; null = none."""
    ratio: Literal["token", "sequence"] = "token"
    """p / p_old of each token (PPO, GRPO), or of the whole sequence, its geometric mean over tokens (GSPO, arXiv 2507.18071, which
    also has `loss: sequence_mean` and far smaller bounds: 3e-4 and 4e-4)."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """Lower ratio bound: ratio >= 1 - clip_low (PPO)."""
    clip_high: Positive = 0.28
    """Upper ratio bound: ratio <= 1 + clip_high (Clip-Higher, DAPO, arXiv 2503.14476)."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """Bound c on how much a token with a negative advantage may cost: at most c |A| (dual-clip PPO, arXiv 1912.09729); null = none."""
    loss: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Over all micro-batches and ranks: `token_mean`: every token of the batch weighs the same (DAPO, arXiv 2503.14476);
    `sequence_mean`: every sequence does, by the mean over its tokens (GRPO as published); `constant`: the sum over tokens divided by
    sequences x max_response_tokens (Dr. GRPO, arXiv 2503.20783)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy of the next-token distribution, subtracted from the loss (A3C, arXiv 1602.01783)."""
    kl_coef: NonNegative = 1e-3
    """Weight of the KL to the reference policy, the init; 0 = no reference."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator for a sampled token, with d = log p - log p_ref: `k1`: d; `k2`: d^2 / 2; `k3`: exp(-d) + d - 1 (Schulman,
    joschu.net/blog/kl-approx.html; k3: GRPO). In the loss the gradient of k1 has mean zero: it regularises nothing there."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Added to the loss of each token (GRPO), or its sum over the tokens subtracted from the reward before advantages (RLHF's PPO)."""
    importance: Literal["none", "truncated", "masked"] = "none"
    """Correction for the engine's log-probabilities differing from the trainer's, w = p_trainer / p_engine of what was sampled:
    `truncated`: the policy gradient times min(w, importance_high); `masked`: times w within the two bounds, and outside of them the
    tokens leave the batch."""
    importance_level: Literal["token", "sequence"] = "token"
    """w of each token, or of the whole sequence: the product over its tokens."""
    importance_high: Annotated[float, Gt(1)] = 2.0
    """Upper bound of w."""
    importance_low: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Lower bound of w, where `masked`."""
    mini_batches: PositiveInt = 1
    """Optimizer updates in a pass over a sampled batch. With 1, one pass and recomputed log-probabilities the ratio is exactly 1 and the
    clip never binds."""
    epochs: PositiveInt = 1
    """Passes over each sampled batch (PPO)."""
    old_logprobs: Literal["recomputed", "sampled"] = "recomputed"
    """What p_old of the ratio is: the trainer's own before the first update of a step (decoupled PPO, arXiv 2110.00641), or what the
    engine gave with the tokens, which spares a pass and bounds staleness and the engine's rounding by the same clip."""
    reference_every: PositiveInt | None = None
    """Steps after which the policy of that step becomes the reference (ProRL, arXiv 2505.24864); null = the init stays it."""
    skip_limit: Annotated[int, Ge(0)] = 3
    """Updates in a row that are left out because their loss or gradient is NaN or infinite; one more ends the run."""


class ToolUse(Config):
    """Tools, prompt and turn limits. Factor `tool_use`."""

    max_turns: PositiveInt = 1
    """Responses of the policy in one rollout, at most; more than one only where the domain's tasks have turns."""
    system_prompt: str | None = None
    """System message put before the task; null = none."""

    def of_evaluation(self) -> dict[str, Any]:
        """What an evaluation is told of it: a policy is scored with the tools and turns that it was trained with."""
        return {"system_prompt": self.system_prompt, **({"max_turns": self.max_turns} if self.max_turns > 1 else {})}


class Compute(Config):
    """How the trainer computes. Not a factor: beyond rounding it must not change what is learned."""

    tensor_parallel: PositiveInt = 1
    """Ranks that every layer's matrices are split over; must divide the attention heads, the KV heads, the vocabulary and the MLP."""
    sequence_parallel: bool = False
    """Whether those ranks also split the tokens between the matrices (arXiv 2205.05198); less memory, needs tensor_parallel > 1."""
    pipeline_parallel: PositiveInt = 1
    """Stages that the layers are divided into; must divide their number. Micro-batches (`token_budget`) fill the pipeline."""
    context_parallel: PositiveInt = 1
    """Ranks that every sequence is split over, for sequences too long for one."""
    expert_parallel: PositiveInt = 1
    """Ranks that the experts of a mixture-of-experts model are spread over; must divide their number. They are otherwise data-parallel."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; `bfloat16` keeps float32 master weights, gradients and Adam moments. `auto`: bfloat16 where CUDA is."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept: those of attention alone, or of whole layers (arXiv 2205.05198)."""
    distributed_optimizer: bool = True
    """Whether data- and context-parallel ranks, where there are several, share out master weights and Adam's moments (ZeRO-1, arXiv
    1910.02054) instead of each having all."""

    @model_validator(mode="after")
    def _fits(self) -> Compute:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel splits tokens over tensor-parallel ranks: it needs tensor_parallel > 1")
        if self.expert_parallel > 1 and self.tensor_parallel > 1 and not self.sequence_parallel:
            raise ValueError("expert_parallel with tensor_parallel > 1 needs sequence_parallel: true (Megatron trains a mixture of experts only so)")
        return self


class Checkpoint(Config):
    """How often the trainer saves. Not a factor: it must not change what is learned."""

    every: PositiveInt = 25
    """Steps between checkpoints; an unsignalled death loses at most this many."""
    minutes: Annotated[float, Gt(0)] | None = None
    """Minutes after which one is due whatever the step; null = by steps alone."""
    keep: Annotated[int, Ge(1)] = 2
    """Checkpoints kept on disk; the last is always kept."""
    asynchronous: bool = False
    """Whether training goes on while a checkpoint is written; it counts, and older ones go, once all of it is on disk. Costs memory for a copy."""


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
    compute: Compute = Compute()
    """Parallelism, precision, recomputation."""

    @model_validator(mode="after")
    def _uses(self) -> Recipe:
        config = self.optimizer
        if config.old_logprobs == "sampled" and config.importance != "none":
            raise ValueError(f"optimizer.importance ({config.importance}) corrects for the engine's log-probabilities, and with "
                             "optimizer.old_logprobs: sampled the ratio has them already; set one of the two")
        if self.rollout.max_staleness and config.importance == "none" and config.old_logprobs == "recomputed":
            raise ValueError(f"rollout.max_staleness is {self.rollout.max_staleness}, and nothing corrects for older policies having sampled: set "
                             "optimizer.old_logprobs: sampled (the ratio is then to the policy that sampled) or optimizer.importance")
        if config.reference_every is not None and not config.kl_coef:
            raise ValueError("optimizer.reference_every: there is no reference where optimizer.kl_coef is 0")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        overlong, longest = self.reward.overlong_tokens, self.rollout.max_response_tokens
        if overlong is not None and overlong > longest:
            raise ValueError(f"reward.overlong_tokens ({overlong}) must not be more than rollout.max_response_tokens ({longest})")
        return self

    @model_validator(mode="after")
    def _divides(self) -> Recipe:
        if self.rollout.prompts_per_step % self.optimizer.mini_batches:
            raise ValueError(
                f"optimizer.mini_batches ({self.optimizer.mini_batches}) must divide "
                f"rollout.prompts_per_step ({self.rollout.prompts_per_step})"
            )
        return self
