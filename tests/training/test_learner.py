"""One step of learning: what is scored, how often, and what becomes of rewards and advantages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evo_hpc.config.recipe import Optimizer as Options
from evo_hpc.config.recipe import Recipe, Rollout
from evo_hpc.training import checkpoint
from evo_hpc.training.advantages import group_advantages
from evo_hpc.training.errors import DivergedError
from evo_hpc.training.groups import ScoredBatch, ScoredGroup, to_sample
from evo_hpc.training.learner import Clock, Learner, penalised
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.packing import Sample
from evo_hpc.training.policy import Policy
from tests.training.reference import Reference


def group(rewards, seed=0, prompt=2):
    """A group with random responses, as score_groups leaves it."""
    rng = np.random.default_rng(seed)
    advantages = group_advantages(np.array(rewards), "group_norm")
    rows = [
        {"prompt_ids": rng.integers(0, 32, prompt).tolist(), "response_ids": rng.integers(0, 32, 3 + i).tolist(), "loss_mask": [1] * (3 + i),
         "logprobs": (-rng.random(3 + i)).tolist(), "truncated": False, "advantage": float(a), "kept": True}
        for i, a in enumerate(advantages)
    ]
    return ScoredGroup(rows, np.array(rewards, float), advantages, kept=True)


class Counting:
    """A policy whose log-probabilities are asked for."""

    def __init__(self, policy):
        self.policy, self.asked = policy, 0

    def logprobs(self, samples, *, temperature):
        self.asked += 1
        return self.policy.logprobs(samples, temperature=temperature)

    def __getattr__(self, name):
        return getattr(self.policy, name)


def learner(folder, max_staleness=0, **options):
    config = Options(**{"lr": 1e-3, "kl_coef": 0.0, **options})
    recipe = Recipe(rollout=Rollout(prompts_per_step=2, group_size=4, max_response_tokens=8, max_staleness=max_staleness), optimizer=config)
    policy = Policy.from_hf(folder, trainable=True, token_budget=64)
    reference = Counting(Policy.from_hf(folder, trainable=False, token_budget=64)) if config.kl_coef else None
    return Learner(Counting(policy), Optimizer(policy, config), reference, recipe)


BATCH = ([1.0, 0, 0, 1.0], [0.0, 0, 0.5, 1.0])


def batch():
    return ScoredBatch([group(rewards, seed) for seed, rewards in enumerate(BATCH)])


@pytest.mark.parametrize("options, policy, reference", [
    ({}, 0, 0), ({"mini_batches": 2}, 1, 0), ({"kl_coef": 0.1}, 0, 1), ({"kl_coef": 0.1, "kl_in": "reward"}, 1, 1), ({"importance": "truncated"}, 1, 0),
])
def test_only_what_the_loss_needs_is_scored(tied_folder, options, policy, reference):
    subject = learner(tied_folder, **options)
    metrics = subject.learn(batch(), Clock())
    assert (subject.policy.asked, subject.reference.asked if subject.reference else 0) == (policy, reference)
    assert subject.optimizer.updates == options.get("mini_batches", 1) and metrics["trained_tokens"] == 2 * (3 + 4 + 5 + 6)
    assert (metrics["ratio_min"] == metrics["ratio_max"] == 1.0) == ("mini_batches" not in options)
    assert ("importance_mean" in metrics) == ("importance" in options) and ("kl_in_reward_mean" in metrics) == ("kl_in" in options)


def test_the_ratio_of_a_stale_rollout_is_to_the_policy_that_sampled_it(tied_folder):
    subject, scored = learner(tied_folder, max_staleness=1, old_logprobs="sampled"), batch()
    metrics = subject.learn(scored, Clock())
    rows = [row for group in scored.groups for row in group.rows]
    samples = [Sample([*row["prompt_ids"], *row["response_ids"]], [0] * len(row["prompt_ids"]) + row["loss_mask"]) for row in rows]
    fresh = Policy.from_hf(tied_folder, trainable=False, token_budget=64).logprobs(samples, temperature=1.0)
    ratios = np.concatenate([np.exp(found[-len(row["logprobs"]):] - row["logprobs"]) for found, row in zip(fresh, rows, strict=True)])
    assert subject.policy.asked == 0 and metrics["ratio_max"] == pytest.approx(ratios.max(), rel=1e-4)
    assert metrics["ratio_min"] == pytest.approx(ratios.min(), rel=1e-4) and metrics["clip_fraction_low"] + metrics["clip_fraction_high"] > 0
    decoupled = learner(tied_folder, max_staleness=1, importance="truncated")
    metrics = decoupled.learn(batch(), Clock())
    assert decoupled.policy.asked == 1 and metrics["ratio_max"] == pytest.approx(1.0, rel=1e-5) and metrics["importance_mean"] != 1.0


def test_the_kl_is_taken_off_the_rewards_before_advantages():
    config = Options(kl_coef=0.5, kl_in="reward", kl="k1")
    groups = [group([1.0, 0.0])]
    rng = np.random.default_rng(3)
    samples = []
    for row in groups[0].rows:
        length = 2 + len(row["response_ids"])
        samples.append(Sample([*row["prompt_ids"], *row["response_ids"]], [0, 0, *row["loss_mask"]], row["advantage"],
                              old_logprobs=-rng.random(length), ref_logprobs=-rng.random(length)))
    off = [0.5 * float((s.old_logprobs - s.ref_logprobs)[2:].sum()) for s in samples]
    found, mean = penalised(groups, samples, config)
    expected = group_advantages(np.array([1.0 - off[0], 0.0 - off[1]]), "group_norm")
    assert [s.advantage for s in found] == pytest.approx(expected) == [row["advantage"] for row in groups[0].rows]
    assert mean == pytest.approx(np.mean(off)) and groups[0].rewards.tolist() == [1.0, 0.0]


def test_nothing_kept_is_nothing_learned(tied_folder):
    subject = learner(tied_folder, importance="masked", mini_batches=2)
    nothing = ScoredBatch([ScoredGroup(group([1.0, 0]).rows, np.zeros(2), np.zeros(2), kept=False)])
    assert subject.learn(nothing, Clock()) == {"trained_tokens": 0.0} and subject.optimizer.updates == 0


@pytest.mark.parametrize("options, asked, updates", [
    ({"epochs": 3}, 1, 3), ({"epochs": 2, "mini_batches": 2}, 1, 4), ({"old_logprobs": "sampled"}, 0, 1), ({"old_logprobs": "sampled", "epochs": 2}, 0, 2),
])
def test_passes_and_what_the_ratio_is_against(tied_folder, options, asked, updates):
    subject = learner(tied_folder, **options)
    metrics = subject.learn(batch(), Clock())
    assert subject.policy.asked == asked and subject.optimizer.updates == updates
    assert metrics["trained_tokens"] == 2 * (3 + 4 + 5 + 6) * options.get("epochs", 1)
    # The group's log-probabilities are made up: against them the ratio is far from 1, and the engine's mismatch is still measured.
    assert metrics["ratio_max"] != 1.0 and metrics["sampler_kl"] > 0


def test_an_update_against_the_sampled_log_probabilities_is_that_of_plain_torch(tied_folder):
    subject = learner(tied_folder, old_logprobs="sampled", clip_high=5.0, clip_low=0.99, grad_clip=1e9)
    scored = batch()
    samples = [to_sample(row) for g in scored.groups for row in g.rows]
    plain = Reference(tied_folder, subject.recipe.optimizer)
    expected = plain.grpo_step([replace(s, old_logprobs=s.sampled_logprobs) for s in samples], 1.0)
    found = subject.learn(scored, Clock())
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5) and found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def poisoned(subject, scored):
    """So many of the responses as have log-probabilities that are not numbers."""
    scored.groups[0].rows[0]["logprobs"][0] = float("nan")
    return scored


def test_an_update_that_is_not_finite_is_left_out_and_counted_until_too_many(tied_folder, capsys):
    subject = learner(tied_folder, old_logprobs="sampled", skip_limit=1, mini_batches=2)
    before = subject.policy.export_state()
    metrics = subject.learn(poisoned(subject, batch()), Clock())
    assert metrics["updates_skipped"] == 1 and subject.optimizer.updates == 1 and metrics["trained_tokens"] == 18 and subject.skipped_in_a_row == 0
    assert "left out: update 1" in capsys.readouterr().out and np.isfinite(metrics["loss"])
    after = subject.policy.export_state()
    assert all(np.isfinite(v.numpy()).all() for v in after.values()) and any((before[n] != v).any() for n, v in after.items())

    def both_bad():
        scored = poisoned(subject, batch())
        scored.groups[1].rows[0]["logprobs"][0] = float("nan")
        return scored

    with pytest.raises(DivergedError, match=r"2 updates in a row were not finite \(optimizer.skip_limit 1\), the last: update 2: loss is nan"):
        subject.learn(both_bad(), Clock())
    assert all((after[n] == v).all() for n, v in subject.policy.export_state().items())


def test_the_reference_moves_when_it_is_to(tied_folder, tmp_path):
    subject = learner(tied_folder, kl_coef=0.1, reference_every=2)

    def distance(a, b):
        a, b = a.export_state(), b.export_state()
        return max(float((a[n] - b[n]).abs().max()) for n in a)

    subject.learn(batch(), Clock())
    subject.refresh_reference(1)
    assert distance(subject.policy, subject.reference) > 0
    subject.refresh_reference(2)
    assert distance(subject.policy, subject.reference) == 0
    subject.learn(batch(), Clock())
    assert distance(subject.policy, subject.reference) > 0
    checkpoint.save(tmp_path / "step-000003", subject.policy.policy, subject.optimizer, {}, reference=subject.reference.policy)
    again = learner(tied_folder, kl_coef=0.1, reference_every=2)
    checkpoint.load(tmp_path / "step-000003", again.policy.policy, again.optimizer, reference=again.reference.policy)
    assert distance(again.reference, subject.reference) == 0 and distance(again.policy, subject.policy) == 0
    metrics = [each.learn(batch(), Clock()) for each in (subject, again)]
    assert metrics[0]["kl"] == metrics[1]["kl"] != 0


@pytest.mark.parametrize("options, message", [
    ({"old_logprobs": "sampled", "importance": "masked"}, "set one of the two"), ({"kl_coef": 0, "reference_every": 5}, "there is no reference"),
    ({"importance": "none"}, "nothing corrects for older policies having sampled"),
])
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        Recipe(optimizer=Options(**options), rollout=Rollout(max_staleness=int("importance" in options)))


def test_the_engines_drift_is_measured_before_anything_is_masked_for_it(tied_folder):
    """The made-up log-probabilities are far off: most tokens leave the loss, and that is just what must be seen."""
    measured = {}
    for importance in ("none", "masked"):
        subject = learner(tied_folder, importance=importance, mini_batches=2)
        measured[importance] = subject.learn(batch(), Clock())
    assert measured["masked"]["importance_outside"] > 0.3
    for name in ("sampler_kl", "sampler_logprob_diff_max"):
        assert measured["masked"][name] == measured["none"][name] > 0.01
    rows = [row for g in batch().groups for row in g.rows]
    fresh = Policy.from_hf(tied_folder, trainable=False, token_budget=64).logprobs([to_sample(row) for row in rows], temperature=1.0)
    apart = np.concatenate([row["logprobs"] - found[-len(row["logprobs"]):].astype(float) for found, row in zip(fresh, rows, strict=True)])
    assert measured["none"]["sampler_kl"] == pytest.approx(np.mean(np.exp(-apart) + apart - 1), rel=1e-4)


def test_an_older_policy_is_no_drift_of_the_engine(tied_folder):
    stale = learner(tied_folder, max_staleness=1, old_logprobs="sampled", mini_batches=2).learn(batch(), Clock())
    assert np.isnan(stale["sampler_kl"]) and np.isnan(stale["sampler_logprob_diff_max"]) and stale["behaviour_kl"] > 0.01
    fresh = learner(tied_folder, old_logprobs="sampled", mini_batches=2).learn(batch(), Clock())
    assert "behaviour_kl" not in fresh and fresh["sampler_kl"] > 0.01


def test_a_response_that_is_masked_pays_its_kl_like_the_others_of_its_group():
    config = Options(kl_coef=0.5, kl_in="reward", kl="k1", advantage="group_mean")
    [scored], rng = [group([1.0, 0.0])], np.random.default_rng(3)
    samples = []
    for row in scored.rows:
        length = 2 + len(row["response_ids"])
        ref = -rng.random(length)
        old = ref + 0.5 / len(row["response_ids"])  # the same KL for each, over its tokens
        samples.append(Sample([*row["prompt_ids"], *row["response_ids"]], [0, 0, *row["loss_mask"]], row["advantage"], old_logprobs=old, ref_logprobs=ref))
    masked = [samples[0], replace(samples[1], loss_mask=[0] * len(samples[1]))]
    assert [s.advantage for s in penalised([scored], masked, config)[0]] == pytest.approx([0.5, -0.5])
