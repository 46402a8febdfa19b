"""From rollout rows to training samples: advantages by group, the exact zero-variance filter, and the counts of both. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evo_hpc.config.recipe import DataFilter, Optimizer
from evo_hpc.domains.base import SCORE
from evo_hpc.training.advantages import group_advantages, zero_variance
from evo_hpc.training.filters import SpreadMemory, narrow_groups
from evo_hpc.training.packing import Sample

FILTERS = ("pass_rate", "std_top_p", "std_ema")
"""Reasons for which a group that could teach something is left out."""


@dataclass
class ScoredGroup:
    """The rollouts of one prompt with what the trainer makes of them."""

    rows: list[dict[str, Any]]
    rewards: np.ndarray
    """[G], NaN where the verifier itself failed."""
    advantages: np.ndarray
    """[G]."""
    kept: bool
    why_dropped: str = ""


@dataclass
class ScoredBatch:
    """All groups of one step."""

    groups: list[ScoredGroup]
    metrics: dict[str, float] = field(default_factory=dict)
    memory: SpreadMemory = SpreadMemory()
    """For the next batch."""

    def kept(self) -> list[ScoredGroup]:
        return [group for group in self.groups if group.kept]


def score_groups(
    rows: Sequence[dict[str, Any]], group_size: int, optimizer: Optimizer, data_filter: DataFilter, memory: SpreadMemory = SpreadMemory(),
    most: int | None = None,
) -> ScoredBatch:
    """Advantages of every group, and which groups are learned from, the first `most` at most; `memory`: of the batches before.

    A group with a verifier error is dropped and counted: an error is not a wrong answer. Raises ValueError when a
    group is not complete.
    """
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row)
    groups = []
    for group_id, members in by_group.items():
        members.sort(key=lambda row: row["sample"])
        if [row["sample"] for row in members] != list(range(group_size)):
            raise ValueError(f"group {group_id} has samples {[row['sample'] for row in members]}, expected 0 to {group_size - 1}")
        groups.append(_score(members, optimizer, data_filter))
    memory = _leave_out(groups, data_filter, memory)
    for group in [group for group in groups if group.kept][most:] if most is not None else []:
        group.kept, group.why_dropped = False, "surplus"
    for group in groups:
        for row, advantage in zip(group.rows, group.advantages, strict=True):
            row["advantage"] = float(advantage)
            row["kept"] = group.kept
    return ScoredBatch(groups, _metrics(groups), memory)


def _score(members: list[dict[str, Any]], optimizer: Optimizer, data_filter: DataFilter) -> ScoredGroup:
    if any(row["error_class"] for row in members):
        rewards = np.array([np.nan if row["error_class"] else row["reward"] for row in members], dtype=np.float64)
        return ScoredGroup(members, rewards, np.zeros(len(members)), kept=False, why_dropped="error")
    rewards = np.array([row["reward"] for row in members], dtype=np.float64)
    advantages = group_advantages(rewards, optimizer.advantage, optimizer.advantage_clip)
    if data_filter.zero_variance == "drop" and zero_variance(rewards):
        return ScoredGroup(members, rewards, advantages, kept=False, why_dropped="zero_variance")
    return ScoredGroup(members, rewards, advantages, kept=True)


def _leave_out(groups: Sequence[ScoredGroup], data_filter: DataFilter, memory: SpreadMemory) -> SpreadMemory:
    """Drop the groups that the filters name; what is to be remembered."""
    if data_filter.pass_rate is not None:
        low, high = data_filter.pass_rate
        for group in groups:
            if group.kept and not low <= _mean_score(group) <= high:
                group.kept, group.why_dropped = False, "pass_rate"
    wide = [group for group in groups if group.kept and not zero_variance(group.rewards)]
    why, memory = narrow_groups([float(group.rewards.std(ddof=1)) for group in wide], data_filter, memory)
    for index, reason in why.items():
        wide[index].kept, wide[index].why_dropped = False, reason
    return memory


def _mean_score(group: ScoredGroup) -> float:
    return float(np.mean([dict(row["components"]).get(SCORE, 0.0) for row in group.rows]))


def _metrics(groups: list[ScoredGroup]) -> dict[str, float]:
    clean = [g for g in groups if g.why_dropped != "error"]
    rewards = np.concatenate([g.rewards for g in clean]) if clean else np.zeros(0)
    flat = [g for g in clean if zero_variance(g.rewards)]
    rows = [row for group in groups for row in group.rows]
    scores = [dict(row["components"]).get(SCORE) for row in rows if not row["error_class"]]
    advantages = np.concatenate([g.advantages for g in groups if g.kept]) if any(g.kept for g in groups) else np.zeros(0)
    solved = [_mean_score(g) >= 0.5 for g in flat]
    return {
        "reward_mean": float(rewards.mean()) if rewards.size else float("nan"),
        "reward_std": float(rewards.std()) if rewards.size else float("nan"),
        "score_mean": float(np.mean(scores)) if scores else float("nan"),
        "groups": float(len(groups)), "groups_kept": float(sum(g.kept for g in groups)),
        "groups_errored": float(len(groups) - len(clean)), "groups_filtered": float(sum(g.why_dropped in FILTERS for g in groups)),
        "groups_all_fail": float(len(flat) - sum(solved)), "groups_all_pass": float(sum(solved)),
        "zero_variance_fraction": len(flat) / len(clean) if clean else float("nan"),
        "group_std_mean": float(np.mean([g.rewards.std(ddof=1) for g in clean])) if clean else float("nan"),
        "advantage_positive_fraction": float((advantages > 0).mean()) if advantages.size else float("nan"),
        "response_tokens_mean": float(np.mean([row["response_tokens"] for row in rows])),
        "truncated_fraction": float(np.mean([row["truncated"] for row in rows])),
        "rollout_tokens": float(sum(row["response_tokens"] for row in rows)),
    }


def to_sample(row: dict[str, Any], *, mask_truncated: bool = False) -> Sample:
    """One rollout as the trainer sees it: the very token ids and log-probabilities that the engine produced; without a loss on any of
    them where it was cut off and that is not to be learned from."""
    prompt, response = row["prompt_ids"], row["response_ids"]
    mask = [0] * len(response) if mask_truncated and row["truncated"] else list(row["loss_mask"])
    return Sample(
        token_ids=[*prompt, *response], loss_mask=[0] * len(prompt) + mask, advantage=row["advantage"],
        sampled_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), np.asarray(row["logprobs"], np.float32)]),
    )


def split_mini_batches(groups: Sequence[ScoredGroup], count: int) -> list[list[ScoredGroup]]:
    """Whole groups into `count` mini-batches as equal as possible, in order; empty ones (too few groups) are left out."""
    size, rest = divmod(len(groups), count)
    cuts, start = [], 0
    for index in range(count):
        end = start + size + (index < rest)
        cuts.append(list(groups[start:end]))
        start = end
    return [cut for cut in cuts if cut]
