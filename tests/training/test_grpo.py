from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.training.grpo import group_advantages, k3, token_terms, zero_variance

GROUPS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=16).map(np.array)


def test_group_norm_by_hand():
    # mean 0.25, std with G - 1 = 0.5
    np.testing.assert_allclose(
        group_advantages(np.array([1.0, 0, 0, 0]), "group_norm"), [1.5, -0.5, -0.5, -0.5], rtol=1e-5
    )


def test_group_mean_by_hand():
    np.testing.assert_array_equal(group_advantages(np.array([1.0, 0, 0, 0]), "group_mean"), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("kind", ["group_norm", "group_mean"])
def test_equal_rewards_give_exactly_zero(kind):
    rewards = np.full(7, 0.1)  # whose mean is not exactly 0.1
    assert zero_variance(rewards)
    assert group_advantages(rewards, kind).tolist() == [0.0] * 7


def test_a_tiny_difference_is_not_zero_variance():
    assert not zero_variance(np.array([0.1, np.nextafter(0.1, 1)]))


@given(GROUPS, st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards, shift):
    for kind in ("group_norm", "group_mean"):
        advantages = group_advantages(rewards, kind)
        assert abs(advantages.sum()) < 1e-6 * (1 + np.abs(advantages).sum())
        if not zero_variance(rewards) and not zero_variance(rewards + shift):
            np.testing.assert_allclose(group_advantages(rewards + shift, kind), advantages, atol=1e-6, rtol=1e-6)


@given(GROUPS, st.floats(0.5, 100))
def test_group_norm_ignores_the_scale_of_rewards(rewards, scale):
    if not zero_variance(rewards):
        expected = group_advantages(rewards, "group_norm")
        np.testing.assert_allclose(group_advantages(rewards * scale, "group_norm"), expected, rtol=5e-3)


def test_clip_acts_only_where_it_lowers_the_objective():
    ratio = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.05])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    logprob = torch.log(ratio).requires_grad_()
    terms = token_terms(logprob, torch.zeros(5), None, advantage, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(terms.surrogate, torch.tensor([-0.5, 0.8, -1.3, 2.0, -1.05]))
    assert terms.hit_low.tolist() == [False, True, False, False, False]
    assert terms.hit_high.tolist() == [False, False, True, False, False]
    terms.surrogate.sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([-0.5, 0.0, 0.0, 2.0, -1.05]))


def test_without_old_logprobs_the_gradient_is_minus_the_advantage():
    logprob = torch.tensor([-0.3, -2.0], requires_grad=True)
    terms = token_terms(logprob, None, None, torch.tensor([2.0, -1.0]), clip_low=0.2, clip_high=0.2)
    assert terms.ratio.tolist() == [1.0, 1.0]
    terms.loss(0.0).sum().backward()
    assert logprob.grad.tolist() == [-2.0, 1.0]


def test_k3_is_an_unbiased_estimate_of_the_kl():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    assert (p * k3(p.log(), q.log())).sum() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-6)


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative(p, q):
    assert k3(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)) >= -1e-12


def test_kl_coef_zero_leaves_the_reference_out_of_the_loss():
    terms = token_terms(
        torch.tensor([-1.0]), None, torch.tensor([-90.0]), torch.tensor([1.0]), clip_low=0.2, clip_high=0.2
    )
    assert terms.kl.item() > 50 and terms.loss(0.0).item() == -1.0
    assert terms.loss(0.5).item() == pytest.approx(-1.0 + 0.5 * terms.kl.item())
