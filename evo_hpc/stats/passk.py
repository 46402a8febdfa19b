"""pass@k: the chance that at least one of k rollouts is right, estimated without bias from n >= k."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evo_hpc.stats.scores import Scores, StatsError, task_means


def pass_at_k_of(n: int, correct: int, k: int) -> float:
    """1 - C(n - correct, k) / C(n, k), exact integer binomials (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises StatsError unless 0 <= correct <= n and 1 <= k <= n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise StatsError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, not n={n}, correct={correct}, k={k}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_at_k(scores: Scores, *, tasks: Sequence[str], n: int, k: int, threshold: float = 1.0) -> float:
    """Mean over tasks of pass@k from n rollouts each; right means score >= threshold, a missing rollout is wrong.

    Raises StatsError as task_means and pass_at_k_of do.
    """
    task_means(scores, tasks=tasks, k=n)
    right = (sum(score >= threshold for score in scores.get(task, ())) for task in tasks)
    return math.fsum(pass_at_k_of(n, count, k) for count in right) / len(tasks)
