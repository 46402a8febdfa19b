"""From rollout scores to one mean a task: what is missing counts as a failure and is counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evo_hpc.errors import UserError

Scores = Mapping[str, Sequence[float]]
"""Scores of one version's rollouts by task id."""


class StatsError(UserError):
    """A statistic cannot be computed from what was given."""


@dataclass(frozen=True)
class TaskMeans:
    """Mean score of each expected task over exactly k rollouts, shape [n_tasks], and how many rollouts were missing."""

    values: np.ndarray
    missing: int


def task_means(scores: Scores, *, tasks: Sequence[str], k: int, side: str = "scores") -> TaskMeans:
    """Mean over k rollouts of each task of `tasks`, in that order; an absent rollout or task scores 0 and is counted.

    Raises StatsError where a task is unexpected or has more than k scores, a score is not finite, or there is no score
    at all (that is a broken evaluation, not a model that fails everywhere).
    """
    if k < 1:
        raise StatsError(f"k must be at least 1, not {k}")
    if not tasks:
        raise StatsError("no tasks: an estimate needs at least two")
    expected = set(tasks)
    if len(expected) != len(tasks):
        raise StatsError(f"{len(tasks) - len(expected)} task ids are listed twice; give each task once")
    if unexpected := sorted(set(scores) - expected):
        raise StatsError(f"{side}: {len(unexpected)} tasks are not among the expected ones, e.g. {unexpected[0]!r}")
    values = np.zeros(len(tasks))
    present = 0
    for index, task in enumerate(tasks):
        own = scores.get(task, ())
        if len(own) > k:
            raise StatsError(f"{side}: task {task!r} has {len(own)} scores and k is {k}; were two runs mixed?")
        # fsum is exact, so the order of the rollouts cannot change a tie between two tasks.
        values[index] = math.fsum(own) / k
        present += len(own)
    if not np.isfinite(values).all():
        raise StatsError(f"{side}: task {tasks[int(np.argmin(np.isfinite(values)))]!r} has a score that is not finite")
    if present == 0:
        raise StatsError(f"{side}: not one of {len(tasks) * k} expected rollouts is there; evaluate again")
    return TaskMeans(values, len(tasks) * k - present)


def avg_at_k(scores: Scores, *, tasks: Sequence[str], k: int) -> float:
    """Avg@k: the mean over tasks of the mean score of k rollouts, missing ones 0. Raises StatsError like task_means."""
    return float(task_means(scores, tasks=tasks, k=k).values.mean())
