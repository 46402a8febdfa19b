"""campaign.yaml: what is searched, on which tasks, from which base policy, under which gate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, field_validator

from evo_hpc.config.base import Config

PositiveInt = Annotated[int, Gt(0)]
Suite = Literal["probe", "dev"]


class DomainChoice(Config):
    """Which tasks."""

    name: str
    """Name of a domain, e.g. `arithmetic`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The domain's own settings (seed, sizes of the splits, ...)."""


class Supervised(Config):
    """A short supervised run (on Megatron) that makes the base policy, where the campaign brings none."""

    steps: PositiveInt = 200
    """Optimizer updates."""
    batch_size: PositiveInt = 64
    """Examples an update."""
    lr: Annotated[float, Gt(0)] = 1e-3
    """Adam learning rate."""
    lr_warmup_updates: Annotated[int, Ge(0)] = 10
    """Updates over which the learning rate rises from zero."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay, on matrices only."""
    token_budget: PositiveInt = 8192
    """Tokens in one packed micro-batch."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the weights and of the examples."""


class BaseModelChoice(Config):
    """The policy that the search starts from."""

    path: str = "base/policy"
    """A Hugging Face folder (config.json, tokenizer, safetensors); relative paths start at the campaign."""
    supervised: Supervised | None = None
    """How to make it when the path does not exist; null = it must exist."""


class Evaluation(Config):
    """How every version is scored. All of it goes into the evaluator epoch."""

    samples_per_task: PositiveInt = 8
    """k of Avg@k."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus mass."""
    max_response_tokens: PositiveInt = 96
    """Token budget of one response."""
    suites: list[Suite] = Field(default_factory=lambda: ["dev", "probe"])
    """Splits that every version is evaluated on; `dev`, which the gate reads, must be among them."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the evaluation's sampling."""

    @field_validator("suites")
    @classmethod
    def _with_dev(cls, value: list[Suite]) -> list[Suite]:
        if "dev" not in value:
            raise ValueError("`dev` must be among the suites: the gate compares versions on it")
        if len(set(value)) != len(value):
            raise ValueError("a suite is listed twice")
        return value


class Gate(Config):
    """The promotion gate."""

    alpha: Annotated[float, Gt(0), Lt(1)] = 0.05
    """Total error spent over all looks at dev (a_i = 6 alpha / (pi^2 i^2))."""
    draws: Annotated[int, Ge(1000)] = 10_000
    """Bootstrap resamples."""


FindingId = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")]
"""`analyzer.finding`, e.g. `signal.dead_groups`."""


class Watch(Config):
    """The live watch over training runs."""

    every: Annotated[int, Ge(0)] = 25
    """Steps between two looks of the analyzers marked `live`; 0 = no watch."""
    stop_on: list[FindingId] = Field(default_factory=lambda: ["score.collapse"])
    """The futility rule, declared beforehand: a run with any of these findings is stopped; it can be pruned, never promoted."""


class Search(Config):
    """What the campaign tries by itself, after v0001."""

    agent: Literal["rules", "none"] = "rules"
    """Who proposes: the rule-based agent (rules.yaml), or nobody: only versions that a person adds."""
    proposals: Annotated[int, Ge(0)] = 8
    """Versions that the agent may propose in all, merges among them."""
    width: PositiveInt = 1
    """Versions proposed at once, from the same evidence; max_parallel_jobs in cluster.yaml says how many jobs run side by side."""


class Budget(Config):
    """What the campaign may use, its sealed claim included. A cap that is reached stops new submissions; null = no cap."""

    gpu_hours: Annotated[float, Gt(0)] | None = None
    """GPUs x hours allocated to jobs, busy or not, of all attempts, failed ones too."""
    wall_hours: Annotated[float, Gt(0)] | None = None
    """Hours that jobs ran, added up: two side by side for an hour are two. Time in the queue is free."""
    version_gpu_hours: Annotated[float, Gt(0)] | None = None
    """GPU hours that any one version may use."""
    version_wall_hours: Annotated[float, Gt(0)] | None = None
    """Hours that the jobs of any one version may run."""
    grace: Annotated[float, Ge(0)] = 0.05
    """How far beyond a cap running jobs may go on, as a share of it; then they save and end."""


class Campaign(Config):
    """`campaign.yaml`."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Short name, used in job names."""
    description: str = ""
    """For people."""
    seed: Annotated[int, Ge(0)] = 0
    """Root of every random stream."""
    domain: DomainChoice
    """Tasks."""
    base_model: BaseModelChoice = BaseModelChoice()
    """Start."""
    evaluation: Evaluation = Evaluation()
    """Scoring."""
    gate: Gate = Gate()
    """Promotion."""
    watch: Watch = Watch()
    """Futility."""
    search: Search = Search()
    """What is tried next."""
    budget: Budget = Budget()
    """What it may use."""
