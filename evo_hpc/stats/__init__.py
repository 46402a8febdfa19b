"""Statistics over tasks: paired comparison, Avg@k with its interval, pass@k, alpha for a sequence of looks."""

from __future__ import annotations

from evo_hpc.stats.compare import MeanEstimate, PairedComparison, mean_interval, paired_bootstrap
from evo_hpc.stats.looks import alpha_for_look
from evo_hpc.stats.passk import pass_at_k, pass_at_k_of
from evo_hpc.stats.scores import StatsError, avg_at_k

__all__ = [
    "MeanEstimate",
    "PairedComparison",
    "StatsError",
    "alpha_for_look",
    "avg_at_k",
    "mean_interval",
    "paired_bootstrap",
    "pass_at_k",
    "pass_at_k_of",
]
