"""The loss of each token against the papers' formulas in float64, one sequence at a time; and by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config import recipe
from evo_hpc.training.objective import Sequences, kl_estimate, token_terms
from tests.training.reference import sequence_loss

PLAIN = recipe.Optimizer(clip_low=0.2, clip_high=0.3, kl_coef=0.0)
LENGTHS = (1, 5, 2, 9)
CASES = [
    recipe.Optimizer(ratio=ratio, dual_clip=dual, kl=kl, clip_low=low, clip_high=high, kl_coef=0.3)
    for (ratio, low, high), dual, kl in itertools.product((("token", 0.1, 0.15), ("sequence", 0.02, 0.03)), (None, 1.01), ("k1", "k2", "k3"))
]


@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.ratio}-{c.dual_clip}-{c.kl}")
def test_values_and_gradients_are_those_of_the_formulas(config):
    generator = torch.Generator().manual_seed(5)
    def normal(scale):
        return torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64) * scale

    old = -normal(1.0).abs() - 0.1
    logprob, ref = (old + normal(0.3)).requires_grad_(), old + normal(0.3)
    advantages = [1.0, -2.0, 0.5, -0.7]
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    terms = token_terms(logprob, old, ref, torch.tensor(advantages, dtype=torch.float64)[index], config, Sequences(index, len(LENGTHS)))
    (gradient,) = torch.autograd.grad((terms.surrogate + config.kl_coef * terms.kl).sum(), logprob)
    expected, reported = [], []
    for o, l, r, a in zip(old.split(LENGTHS), logprob.split(LENGTHS), ref.split(LENGTHS), advantages, strict=True):
        loss, told = sequence_loss(l, o, r, None, torch.zeros_like(l), a, config)
        expected.append(loss)
        reported.append(told)
    (wanted,) = torch.autograd.grad(torch.cat(expected).sum(), logprob)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    got = torch.stack([terms.surrogate, terms.kl, torch.zeros_like(terms.kl), terms.hit_low, terms.hit_high]).detach()
    torch.testing.assert_close(got, torch.cat(reported, 1).double(), rtol=1e-12, atol=1e-12)
    assert terms.hit_low.any() and terms.hit_high.any() and (config.dual_clip is None or terms.hit_dual.any())


def test_clip_acts_only_where_it_lowers_the_objective():
    ratio = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.05])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    logprob = torch.log(ratio).requires_grad_()
    terms = token_terms(logprob, torch.zeros(5), None, advantage, PLAIN)
    torch.testing.assert_close(terms.surrogate, torch.tensor([-0.5, 0.8, -1.3, 2.0, -1.05]))
    assert terms.hit_low.tolist() == [False, True, False, False, False]
    assert terms.hit_high.tolist() == [False, False, True, False, False]
    terms.surrogate.sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([-0.5, 0.0, 0.0, 2.0, -1.05]))


def test_the_dual_clip_bounds_what_a_bad_token_may_cost():
    logprob = torch.log(torch.tensor([10.0, 10.0, 2.0])).requires_grad_()
    terms = token_terms(logprob, torch.zeros(3), None, torch.tensor([-1.0, 1.0, -1.0]), PLAIN.model_copy(update={"dual_clip": 3.0}))
    torch.testing.assert_close(terms.surrogate, torch.tensor([3.0, -1.3, 2.0]))
    assert terms.hit_dual.tolist() == [True, False, False]
    terms.surrogate.sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([0.0, 0.0, 2.0]))


def test_a_sequence_has_one_ratio_and_every_token_a_share_in_its_gradient():
    old, index = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    logprob = torch.tensor([0.1, -0.3, 0.2, 0.2], requires_grad=True)
    config = PLAIN.model_copy(update={"ratio": "sequence", "clip_low": 0.9, "clip_high": 0.9})
    terms = token_terms(logprob, old, None, torch.ones(4), config, Sequences(index, 2))
    torch.testing.assert_close(terms.ratio, torch.exp(torch.tensor([-0.1, -0.1, 0.2, 0.2])))
    terms.surrogate.sum().backward()
    torch.testing.assert_close(logprob.grad, -torch.exp(torch.tensor([-0.1, -0.1, 0.2, 0.2])))


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_without_old_logprobs_the_gradient_is_minus_the_advantage(ratio):
    logprob = torch.tensor([-0.3, -2.0], requires_grad=True)
    config = PLAIN.model_copy(update={"ratio": ratio})
    terms = token_terms(logprob, None, None, torch.tensor([2.0, -1.0]), config, Sequences(torch.tensor([0, 1]), 2))
    assert terms.ratio.tolist() == [1.0, 1.0]
    terms.surrogate.sum().backward()
    assert logprob.grad.tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_kl_is_estimated_without_bias(kind):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    assert (p * kl_estimate(p.log(), q.log(), kind)).sum() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-6)


def test_k2_has_the_gradient_of_the_kl():
    """On average over tokens of p, which k1's has not: that is zero."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0)
    p = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (k2,) = torch.autograd.grad((p.exp().detach() * kl_estimate(p, q, "k2")).sum(), logits, retain_graph=True)
    (k1,) = torch.autograd.grad((p.exp().detach() * kl_estimate(p, q, "k1")).sum(), logits)
    torch.testing.assert_close(k2, exact)
    torch.testing.assert_close(k1, torch.zeros(3, dtype=torch.float64))


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k2_and_k3_are_never_negative(p, q):
    for kind in ("k2", "k3"):
        assert kl_estimate(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64), kind) >= -1e-12
