"""pass@k against enumeration, and the alpha of a sequence of looks."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.stats import StatsError, alpha_for_look, avg_at_k, pass_at_k, pass_at_k_of


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k_of(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_over_tasks() -> None:
    scores = {"x": [1.0, 0.0, 0.5, 1.0], "y": [0.0, 0.0]}
    tasks = ["x", "y", "z"]
    assert pass_at_k(scores, tasks=tasks, n=4, k=1) == pytest.approx(2 / 4 / 3)
    assert pass_at_k(scores, tasks=tasks, n=4, k=3) == pytest.approx(1 / 3)
    assert pass_at_k(scores, tasks=tasks, n=4, k=1, threshold=0.5) == pytest.approx(3 / 4 / 3)
    whole = {"x": [1.0, 0.0, 0.0, 1.0], "y": [0.0] * 4, "z": [1.0] * 4}
    assert pass_at_k(whole, tasks=tasks, n=4, k=1) == pytest.approx(avg_at_k(whole, tasks=tasks, k=4))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)])
def test_impossible_counts_are_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(StatsError, match="pass@k needs"):
        pass_at_k_of(n, correct, k)


def test_looks_spend_alpha_and_no_more() -> None:
    spent = math.fsum(alpha_for_look(i, 0.05) for i in range(1, 20_001))
    assert 0.05 * (1 - 1e-4) < spent < 0.05
    assert alpha_for_look(1, 0.05) == pytest.approx(0.05 * 6 / math.pi**2)


@pytest.mark.parametrize(("i", "alpha"), [(0, 0.05), (1, 0.0), (1, 1.0)])
def test_a_look_outside_the_sequence_is_refused(i: int, alpha: float) -> None:
    with pytest.raises(StatsError):
        alpha_for_look(i, alpha)
