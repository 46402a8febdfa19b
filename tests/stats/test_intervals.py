"""Intervals against scipy's own, their coverage, and their cost."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.special import expit

from evo_hpc.stats.intervals import mean_confidence

K = 8


def differences(rng: np.random.Generator, n: int, effect: float) -> np.ndarray:
    """Differences in Avg@8 of n tasks from a suite of easy, hopeless and middling tasks."""
    ability = rng.choice([-4.0, 0.0, 4.0], p=[0.45, 0.3, 0.25], size=n) + rng.normal(0, 1, n)
    after = expit(ability + effect + rng.normal(0, 0.7, n))
    return (rng.binomial(K, after) - rng.binomial(K, expit(ability))) / K


@pytest.mark.parametrize(("method", "scipy_name"), [("percentile", "percentile"), ("bca", "BCa")])
@pytest.mark.parametrize("n", [18, 77])
def test_resampled_intervals_are_those_of_scipy(method: str, scipy_name: str, n: int) -> None:
    values = differences(np.random.default_rng(n), n, 0.8)
    draws = 40_000
    ours = mean_confidence(values, method=method, draws=draws, alpha=0.05, rng=np.random.default_rng(1))
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=draws, confidence_level=0.95, method=scipy_name, vectorized=True, batch=4000,
        rng=np.random.default_rng(2),
    )
    # Monte-Carlo error of an end point: sqrt(q (1 - q) / draws) / density, about 0.013 standard errors here.
    # The means lie on a lattice of 1 / (K n), so that the error may become one whole step.
    tolerance = 6 * 0.013 * theirs.standard_error + 1.001 / (K * n)
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=tolerance)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=tolerance)


def test_student_t_is_that_of_scipy() -> None:
    values = differences(np.random.default_rng(3), 30, 0.8)
    ours = mean_confidence(values, method="t", draws=0, alpha=0.01, rng=np.random.default_rng(0))
    theirs = scipy_stats.ttest_1samp(values, 0.0)
    interval = theirs.confidence_interval(0.99)
    assert (ours.low, ours.high, ours.p_value) == pytest.approx((interval.low, interval.high, theirs.pvalue))


@pytest.mark.parametrize("method", ["t", "studentized", "bca", "percentile"])
def test_interval_and_p_value_agree_on_zero(method: str) -> None:
    """The interval excludes 0 exactly when p <= alpha, but for draws right at the boundary."""
    disagreements = 0
    for seed in range(300):
        values = differences(np.random.default_rng(seed), 40, 0.45)
        found = mean_confidence(values, method=method, draws=2000, alpha=0.05, rng=np.random.default_rng(seed))
        excludes = found.low > 0 or found.high < 0
        disagreements += excludes != (found.p_value <= 0.05)
    assert disagreements <= (0 if method == "t" else 6)


def test_the_default_covers_and_the_percentile_interval_covers_less() -> None:
    """Coverage of the population's difference at 30 tasks; 1,200 suites put the standard error at 0.6 points."""
    population = differences(np.random.default_rng(0), 2_000_000, 0.6).mean()
    suites, covered = 1200, {"t": 0, "percentile": 0}
    for seed in range(suites):
        values = differences(np.random.default_rng([1, seed]), 30, 0.6)
        for method in covered:
            found = mean_confidence(values, method=method, draws=1000, alpha=0.05, rng=np.random.default_rng(seed))
            covered[method] += found.low <= population <= found.high
    assert 0.93 <= covered["t"] / suites <= 0.975
    assert covered["percentile"] < covered["t"]


def test_drawing_counts_costs_far_less_than_drawing_tasks() -> None:
    n, draws = 5000, 2000
    values = differences(np.random.default_rng(0), n, 0.5)
    rng = np.random.default_rng(0)

    def gather() -> None:
        np.quantile(values[rng.integers(0, n, (draws, n))].mean(axis=1), [0.025, 0.975])

    def best_of(function: object, times: int) -> float:
        spent = []
        for _ in range(times):
            start = time.perf_counter()
            function()
            spent.append(time.perf_counter() - start)
        return min(spent)

    ours = best_of(lambda: mean_confidence(values, method="percentile", draws=draws, alpha=0.05, rng=rng), 5)
    assert ours < best_of(gather, 3) / 5


def test_many_distinct_values_are_drawn_in_bounded_pieces() -> None:
    values = np.random.default_rng(0).normal(0.3, 1.0, 3000)
    found = mean_confidence(values, method="percentile", draws=1500, alpha=0.05, rng=np.random.default_rng(1))
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.25 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.25 * error)
