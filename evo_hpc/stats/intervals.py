"""Confidence interval and p-value of a mean over independent clusters, by resampling clusters or by Student's t.

Every function takes the distinct values and how often each occurs. Drawing n clusters with replacement is drawing the
counts of the distinct values from a multinomial: the same distribution, and far fewer random numbers where tasks take
few values (scores of k rollouts do).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from evo_hpc.stats.scores import StatsError

Method = Literal["t", "studentized", "bca", "percentile"]
_CHUNK = 2**21
_MIN_TAIL_DRAWS = 10
_ROUND = 12
_TIE = 10.0**-_ROUND


@dataclass(frozen=True)
class Interval:
    """An interval for a mean, with the two-sided p-value of "the mean is 0" that the same method gives."""

    low: float
    high: float
    p_value: float
    note: str = ""


def mean_confidence(
    values: np.ndarray, *, method: Method, draws: int, alpha: float, rng: np.random.Generator
) -> Interval:
    """Two-sided 1 - alpha interval for the mean of `values` [n_clusters], n >= 2, independent of their order.

    `t`: mean +- t * s / sqrt(n), no draws. `studentized`: bootstrap-t (Efron & Tibshirani 1993, section 12.5). `bca`:
    bias-corrected and accelerated (section 14.3). `percentile`: section 13.3. Where all values are equal, the interval
    has zero width at that value, the p-value is that of the exact sign-flip test, and the note says so. Raises
    StatsError for n < 2, alpha outside (0, 1), and draws too few for the tail asked for.
    """
    n = len(values)
    if n < 2:
        raise StatsError(f"{n} task gives no interval: the spread between tasks is unknown; use at least two")
    if not 0 < alpha < 1:
        raise StatsError(f"alpha lies in (0, 1), not {alpha}")
    if method != "t" and draws * alpha / 2 < _MIN_TAIL_DRAWS:
        needed = int(np.ceil(2 * _MIN_TAIL_DRAWS / alpha))
        raise StatsError(f"{draws} draws leave too few in the tails of alpha {alpha:.2g}; use >= {needed}")
    # Differences of equal fractions of k must count as one value; rounding is far below any real difference.
    distinct, counts = np.unique(np.round(values, _ROUND) + 0.0, return_counts=True)
    if len(distinct) == 1:
        value = float(distinct[0])
        p_value = 1.0 if value == 0 else float(2.0 ** (1 - n))
        return Interval(value, value, p_value, f"all {n} tasks give {value:g}: zero width, no spread seen")
    # Computed for the orientation with the larger mean and mirrored, so that exchanging two versions only flips signs.
    flip = _mean(distinct, counts) < 0
    if flip:
        distinct, counts = -distinct[::-1], counts[::-1]
    found = _METHODS[method](distinct, counts, draws, alpha, rng)
    return Interval(-found.high, -found.low, found.p_value, found.note) if flip else found


def _mean(distinct: np.ndarray, counts: np.ndarray) -> float:
    return float(counts @ distinct / counts.sum())


def _variance(distinct: np.ndarray, counts: np.ndarray) -> float:
    """Unbiased variance over clusters."""
    return float(counts @ (distinct - _mean(distinct, counts)) ** 2 / (counts.sum() - 1))


def resampled_counts(counts: np.ndarray, draws: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each distinct value occurs in each resample of all clusters: int [chunk, n_distinct], draws in all."""
    total = int(counts.sum())
    chunk = max(1, _CHUNK // len(counts))
    for start in range(0, draws, chunk):
        yield rng.multinomial(total, counts / total, size=min(chunk, draws - start))


def _resampled_means(distinct: np.ndarray, counts: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    means = [rows @ distinct for rows in resampled_counts(counts, draws, rng)]
    return np.sort(np.concatenate(means) / counts.sum())


def _student_t(
    distinct: np.ndarray, counts: np.ndarray, draws: int, alpha: float, rng: np.random.Generator
) -> Interval:
    n, mean = int(counts.sum()), _mean(distinct, counts)
    error = np.sqrt(_variance(distinct, counts) / n)
    half = float(stdtrit(n - 1, 1 - alpha / 2) * error)
    return Interval(mean - half, mean + half, float(2 * stdtr(n - 1, -abs(mean / error))))


def _percentile(
    distinct: np.ndarray, counts: np.ndarray, draws: int, alpha: float, rng: np.random.Generator
) -> Interval:
    means = _resampled_means(distinct, counts, draws, rng)
    low, high = np.quantile(means, [alpha / 2, 1 - alpha / 2])
    return Interval(float(low), float(high), _two_sided(np.sum(means <= _TIE), np.sum(means >= -_TIE), draws))


def _bca(distinct: np.ndarray, counts: np.ndarray, draws: int, alpha: float, rng: np.random.Generator) -> Interval:
    mean = _mean(distinct, counts)
    means = _resampled_means(distinct, counts, draws, rng)
    bias = ndtri(_share_below(means, mean))
    deviations = distinct - mean
    # The jackknife's skewness; for a mean it is the sample's own.
    acceleration = float(counts @ deviations**3 / (6 * (counts @ deviations**2) ** 1.5))

    def corrected(level: float) -> float:
        shifted = bias + ndtri(level)
        return float(ndtr(bias + shifted / (1 - acceleration * shifted)))

    low, high = np.quantile(means, [corrected(alpha / 2), corrected(1 - alpha / 2)])
    # The level whose lower end point is 0 (the mean is not negative here): the same formula solved for the level.
    shifted = ndtri(_inside(np.mean(means <= _TIE), draws)) - bias
    level = float(ndtr(shifted / (1 + acceleration * shifted) - bias))
    return Interval(float(low), float(high), min(1.0, 2 * level))


def _studentized(
    distinct: np.ndarray, counts: np.ndarray, draws: int, alpha: float, rng: np.random.Generator
) -> Interval:
    n, mean = int(counts.sum()), _mean(distinct, counts)
    error = np.sqrt(_variance(distinct, counts) / n)
    pivots = []
    for rows in resampled_counts(counts, draws, rng):
        centres = rows @ distinct / n
        squares = np.maximum(rows @ distinct**2 / n - centres**2, 0.0) * n / (n - 1)
        squares[rows.max(axis=1) == n] = 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            # A resample of one value has no spread: it lies infinitely far out on its side, or exactly on the mean.
            chunk = (centres - mean) / np.sqrt(squares / n)
        pivots.append(np.where(np.isnan(chunk), 0.0, chunk))
    pivot = np.sort(np.concatenate(pivots))
    low_pivot, high_pivot = np.quantile(pivot, [alpha / 2, 1 - alpha / 2], method="inverted_cdf")
    observed = mean / error
    p_value = _two_sided(np.sum(pivot >= observed), np.sum(pivot <= observed), draws)
    return Interval(float(mean - high_pivot * error), float(mean - low_pivot * error), p_value)


def _share_below(sorted_means: np.ndarray, value: float) -> float:
    """Share of resampled means below `value`, ties half."""
    below = np.searchsorted(sorted_means, value - _TIE, side="left")
    up_to = np.searchsorted(sorted_means, value + _TIE, side="right")
    return _inside((below + up_to) / (2 * len(sorted_means)), len(sorted_means))


def _inside(share: float, draws: int) -> float:
    """Keeps a share of draws inside (0, 1) by half a draw, so that its normal quantile is finite."""
    return float(np.clip(share, 0.5 / draws, 1 - 0.5 / draws))


def _two_sided(one: int, other: int, draws: int) -> float:
    """Twice the smaller tail, the observed sample counted among the draws (Davison & Hinkley 1997, section 4.2)."""
    return float(min(1.0, 2 * (min(one, other) + 1) / (draws + 1)))


_METHODS = {"t": _student_t, "studentized": _studentized, "bca": _bca, "percentile": _percentile}
