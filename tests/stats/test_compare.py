"""The paired comparison: what is missing, what is refused, what never changes."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evo_hpc.stats import StatsError, avg_at_k, mean_interval, paired_bootstrap
from evo_hpc.stats.compare import PairedComparison

METHODS = ("t", "studentized", "bca", "percentile")
K = 4
binary_runs = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=K, max_size=K), min_size=3, max_size=12)


def by_task(runs: list[list[float]]) -> dict[str, list[float]]:
    return {f"t{index}": run for index, run in enumerate(runs)}


def compare(a: dict[str, list[float]], b: dict[str, list[float]], **options: object) -> PairedComparison:
    tasks = options.pop("tasks", sorted(set(a) | set(b)))
    return paired_bootstrap(a, b, **{"tasks": tasks, "k": K, "seed": 1, "draws": 2000, **options})


def random_runs(n: int, rate: float, seed: int) -> dict[str, list[float]]:
    drawn = np.random.default_rng(seed).random((n, K)) < rate
    return by_task(drawn.astype(float).tolist())


@pytest.mark.parametrize("method", METHODS)
def test_missing_rollouts_are_failures_and_are_counted(method: str) -> None:
    a = {"x": [1, 1, 1, 1], "y": [1, 0, 1, 0], "z": [0, 0, 0, 0]}
    b = {"x": [1, 1, 1], "z": [1, 1, 1, 1]}
    found = compare(a, b, tasks=["x", "y", "z"], method=method)
    assert (found.missing_a, found.missing_b, found.n_tasks) == (0, 5, 3)
    assert found.mean_a == pytest.approx(6 / 12) and found.mean_b == pytest.approx(7 / 12)
    filled = compare(a, {"x": [1, 1, 1, 0], "y": [0] * 4, "z": [1] * 4}, tasks=["x", "y", "z"], method=method)
    assert dataclasses.replace(found, missing_b=0) == filled


@pytest.mark.parametrize(
    ("a", "b", "tasks", "message"),
    [
        ({"x": [1]}, {"x": [1]}, ["x"], "no interval"),
        ({}, {}, [], "no tasks"),
        ({"x": [1]}, {"w": [1]}, ["x", "y"], "'w'"),
        ({"x": [1]}, {"x": [1]}, ["x", "x"], "listed twice"),
        ({"x": [1] * 5}, {"x": [1]}, ["x", "y"], "5 scores"),
        ({"x": [math.nan]}, {"x": [1]}, ["x", "y"], "not finite"),
        ({"x": [1]}, {}, ["x", "y"], "not one of 8"),
    ],
)
def test_what_cannot_be_compared_is_refused(a: dict, b: dict, tasks: list[str], message: str) -> None:
    with pytest.raises(StatsError, match=message):
        compare(a, b, tasks=tasks)


def test_too_few_draws_for_a_small_alpha_are_refused() -> None:
    a, b = random_runs(20, 0.4, 1), random_runs(20, 0.6, 2)
    with pytest.raises(StatsError, match="use >= 20000"):
        compare(a, b, method="percentile", alpha=0.001, draws=10_000)
    assert compare(a, b, method="t", alpha=0.001, draws=10_000).draws == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("gain", "p_value"), [(0, 1.0), (1, 2.0**-4), (-1, 2.0**-4)])
def test_equal_differences_give_zero_width_and_say_so(method: str, gain: int, p_value: float) -> None:
    low, high = [0.0] * K, [1.0] * K
    start, end = (low, high) if gain >= 0 else (high, low)
    a = {f"t{i}": start for i in range(5)}
    b = {f"t{i}": end if gain else start for i in range(5)}
    found = compare(a, b, method=method) if gain else compare(a | {"t0": high}, b | {"t0": high}, method=method)
    assert (found.ci_low, found.ci_high, found.p_value) == (gain, gain, p_value)
    assert found.degenerate and "zero width" in found.note


def test_thirds_that_differ_by_rounding_alone_are_equal() -> None:
    a = {"x": [0.1, 0.2, 0.0], "y": [0.3, 0.0, 0.0], "z": [0.0, 0.3, 0.0]}
    b = {"x": [0.3, 0.1, 0.2], "y": [0.2, 0.2, 0.2], "z": [0.6, 0.0, 0.0]}
    assert paired_bootstrap(a, b, tasks=list(a), k=3, seed=0).degenerate


@pytest.mark.parametrize("method", METHODS)
@given(runs_a=binary_runs, runs_b=binary_runs, shuffle=st.randoms(use_true_random=False))
def test_order_of_tasks_and_rollouts_does_not_matter(
    method: str, runs_a: list[list[float]], runs_b: list[list[float]], shuffle: random.Random
) -> None:
    n = min(len(runs_a), len(runs_b))
    a, b = by_task(runs_a[:n]), by_task(runs_b[:n])
    tasks = list(a)
    shuffle.shuffle(tasks)
    shuffled = {task: shuffle.sample(b[task], K) for task in tasks}
    first, second = compare(a, b, method=method), compare(a, shuffled, tasks=tasks, method=method)
    assert dataclasses.asdict(first) == pytest.approx(dataclasses.asdict(second), abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
@given(runs_a=binary_runs, runs_b=binary_runs)
def test_exchanging_the_versions_flips_the_signs(
    method: str, runs_a: list[list[float]], runs_b: list[list[float]]
) -> None:
    n = min(len(runs_a), len(runs_b))
    a, b = by_task(runs_a[:n]), by_task(runs_b[:n])
    forward, backward = compare(a, b, method=method), compare(b, a, method=method)
    assume(forward.difference != 0)
    assert backward.difference == -forward.difference
    assert (backward.ci_low, backward.ci_high) == (-forward.ci_high, -forward.ci_low)
    assert backward.p_value == forward.p_value


@pytest.mark.parametrize("method", METHODS)
@given(runs_a=binary_runs, runs_b=binary_runs, shift=st.integers(-3, 3), scale=st.sampled_from([0.5, 2.0, 4.0]))
def test_a_common_constant_drops_out_and_a_scale_scales(
    method: str, runs_a: list[list[float]], runs_b: list[list[float]], shift: int, scale: float
) -> None:
    n = min(len(runs_a), len(runs_b))
    a, b = by_task(runs_a[:n]), by_task(runs_b[:n])
    moved_a = {task: [scale * score + shift for score in run] for task, run in a.items()}
    moved_b = {task: [scale * score + shift for score in run] for task, run in b.items()}
    plain, moved = compare(a, b, method=method), compare(moved_a, moved_b, method=method)
    assert moved.difference == pytest.approx(scale * plain.difference, abs=1e-12)
    assert moved.ci_low == pytest.approx(scale * plain.ci_low, abs=1e-9)
    assert moved.ci_high == pytest.approx(scale * plain.ci_high, abs=1e-9)
    assert moved.p_value == pytest.approx(plain.p_value, abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
@given(runs_a=binary_runs, runs_b=binary_runs)
def test_nothing_is_ever_nan_and_the_interval_is_in_order(
    method: str, runs_a: list[list[float]], runs_b: list[list[float]]
) -> None:
    n = min(len(runs_a), len(runs_b))
    found = compare(by_task(runs_a[:n]), by_task(runs_b[:n]), method=method)
    assert found.ci_low <= found.ci_high
    assert 0 < found.p_value <= 1


def test_whole_tasks_are_resampled_not_rollouts() -> None:
    """Copying every rollout leaves the number of tasks, and so the interval, as it was."""
    a, b = random_runs(30, 0.4, 3), random_runs(30, 0.6, 4)
    copied_a, copied_b = ({task: run * 10 for task, run in side.items()} for side in (a, b))
    for method in METHODS:
        once = compare(a, b, method=method)
        often = compare(copied_a, copied_b, method=method, k=10 * K)
        assert (once.ci_low, once.ci_high) == pytest.approx((often.ci_low, often.ci_high))


def test_mean_interval_is_the_comparison_with_zero_and_is_cut_to_the_range() -> None:
    scores = random_runs(25, 0.5, 5)
    tasks = list(scores)
    found = mean_interval(scores, tasks=tasks, k=K, seed=1)
    zero = {task: [0.0] * K for task in tasks}
    against_zero = paired_bootstrap(zero, scores, tasks=tasks, k=K, seed=1)
    assert found.mean == avg_at_k(scores, tasks=tasks, k=K) == against_zero.difference
    assert (found.ci_low, found.ci_high) == (against_zero.ci_low, against_zero.ci_high)
    nearly_all = {"x": [1] * K, "y": [1] * K, "z": [1, 1, 1]}
    free = mean_interval(nearly_all, tasks=list(nearly_all), k=K, seed=1)
    cut = mean_interval(nearly_all, tasks=list(nearly_all), k=K, seed=1, bounds=(0.0, 1.0))
    assert free.missing == cut.missing == 1
    assert free.ci_high > 1.0 == cut.ci_high
    assert free.ci_low == cut.ci_low


def test_the_interval_of_a_difference_is_cut_to_what_it_can_be() -> None:
    tasks = [f"t{i}" for i in range(4)]
    a, b = {t: [0.0] for t in tasks}, {t: [float(i == 0)] for i, t in enumerate(tasks)}
    wide = paired_bootstrap(a, b, tasks=tasks, k=1, seed=0, method="studentized")
    cut = paired_bootstrap(a, b, tasks=tasks, k=1, seed=0, method="studentized", bounds=(-1.0, 1.0))
    assert wide.ci_high == float("inf") and cut.ci_high == 1.0 and cut.p_value == wide.p_value and cut.excludes_zero == wide.excludes_zero
