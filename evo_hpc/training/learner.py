"""One step of learning from the scored groups of a batch: log-probabilities, corrections, an optimizer update a mini-batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from evo_hpc.config import recipe
from evo_hpc.training.advantages import group_advantages
from evo_hpc.training.errors import DivergedError, NonFiniteError
from evo_hpc.training.groups import ScoredBatch, ScoredGroup, split_mini_batches, to_sample
from evo_hpc.training.objective import kl_estimate
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.packing import Sample
from evo_hpc.training.policy import Policy
from evo_hpc.training.steps import grpo_step
from evo_hpc.training.weighting import corrected, mismatch, normalised

LOSS_FIELDS = (
    "advantage", "advantage_clip", "ratio", "clip_low", "clip_high", "dual_clip", "loss", "entropy_coef", "kl_coef", "kl", "kl_in", "importance",
    "importance_level", "importance_high", "importance_low", "mini_batches", "epochs", "old_logprobs", "reference_every", "skip_limit",
)
"""What of the recipe's optimizer section the loss goes by."""


class Clock:
    """Seconds of a step by what they were spent on."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """seconds_step, one seconds_NAME each, and what is in none of them."""
        total = time.perf_counter() - self.started
        return {
            "seconds_step": total, **{f"seconds_{name}": s for name, s in self.spent.items()},
            "seconds_other": total - sum(self.spent.values()),
        }


@dataclass
class Learner:
    """What learns: the policy, its optimizer, and the reference where there is one."""

    policy: Policy
    optimizer: Optimizer
    reference: Policy | None
    recipe: recipe.Recipe
    skipped_in_a_row: int = 0
    """Updates that were left out since the last one that was made."""

    def learn(self, batch: ScoredBatch, clock: Clock) -> dict[str, float]:
        """Updates on the kept groups; metrics are means over updates weighted by tokens, extremes stay extremes."""
        config, temperature = self.recipe.optimizer, self.recipe.rollout.temperature
        kept = batch.kept()
        mask_truncated = self.recipe.reward.truncated == "mask"
        every = [to_sample(row, mask_truncated=mask_truncated) for group in kept for row in group.rows]
        updated_once, recomputed = config.mini_batches * config.epochs == 1, config.old_logprobs == "recomputed"
        in_reward = self.reference is not None and config.kl_in == "reward"
        with clock("logprobs"):
            if not recomputed:
                every = [replace(sample, old_logprobs=sample.sampled_logprobs) for sample in every]
            # With one update a batch the policy that is updated is the old one: the ratio is exactly 1, and nobody needs its log-probabilities.
            elif not updated_once or config.importance != "none" or in_reward:
                every = _with(every, "old_logprobs", self.policy.logprobs(every, temperature=temperature))
            if self.reference is not None:
                every = _with(every, "ref_logprobs", self.reference.logprobs(every, temperature=temperature))
        found: dict[str, float] = {}
        drift = mismatch(every) if recomputed else {}
        if in_reward:
            every, found["kl_in_reward_mean"] = penalised(kept, every, config)
            advantages = np.concatenate([group.advantages for group in kept]) if kept else np.zeros(0)
            found["advantage_positive_fraction"] = float((advantages > 0).mean()) if advantages.size else float("nan")
        every, importance = corrected(every, config)
        if updated_once and recomputed:
            every = [replace(sample, old_logprobs=None) for sample in every]
        of_group, start = {}, 0
        for group in kept:
            of_group[id(group)] = every[start : start + len(group.rows)]
            start += len(group.rows)
        updates = []
        with clock("train"):
            for mini in split_mini_batches(kept, config.mini_batches) * config.epochs:
                samples = normalised([s for group in mini for s in of_group[id(group)]], config, self.recipe.rollout.max_response_tokens)
                updates.append(self._update(samples, config, temperature))
        left_out = {"updates_skipped": float(updates.count(None))} if kept else {}
        made = [u for u in updates if u is not None and not u["skipped"]]
        return {**merge_updates(made), **self._drift(made, drift), **left_out, **found, **importance}

    def _drift(self, updates: list[dict[str, float]], measured: dict[str, float]) -> dict[str, float]:
        """Trainer against engine, of the policy that sampled: as `measured`, or as the first update saw it, which had not moved it yet.
        Of stale rollouts an older policy is what sampled: how far it is behind has a name of its own."""
        names = ("sampler_kl", "sampler_logprob_diff_max")
        found = measured or {name: updates[0][name] for name in names if updates and name in updates[0]}
        if self.recipe.rollout.max_staleness and found:
            return {**dict.fromkeys(names, float("nan")), "behaviour_kl": found["sampler_kl"]}
        return found

    def _update(self, samples: list[Sample], config: recipe.Optimizer, temperature: float) -> dict[str, float] | None:
        """One update, or None where its loss or gradient is not finite; the weights are then as before. Raises DivergedError when
        that has happened too often in a row."""
        try:
            found = grpo_step(self.policy, self.optimizer, samples, config, temperature=temperature)
        except NonFiniteError as error:
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > config.skip_limit:
                raise DivergedError(
                    f"{self.skipped_in_a_row} updates in a row were not finite (optimizer.skip_limit {config.skip_limit}), the last: {error}. "
                    "The last checkpoint is good; lower optimizer.lr or optimizer.grad_clip, or look at the rewards and log-probabilities"
                ) from error
            print(f"left out: {error}", flush=True)
            return None
        self.skipped_in_a_row = 0
        return found

    def refresh_reference(self, step: int) -> None:
        """Make the policy the reference where `step` is one at which it is to become that."""
        every = self.recipe.optimizer.reference_every
        if self.reference is not None and every is not None and step % every == 0:
            self.reference.module.load_state_dict(self.policy.module.state_dict())


def _with(samples: Sequence[Sample], name: str, values: Sequence[np.ndarray]) -> list[Sample]:
    return [replace(sample, **{name: value}) for sample, value in zip(samples, values, strict=True)]


def penalised(groups: Sequence[ScoredGroup], samples: Sequence[Sample], config: recipe.Optimizer) -> tuple[list[Sample], float]:
    """The samples of `groups`, in order, with advantages from rewards less kl_coef times the sum of the KL of their tokens (and so in the
    rows); and the mean of what was taken off. Which groups are learned from was decided by the rewards as they were earned."""
    rest, found, taken = iter(samples), list[Sample](), list[float]()
    for group in groups:
        members = [next(rest) for _ in group.rows]
        off = np.array([config.kl_coef * _kl_sum(sample, row, config) for sample, row in zip(members, group.rows, strict=True)])
        taken += off.tolist()
        group.advantages = group_advantages(group.rewards - off, config.advantage, config.advantage_clip)
        for row, advantage in zip(group.rows, group.advantages, strict=True):
            row["advantage"] = float(advantage)
        found += [replace(s, advantage=float(a)) for s, a in zip(members, group.advantages, strict=True)]
    return found, float(np.mean(taken)) if taken else 0.0


def _kl_sum(sample: Sample, row: dict[str, Any], config: recipe.Optimizer) -> float:
    """Over all that the policy sampled, also where nothing is learned from it because it was cut off: the group's mean is of all."""
    assert sample.old_logprobs is not None and sample.ref_logprobs is not None
    old, ref = (torch.from_numpy(values.astype(np.float64)) for values in (sample.old_logprobs, sample.ref_logprobs))
    sampled = torch.tensor([0] * len(row["prompt_ids"]) + list(row["loss_mask"]), dtype=torch.bool)
    return float(kl_estimate(old, ref, config.kl)[sampled].sum())


_EXTREMES = {"ratio_max": max, "ratio_min": min, "sampler_logprob_diff_max": max, "grad_clipped": max}
_LAST = ("lr",)
_INTERNAL = ("skipped", "samples", "micro_batches", "tokens")


def merge_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of one step from those of its optimizer updates."""
    if not updates:
        return {"trained_tokens": 0.0}
    tokens = [u["tokens"] for u in updates]
    merged = {"trained_tokens": sum(tokens)}
    for name in updates[0]:
        values = [u[name] for u in updates]
        if name in _INTERNAL:
            continue
        if name in _EXTREMES:
            merged[name] = _EXTREMES[name](values)
        elif name in _LAST:
            merged[name] = values[-1]
        else:
            merged[name] = sum(v * t for v, t in zip(values, tokens, strict=True)) / sum(tokens)
    return merged
