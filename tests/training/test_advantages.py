"""Advantages by hand, and what holds of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.training.advantages import group_advantages, zero_variance

GROUPS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=16).map(np.array)
KINDS = ("group_norm", "group_mean", "leave_one_out")


def test_by_hand():
    rewards = np.array([1.0, 0, 0, 0])  # mean 0.25, std with G - 1 = 0.5
    np.testing.assert_allclose(group_advantages(rewards, "group_norm"), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_array_equal(group_advantages(rewards, "group_mean"), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_advantages(rewards, "leave_one_out"), [1.0, -1 / 3, -1 / 3, -1 / 3], rtol=1e-12)
    np.testing.assert_allclose(group_advantages(rewards, "group_norm", clip=1.0), [1.0, -0.5, -0.5, -0.5], rtol=1e-5)


@given(GROUPS)
def test_leave_one_out_compares_with_the_others(rewards):
    expected = [reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)]
    np.testing.assert_allclose(group_advantages(rewards, "leave_one_out"), expected if not zero_variance(rewards) else 0.0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exactly_zero(kind):
    rewards = np.full(7, 0.1)  # whose mean is not exactly 0.1
    assert zero_variance(rewards)
    assert group_advantages(rewards, kind).tolist() == [0.0] * 7


def test_a_tiny_difference_is_not_zero_variance():
    assert not zero_variance(np.array([0.1, np.nextafter(0.1, 1)]))


@given(GROUPS, st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards, shift):
    for kind in KINDS:
        advantages = group_advantages(rewards, kind)
        assert abs(advantages.sum()) < 1e-6 * (1 + np.abs(advantages).sum())
        if not zero_variance(rewards) and not zero_variance(rewards + shift):
            np.testing.assert_allclose(group_advantages(rewards + shift, kind), advantages, atol=1e-6, rtol=1e-6)


@given(GROUPS, st.floats(0.5, 100))
def test_group_norm_ignores_the_scale_of_rewards(rewards, scale):
    if not zero_variance(rewards):
        expected = group_advantages(rewards, "group_norm")
        np.testing.assert_allclose(group_advantages(rewards * scale, "group_norm"), expected, rtol=5e-3)


@given(GROUPS, st.floats(0.1, 3))
def test_the_bound_is_one(rewards, clip):
    for kind in KINDS:
        assert np.abs(group_advantages(rewards, kind, clip)).max() <= clip
