"""bfloat16 with float32 master weights, and recomputation: what is learned stays what it was."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from evo_hpc.config import recipe
from evo_hpc.training import checkpoint, hf_weights, parallel
from evo_hpc.training.mcore import tensor_parallel
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.rollouts import probe_of
from evo_hpc.training.steps import grpo_step, supervised_step
from tests.training.conftest import random_samples
from tests.training.reference import worst

CONFIG = recipe.Optimizer(lr=1e-3, weight_decay=0.1, kl_coef=0.0)


def build(folder, config=CONFIG, **compute):
    settings = recipe.Compute(**compute)
    policy = Policy.from_hf(folder, trainable=True, token_budget=64, compute=settings)
    return policy, Optimizer(policy, config)


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_learns_with_float32_masters_and_says_so(tied_folder, distributed, monkeypatch):
    monkeypatch.setattr(parallel, "shares_out_optimizer", lambda compute: distributed)
    policy, optimizer = build(tied_folder, precision="bfloat16")
    batch = random_samples(8, seed=1)
    losses = [supervised_step(policy, optimizer, batch)["loss"] for _ in range(12)]
    assert losses[-1] < 0.75 * losses[0]
    assert {p.dtype for p in policy.module.parameters()} == {torch.bfloat16}
    assert {p.main_grad.dtype for p in policy.module.parameters()} == {torch.float32}
    assert policy.effective_config()["dtype"] == "bfloat16"
    told = optimizer.effective_config()
    assert (told["master_dtype"], told["distributed_optimizer"]) == ("float32", distributed)
    masters = [p for group in optimizer.megatron.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    assert any((p != p.bfloat16().float()).any() for p in masters), "updates below a bfloat16's resolution are kept"


def test_small_updates_add_up_in_the_master_weights(tied_folder):
    """A thousandth of a weight is below bfloat16's resolution of 1/256: without masters nothing would ever change."""
    policy, optimizer = build(tied_folder, CONFIG.model_copy(update={"lr": 1e-6, "weight_decay": 0.0}), precision="bfloat16")
    before, batch = policy.export_state(), random_samples(8, seed=1)
    masters = [p.clone() for group in optimizer.megatron.param_groups for p in group["params"]]
    supervised_step(policy, optimizer, batch)
    assert worst(policy.export_state(), before) < 1e-3
    moved = [(a - b).abs().max().item() for a, b in zip((p for g in optimizer.megatron.param_groups for p in g["params"]), masters, strict=True)]
    assert max(moved) == pytest.approx(1e-6, rel=0.2)


def test_bfloat16_gradient_is_near_that_of_float32(untied_folder):
    gradients = {}
    for precision in ("float32", "bfloat16"):
        policy, optimizer = build(untied_folder, precision=precision)
        grpo_step(policy, optimizer, random_samples(9, seed=3), CONFIG, temperature=0.8)
        gradients[precision] = hf_weights.export_state(policy.module, policy.shape, lambda p: p.main_grad)
    for name, expected in gradients["float32"].items():
        got = gradients["bfloat16"][name]
        assert torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > 0.99, name


