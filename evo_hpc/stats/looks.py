"""The alpha that each look at dev may spend, declared before the first look."""

from __future__ import annotations

import math

from evo_hpc.stats.scores import StatsError


def alpha_for_look(i: int, alpha: float) -> float:
    """Alpha of the i-th look, counted from 1: 6 alpha / (pi^2 i^2), which sums to alpha over infinitely many looks.

    Raises StatsError for i < 1 or alpha outside (0, 1).
    """
    if i < 1 or not 0 < alpha < 1:
        raise StatsError(f"a look is counted from 1 and alpha lies in (0, 1), not look {i}, alpha {alpha}")
    return 6 * alpha / (math.pi**2 * i**2)
