from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from evo_hpc.config import recipe
from evo_hpc.training import hf_weights
from evo_hpc.training.errors import NonFiniteError, SampleError, TrainingError
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy, Sample
from evo_hpc.training.steps import grpo_step, supervised_step
from evo_hpc.training.weighting import corrected, normalised
from tests.training.reference import Reference, off_policy, worst

CONFIG = recipe.Optimizer(lr=1e-3, weight_decay=0.1, grad_clip=0.1, kl_coef=0.05, clip_low=0.1, clip_high=0.15)


def build(folder, config=CONFIG, budget=64):
    policy = Policy.from_hf(folder, trainable=True, token_budget=budget)
    return policy, Optimizer(policy, config)


def gradients(policy):
    return hf_weights.export_state(policy.module, policy.shape, lambda parameter: parameter.main_grad)


def assert_same_update(policy, reference):
    expected = reference.gradients()
    assert worst(gradients(policy), expected) < 1e-6
    # Adam's first step is lr * sign(g): where g is rounding noise its sign is not comparable
    got, want = policy.export_state(), reference.state()
    assert max((got[n] - want[n])[expected[n].abs() > 1e-6].abs().max().item() for n in want) < 1e-6


def test_logprobs_are_those_of_transformers(model_folder, samples):
    batch = samples(7, seed=2)
    reference = Reference(model_folder, CONFIG)
    scored = Policy.from_hf(model_folder, trainable=False, token_budget=50).logprobs(batch, temperature=0.7)
    for sample, values in zip(batch, scored, strict=True):
        assert values.dtype == np.float32 and len(values) == len(sample) and values[0] == 0.0
        with torch.no_grad():
            expected, _ = reference.logprobs(sample, 0.7)
        np.testing.assert_allclose(values[1:], expected.numpy(), atol=2e-5)


def test_a_one_token_sample_scores_nothing(tied_folder):
    policy = Policy.from_hf(tied_folder, trainable=False, token_budget=64)
    scored = policy.logprobs([Sample([3], [0]), Sample([3, 4], [0, 1])], temperature=1.0)
    assert scored[0].tolist() == [0.0] and scored[1][1] < 0


def test_grpo_update_is_that_of_plain_torch(model_folder, samples):
    policy, optimizer = build(model_folder)
    raw = samples(9, seed=3)
    batch = off_policy(raw, policy.logprobs(raw, temperature=0.8), spread=0.2, seed=4)
    reference = Reference(model_folder, CONFIG)
    metrics, expected = grpo_step(policy, optimizer, batch, CONFIG, temperature=0.8), reference.grpo_step(batch, 0.8)
    assert expected["clip_fraction_low"] > 0.05 and expected["clip_fraction_high"] > 0.05
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert metrics["grad_clipped"] == 1.0
    assert_same_update(policy, reference)


@pytest.mark.parametrize("changes", [
    {"ratio": "sequence", "loss": "sequence_mean", "clip_low": 0.01, "clip_high": 0.02},
    {"loss": "constant", "dual_clip": 1.2},
    {"loss": "sequence_mean", "entropy_coef": 0.3, "kl": "k2"},
    {"importance": "truncated", "importance_high": 1.1, "kl": "k1"},
    {"importance": "truncated", "importance_level": "sequence", "entropy_coef": 0.1, "kl_coef": 0.0},
], ids=lambda changes: "-".join(map(str, changes)))
@pytest.mark.parametrize("budget", [24, 4096])
def test_each_option_is_that_of_plain_torch_whatever_the_split(model_folder, samples, changes, budget):
    config = CONFIG.model_copy(update=changes)
    policy, optimizer = build(model_folder, config, budget)
    raw = samples(9, seed=3)
    batch = off_policy(raw, policy.logprobs(raw, temperature=0.8), spread=0.2, seed=4)
    reference = Reference(model_folder, config)
    expected = reference.grpo_step(batch, 0.8, max_response_tokens=17)
    weighed, told = corrected(batch, config)
    assert bool(told) == (config.importance != "none")
    metrics = grpo_step(policy, optimizer, normalised(weighed, config, 17), config, temperature=0.8)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert_same_update(policy, reference)


def test_on_policy_update_has_ratio_one_and_the_gradient_of_logprob(tied_folder, samples):
    config = CONFIG.model_copy(update={"kl_coef": 0.0})
    policy, optimizer = build(tied_folder, config)
    batch = samples(6, seed=5)
    reference = Reference(tied_folder, config)
    metrics, expected = grpo_step(policy, optimizer, batch, config, temperature=1.0), reference.grpo_step(batch, 1.0)
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == metrics["approx_kl_old"] == 0.0
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert_same_update(policy, reference)


