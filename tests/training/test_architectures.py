"""Every architecture as a tiny random model: Megatron against transformers, and Hugging Face -> Megatron -> Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from evo_hpc.config import recipe
from evo_hpc.training import checkpoint, hf_weights, parallel, weight_files
from evo_hpc.training.architectures import read_shape
from evo_hpc.training.batch import collate
from evo_hpc.training.errors import UnsupportedModelError
from evo_hpc.training.model import build_model
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.random_init import write_random_weights
from evo_hpc.training.steps import grpo_step, supervised_step
from tests.training.conftest import random_samples
from tests.training.reference import Reference, off_policy, worst
from tests.training.tiny_models import CASES, write_model

CONFIG = recipe.Optimizer(lr=1e-3, weight_decay=0.1, grad_clip=100.0, kl_coef=0.05, clip_low=0.1, clip_high=0.15)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {case: write_model(tmp_path_factory.mktemp(case), case) for case in CASES}


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def logits_differ(module: torch.nn.Module, reference: torch.nn.Module, samples) -> float:
    """Largest difference of logits over packed sequences."""
    batch = collate(samples, torch.device("cpu"))
    worst_yet = 0.0
    with torch.no_grad():
        packed = module(batch.tokens, batch.positions, None, packed_seq_params=batch.layout)[0].split(batch.rows)
        for ids, logits in zip(batch.tokens[0].split(batch.rows), packed, strict=True):
            expected = reference(ids[None]).logits[0].float()
            assert expected.std() > 0.5
            worst_yet = max(worst_yet, (logits.float() - expected).abs().max().item())
    return worst_yet


def test_logits_and_round_trip(folder, tmp_path):
    policy = Policy.from_hf(folder, trainable=False, token_budget=4096)
    policy.save_hf(tmp_path / "out", tokenizer_from=folder)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert logits_differ(policy.module, reference, random_samples(4, seed=1, longest=200)) < 1e-4
    assert policy.effective_config()["parameters"] == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("step", ["grpo", "supervised"])
def test_update_is_that_of_transformers(folder, step):
    policy = Policy.from_hf(folder, trainable=True, token_budget=64)
    optimizer, reference = Optimizer(policy, CONFIG), Reference(folder, CONFIG)
    raw = random_samples(5, seed=3)
    if step == "grpo":
        batch = off_policy(raw, policy.logprobs(raw, temperature=0.8), spread=0.2, seed=4)
        got, want = grpo_step(policy, optimizer, batch, CONFIG, temperature=0.8), reference.grpo_step(batch, 0.8)
    else:
        got, want = supervised_step(policy, optimizer, raw), reference.supervised_step(raw)
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5) and got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    gradients = hf_weights.export_state(policy.module, policy.shape, lambda parameter: parameter.main_grad)
    assert worst(gradients, reference.gradients()) < 1e-5
    for kind in ("q_proj.bias", "v_proj.bias", "mlp.gate.weight", "down_proj.weight", "q_proj.weight"):
        sizes = [gradient.abs().max().item() for name, gradient in gradients.items() if name.endswith(kind)]
        assert not sizes or max(sizes) > 1e-3, f"{kind}: too little to compare"
    moved = {name: gradient.abs() > 1e-5 for name, gradient in gradients.items()}
    state, expected = policy.export_state(), reference.state()
    assert max((state[n] - expected[n])[m].abs().max().item() for n, m in moved.items() if m.any()) < 1e-5


@pytest.mark.parametrize("case", ["qwen2", "llama-scaled-tied", "moe-some-dense-tied"])
def test_a_checkpoint_continues_bit_by_bit(folders, tmp_path, case):
    """Biases, experts and router, and their moments, are all in it."""
    first, second = random_samples(4, seed=3), random_samples(4, seed=4)

    def build():
        policy = Policy.from_hf(folders[case], trainable=True, token_budget=64)
        return policy, Optimizer(policy, CONFIG)

    policy, optimizer = build()
    supervised_step(policy, optimizer, first)
    checkpoint.save(tmp_path / "step-000001", policy, optimizer, {})
    supervised_step(policy, optimizer, second)
    resumed, its_optimizer = build()
    checkpoint.load(tmp_path / "step-000001", resumed, its_optimizer)
    supervised_step(resumed, its_optimizer, second)
    assert worst(resumed.export_state(), policy.export_state()) == 0.0


@pytest.mark.parametrize(("factor", "head_dim", "theta"), [(8.0, 128, 5e5), (32.0, 64, 5e5), (2.5, 80, 1e4)])
def test_llama3_rope_has_the_frequencies_of_transformers(folders, tmp_path, factor, head_dim, theta):
    config = json.loads((folders["llama-scaled-tied"] / "config.json").read_text())
    config |= {"head_dim": head_dim, "rope_parameters": {**config["rope_parameters"], "factor": factor, "rope_theta": theta}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_random_weights(tmp_path, seed=0)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb.inv_freq
    parallel.initialize()
    got = build_model(read_shape(tmp_path)).rotary_pos_emb.inv_freq
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    assert (got < plain / 2).any() and torch.equal(got[:4], plain[:4])


def test_older_fields_of_rope_say_the_same(folders, tmp_path):
    config = json.loads((folders["llama-scaled-tied"] / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, other = read_shape(tmp_path), read_shape(folders["llama-scaled-tied"])
    assert (shape.rope_theta, shape.rope_factor) == (other.rope_theta, other.rope_factor) == (5e5, 32.0)


_SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("llama", {"model_type": "mistral"}, "model_type is 'mistral'; supported: one of qwen3, qwen3_moe, qwen2, llama"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is 'LlamaForSequenceClassification'"),
        ("llama", {"attention_bias": True}, "attention_bias is True; supported: False"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp is 2"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is"),
        ("llama", {"num_key_value_heads": 3}, r"num_key_value_heads is 3; supported: a divisor of num_attention_heads \(4\)"),
        ("llama", {"vocab_size": "32"}, "vocab_size is '32'; supported: a positive integer"),
        ("llama", {"rms_norm_eps": None}, "no 'rms_norm_eps'"),
        ("llama", {"rope_parameters": {"rope_type": "default"}}, "no 'rope_theta'"),
        ("llama", {"rope_parameters": {**_SCALED, "low_freq_factor": 2.0}}, r"rope scaling: low_freq_factor is 2\.0; supported: 1\.0"),
        ("llama", {"rope_parameters": {**_SCALED, "high_freq_factor": 8.0}}, r"rope scaling: high_freq_factor is 8\.0"),
        ("llama", {"rope_parameters": {**_SCALED, "original_max_position_embeddings": 4096}}, "original_max_position_embeddings is 4096"),
        ("llama", {"rope_parameters": {**_SCALED, "rope_type": "linear"}}, "rope_type is 'linear'; supported: 'default' or 'llama3'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is 'sliding_attention'"),
        ("moe", {"num_experts_per_tok": 5}, r"num_experts_per_tok is 5; supported: at most num_experts \(4\)"),
        ("moe", {"num_experts_per_tok": 1}, "norm_topk_prob is True; supported: false where num_experts_per_tok is 1"),
    ],
)
def test_what_cannot_be_built_is_refused_with_file_field_and_value(folders, tmp_path, case, fields, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads((folders[case] / "config.json").read_text()), **fields}))
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_shape(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("case", ["qwen2", "moe-some-dense-tied"])
def test_bfloat16_model_computes_near_the_float32_one(folders, tmp_path, case):
    parallel.initialize()
    shape = read_shape(folders[case])
    module = build_model(shape, recipe.Compute(precision="bfloat16")).eval()
    hf_weights.load_state(module, weight_files.read_folder(folders[case], shape), shape)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    weight_files.save_folder(tmp_path, hf_weights.export_stream(module, shape), shape, folders[case], dtype=torch.bfloat16)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(folders[case] / "model.safetensors")
    assert all(torch.equal(saved[name], original[name].bfloat16()) for name in original)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert reference.dtype == torch.bfloat16
    assert logits_differ(module, reference.float(), random_samples(1, seed=1)) < 0.3


def test_random_weights_are_those_of_the_config(tmp_path, folders):
    (tmp_path / "config.json").write_text((folders["qwen2"] / "config.json").read_text())
    write_random_weights(tmp_path, seed=0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert (tensors["model.layers.0.self_attn.q_proj.bias"] == 0).all() and (tensors["model.norm.weight"] == 1).all()
    assert tensors["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.1)
