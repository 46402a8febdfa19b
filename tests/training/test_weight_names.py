"""The table of names: what local and Transformer Engine layers, pipeline stages and expert ranks call the same weights."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from evo_hpc.training.architectures import ModelShape, shape_of
from evo_hpc.training.errors import WeightsError
from evo_hpc.training.weight_names import entry_of, hf_shapes
from tests.training.tiny_models import CASES

DENSE = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
ATTENTION = DENSE[:2]


def shape(case: str) -> ModelShape:
    return shape_of(CASES[case].to_dict() | {"architectures": None}, case)


def parameters(shape: ModelShape, *, engine: bool) -> list[str]:
    """What Megatron names its parameters, with Transformer Engine's layers (grouped experts) or its own."""
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", *([] if shape.tied else ["output_layer.weight"])]
    for i in range(shape.num_layers):
        layer = ["self_attention.linear_qkv.layer_norm_weight" if engine else "input_layernorm.weight"]
        layer += ["self_attention.linear_qkv.bias"] if shape.qkv_bias else []
        layer += [f"self_attention.{part}_layernorm.weight" for part in "qk"] if shape.qk_norm else []
        if shape.is_sparse(i):
            layer += [*ATTENTION, "pre_mlp_layernorm.weight", "mlp.router.weight"]
            for e in range(shape.experts.count):
                layer += [f"mlp.experts.{f'{fc}.weight{e}' if engine else f'local_experts.{e}.{fc}.weight'}" for fc in ("linear_fc1", "linear_fc2")]
        else:
            layer += [*DENSE, "mlp.linear_fc1.layer_norm_weight" if engine else "pre_mlp_layernorm.weight"]
        names += [f"decoder.layers.{i}.{name}" for name in layer]
    return names


@pytest.mark.parametrize("engine", [False, True], ids=["local", "transformer-engine"])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_has_one_parameter(case, engine):
    of = shape(case)
    parts = [part for name in parameters(of, engine=engine) for part in entry_of(name, of).parts]
    assert sorted(parts) == sorted(hf_shapes(of))


def test_layers_and_experts_of_a_rank_are_those_of_the_whole_model():
    of = shape("moe")
    local = entry_of("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", of, layer_offset=5, expert_offset=2)
    assert local.parts == ("model.layers.5.mlp.experts.3.gate_proj.weight", "model.layers.5.mlp.experts.3.up_proj.weight")
    assert (local.rule, local.expert) == ("gated", True)
    assert entry_of("decoder.layers.0.mlp.experts.linear_fc1.weight1", of, layer_offset=5, expert_offset=2) == local
    assert not entry_of("decoder.layers.0.mlp.router.weight", of).expert


def test_the_head_of_a_last_stage_is_the_embedding_where_they_are_tied():
    assert entry_of("output_layer.weight", shape("qwen2-tied")).parts == ("model.embed_tokens.weight",)
    assert entry_of("output_layer.weight", shape("qwen2")).parts == ("lm_head.weight",)


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.experts.weight1", "decoder.layers.0.mlp.linear_fc1.bias", "mtp.layers.0.weight"])
def test_a_parameter_that_is_not_in_the_table_is_refused(name):
    with pytest.raises(WeightsError, match="has no Hugging Face name"):
        entry_of(name, shape("moe"))


_PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.1-8B": (8_030_261_248, {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": [128001, 128008, 128009], "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    }),
    "Qwen2.5-0.5B": (494_032_768, {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "attention_dropout": 0.0, "hidden_act": "silu",
        "max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False,
    }),
    "Qwen3-0.6B": (596_049_920, {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 40960, "tie_word_embeddings": True, "attention_bias": False,
    }),
    "Qwen3-30B-A3B": (30_532_122_624, {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "rope_scaling": None, "max_position_embeddings": 40960, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }),
}  # fmt: skip
"""Parameters, and the fields of config.json that matter, of published models."""


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_models_have_the_parameters_that_they_are_known_for(name):
    parameters, config = _PUBLISHED[name]
    assert sum(prod(size) for size in hf_shapes(shape_of(config, name)).values()) == parameters
