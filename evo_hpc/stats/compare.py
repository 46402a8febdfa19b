"""Compares two versions on the same tasks, and gives one version's Avg@k with its interval; tasks are the clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evo_hpc.stats.intervals import Method, mean_confidence
from evo_hpc.stats.scores import Scores, task_means

DEFAULT_METHOD: Method = "t"
DRAWS = 10_000


@dataclass(frozen=True)
class PairedComparison:
    """How version b differs from version a on the same tasks, k rollouts each; missing rollouts scored 0."""

    n_tasks: int
    k: int
    mean_a: float
    mean_b: float
    difference: float
    """mean_b - mean_a."""
    ci_low: float
    ci_high: float
    alpha: float
    p_value: float
    """Two-sided, by the same method as the interval."""
    method: Method
    missing_a: int
    """Rollouts of a that were not there, of n_tasks * k."""
    missing_b: int
    draws: int
    """Resamples drawn; 0 for a method without resampling."""
    seed: int
    degenerate: bool
    """All task differences are equal, so the interval has zero width and says nothing about the spread."""
    note: str

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.ci_low > 0 or self.ci_high < 0


@dataclass(frozen=True)
class MeanEstimate:
    """Avg@k of one version with its task-clustered interval; missing rollouts scored 0."""

    n_tasks: int
    k: int
    mean: float
    ci_low: float
    ci_high: float
    alpha: float
    method: Method
    missing: int
    draws: int
    seed: int
    degenerate: bool
    note: str


def paired_bootstrap(
    a: Scores,
    b: Scores,
    *,
    tasks: Sequence[str],
    k: int,
    draws: int = DRAWS,
    alpha: float = 0.05,
    seed: int,
    method: Method = DEFAULT_METHOD,
    bounds: tuple[float, float] | None = None,
) -> PairedComparison:
    """The difference b - a in Avg@k with a 1 - alpha interval over tasks: whole tasks are resampled, never rollouts.

    `tasks` lists every expected task id; what a or b lacks of its k rollouts counts as failed. The result does not
    depend on the order of tasks or rollouts, and exchanging a and b flips its signs. Methods: see mean_confidence. The
    interval is cut to `bounds`, the range of a difference, where given (few tasks can make it reach to infinity).
    Raises StatsError as task_means and mean_confidence do.
    """
    means_a = task_means(a, tasks=tasks, k=k, side="a")
    means_b = task_means(b, tasks=tasks, k=k, side="b")
    differences = means_b.values - means_a.values
    interval = mean_confidence(differences, method=method, draws=draws, alpha=alpha, rng=np.random.default_rng(seed))
    low, high = bounds if bounds is not None else (-np.inf, np.inf)
    mean_a, mean_b = float(means_a.values.mean()), float(means_b.values.mean())
    return PairedComparison(
        n_tasks=len(tasks), k=k, mean_a=mean_a, mean_b=mean_b, difference=mean_b - mean_a,
        ci_low=max(interval.low, low), ci_high=min(interval.high, high), alpha=alpha, p_value=interval.p_value, method=method,
        missing_a=means_a.missing, missing_b=means_b.missing, draws=0 if method == "t" else draws, seed=seed,
        degenerate=bool(interval.note), note=interval.note,
    )


def mean_interval(
    scores: Scores,
    *,
    tasks: Sequence[str],
    k: int,
    draws: int = DRAWS,
    alpha: float = 0.05,
    seed: int,
    method: Method = DEFAULT_METHOD,
    bounds: tuple[float, float] | None = None,
) -> MeanEstimate:
    """Avg@k of one version with a 1 - alpha interval over tasks, cut to `bounds` (a score's range) where given.

    Raises StatsError as task_means and mean_confidence do.
    """
    means = task_means(scores, tasks=tasks, k=k)
    interval = mean_confidence(means.values, method=method, draws=draws, alpha=alpha, rng=np.random.default_rng(seed))
    low, high = bounds if bounds is not None else (-np.inf, np.inf)
    return MeanEstimate(
        n_tasks=len(tasks), k=k, mean=float(means.values.mean()), ci_low=max(interval.low, low),
        ci_high=min(interval.high, high), alpha=alpha, method=method, missing=means.missing,
        draws=0 if method == "t" else draws, seed=seed, degenerate=bool(interval.note), note=interval.note,
    )