def test_supervised_update_is_that_of_plain_torch(tied_folder, samples):
    policy, optimizer = build(tied_folder)
    batch = samples(6, seed=6)
    reference = Reference(tied_folder, CONFIG)
    metrics, expected = supervised_step(policy, optimizer, batch), reference.supervised_step(batch)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert_same_update(policy, reference)


def test_token_budget_does_not_change_the_update(tied_folder, samples):
    batch = samples(12, seed=7)
    results = []
    for budget in (8, 60, 4096):
        config = CONFIG.model_copy(update={"kl_coef": 0.0})
        policy, optimizer = build(tied_folder, config, budget)
        metrics = grpo_step(policy, optimizer, batch, config, temperature=1.0)
        results.append((metrics["micro_batches"], metrics["loss"], gradients(policy)))
    assert [count for count, _, _ in results] == sorted({count for count, _, _ in results}, reverse=True)
    for _, loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][1], abs=1e-6)
        assert worst(gradient, results[0][2]) < 1e-7


def test_nothing_to_learn_from_is_a_skipped_update(tied_folder):
    policy, optimizer = build(tied_folder)
    before = policy.export_state()
    for batch in ([], [Sample([1, 2, 3], [0, 0, 0])]):
        metrics = grpo_step(policy, optimizer, batch, CONFIG.model_copy(update={"kl_coef": 0.0}), temperature=1.0)
        assert metrics == {"skipped": 1.0, "samples": float(len(batch)), "tokens": 0.0}
    assert optimizer.updates == 0 and worst(before, policy.export_state()) == 0.0


@pytest.mark.parametrize("advantage", [math.nan, math.inf, 3e38])
def test_non_finite_loss_or_gradient_leaves_the_weights(tied_folder, samples, advantage):
    policy, optimizer = build(tied_folder)
    before = policy.export_state()
    batch = samples(3, seed=8)
    batch[1] = dataclasses.replace(batch[1], advantage=advantage)
    with pytest.raises(NonFiniteError, match="update 1: "):
        grpo_step(policy, optimizer, batch, CONFIG.model_copy(update={"kl_coef": 0.0}), temperature=1.0)
    assert optimizer.updates == 0 and worst(before, policy.export_state()) == 0.0
    metrics = supervised_step(policy, optimizer, samples(3, seed=9))
    assert math.isfinite(metrics["grad_norm"]) and optimizer.updates == 1


def test_learning_rate_rises_by_updates_then_stays(tied_folder, samples):
    _, optimizer = pair = build(tied_folder, CONFIG.model_copy(update={"lr_warmup_updates": 4}))
    rates = [supervised_step(*pair, samples(2, seed=k))["lr"] for k in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    assert optimizer.effective_config()["lr_warmup_updates"] == 4


def test_weight_decay_is_on_matrices_only(tied_folder):
    policy, optimizer = build(tied_folder)
    effective = optimizer.effective_config()
    norms = sum(t.numel() for name, t in policy.export_state().items() if "norm" in name)
    assert effective["undecayed_parameters"] == norms and effective["weight_decay"] == 0.1
    assert effective["decayed_parameters"] == policy.effective_config()["parameters"] - norms


def test_a_frozen_reference_lives_beside_the_policy_and_stays(tied_folder, samples):
    reference = Policy.from_hf(tied_folder, trainable=False, token_budget=64)
    policy, optimizer = build(tied_folder)
    batch = samples(4, seed=10)
    before = reference.logprobs(batch, temperature=1.0)
    supervised_step(policy, optimizer, batch)
    after = reference.logprobs(batch, temperature=1.0)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(before, policy.logprobs(batch, temperature=1.0), strict=True))
    with pytest.raises(TrainingError, match="trainable=False"):
        supervised_step(reference, optimizer, batch)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample([], []), "sample 0 has no tokens"),
        (Sample([1, 2], [0]), "loss_mask has 1 entries, token_ids 2"),
        (Sample([1, 2], [1, 1]), r"loss_mask\[0\] is 1"),
        (Sample([1, 32], [0, 1]), "token id 32 is outside the vocabulary of 32"),
        (Sample([1, -1], [0, 1]), "token id -1"),
    ],
)
def test_malformed_samples_are_named(tied_folder, sample, message):
    policy, _ = build(tied_folder)
    with pytest.raises(SampleError, match=message):
        policy.logprobs([sample], temperature=1.0)


def test_missing_logprobs_are_named(tied_folder, samples):
    policy, optimizer = build(tied_folder)
    batch = samples(2, seed=11)
    with pytest.raises(SampleError, match="no ref_logprobs"):
        grpo_step(policy, optimizer, batch, CONFIG, temperature=1.0)
    batch[0] = dataclasses.replace(batch[0], old_logprobs=np.zeros(len(batch[0]), np.float32))
    with pytest.raises(SampleError, match="1 of 2 samples have old_logprobs"):
        grpo_step(policy, optimizer, batch, CONFIG, temperature=1.0)