def test_bfloat16_weights_are_exported_as_such_and_scored_alike(tied_folder, tmp_path):
    policy, optimizer = build(tied_folder, precision="bfloat16")
    supervised_step(policy, optimizer, random_samples(8, seed=1))
    policy.save_hf(tmp_path / "out", tokenizer_from=tied_folder)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert worst(saved, policy.export_state()) == 0.0
    again = Policy.from_hf(tmp_path / "out", trainable=False, token_budget=64, compute=policy.compute)
    batch = random_samples(4, seed=5)
    for a, b in zip(again.logprobs(batch, temperature=1.0), policy.logprobs(batch, temperature=1.0), strict=True):
        assert (a == b).all() and a.dtype == "float32"


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_resumes_bit_for_bit_masters_included(tied_folder, tmp_path, distributed, monkeypatch):
    monkeypatch.setattr(parallel, "shares_out_optimizer", lambda compute: distributed)
    pair = build(tied_folder, precision="bfloat16")
    supervised_step(*pair, random_samples(8, seed=1))
    checkpoint.save_async(tmp_path / "step-000001", *pair, {}).finalize()
    resumed = build(tied_folder, precision="bfloat16")
    checkpoint.load(tmp_path / "step-000001", *resumed)
    for each in (pair, resumed):
        for seed in (2, 3, 4):
            supervised_step(*each, random_samples(8, seed=seed))
    assert worst(resumed[0].export_state(), pair[0].export_state()) == 0.0
    masters = [[p for group in optimizer.megatron.param_groups for p in group["params"]] for _, optimizer in (pair, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [True, False], ids=["distributed-to-plain", "plain-to-distributed"])
def test_one_kind_of_optimizer_goes_on_from_the_others_checkpoint(untied_folder, tmp_path, monkeypatch, precision, shared):
    monkeypatch.setattr(parallel, "shares_out_optimizer", lambda compute: shared)
    pair = build(untied_folder, precision=precision)
    for seed in (1, 2):
        supervised_step(*pair, random_samples(8, seed=seed))
    checkpoint.save(tmp_path / "step-000002", *pair, {})
    monkeypatch.setattr(parallel, "shares_out_optimizer", lambda compute: not shared)
    other = build(untied_folder, precision=precision)
    supervised_step(*other, random_samples(8, seed=9))
    checkpoint.load(tmp_path / "step-000002", *other)
    assert worst(other[0].export_state(), pair[0].export_state()) == 0.0 and other[1].updates == 2
    told = [optimizer.effective_config() for _, optimizer in (pair, other)]
    assert [each["distributed_optimizer"] for each in told] == [shared, not shared]
    for each in (pair, other):
        for seed in (3, 4):
            supervised_step(*each, random_samples(8, seed=seed))
    # The gradient's norm, by which it is clipped, is summed in another order.
    assert worst(other[0].export_state(), pair[0].export_state()) < (1e-6 if precision == "float32" else 1e-2)
    assert max(np.abs(a - b).max() for a, b in zip(*(sorted_masters(optimizer) for _, optimizer in (pair, other)), strict=True)) < 1e-6


def sorted_masters(optimizer):
    """Values of all master weights, in order: the two kinds keep them in different shapes."""
    return [np.sort(np.concatenate([p.detach().flatten().numpy() for group in optimizer.megatron.param_groups for p in group["params"]]))]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradient(tied_folder, recompute, monkeypatch):
    recomputed = []
    plain = tensor_parallel.random.CheckpointFunction.backward
    monkeypatch.setattr(tensor_parallel.random.CheckpointFunction, "backward", staticmethod(lambda *a: (recomputed.append(1), plain(*a))[1]))
    results = {}
    for kind in ("none", recompute):
        policy, optimizer = build(tied_folder, recompute=kind)
        assert policy.effective_config()["recompute"] == kind
        metrics = grpo_step(policy, optimizer, random_samples(9, seed=3), CONFIG, temperature=0.8)
        results[kind] = (metrics, hf_weights.export_state(policy.module, policy.shape, lambda p: p.main_grad))
        assert bool(recomputed) == (kind != "none")
    assert worst(results["none"][1], results[recompute][1]) == 0.0
    assert results["none"][0] == results[recompute][0]


def test_auto_is_float32_where_cuda_is_not(tied_folder):
    if torch.cuda.is_available():
        pytest.skip("auto is bfloat16 here")
    assert build(tied_folder)[0].effective_config()["dtype"] == "float32"


def test_a_published_probe_bears_the_rounding_of_its_precision(tied_folder):
    found = {precision: probe_of(build(tied_folder, precision=precision)[0], [1, 2, 3, 4, 5]) for precision in ("float32", "bfloat16")}
    apart = np.abs(found["float32"].array() - found["bfloat16"].array())
    assert found["float32"].tolerance < apart.max() and apart.mean() < found["bfloat16"].tolerance < 1.0
    assert (found["float32"].by_mean, found["bfloat16"].by_mean) == (False, True)
