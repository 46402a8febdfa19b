"""The policy network: a Megatron GPTModel with the shape of a dense Qwen3, read from a Hugging Face config.json."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from evo_hpc.training import parallel
from evo_hpc.training.errors import ParallelError, UnsupportedModelError
from evo_hpc.training.mcore import GPTModel, TransformerConfig, get_gpt_decoder_block_spec, parallel_state
from evo_hpc.training.sdpa_attention import SdpaCoreAttention


@dataclass(frozen=True)
class Qwen3Shape:
    """What a config.json says about a dense Qwen3; `raw` is the whole file, to be written back unchanged."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    max_positions: int
    raw: dict[str, Any]


def read_shape(folder: Path) -> Qwen3Shape:
    """Read `folder`/config.json; raises UnsupportedModelError, with field and value, unless it is a dense Qwen3."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist: give a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise UnsupportedModelError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    required = {
        "model_type": (raw.get("model_type"), "qwen3"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "attention_dropout": (raw.get("attention_dropout", 0.0), 0.0),
        "use_sliding_window": (raw.get("use_sliding_window", False), False),
        "rope_type": (rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default"))), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    for field, (found, wanted) in required.items():
        if found != wanted:
            raise UnsupportedModelError(f"{path}: {field} is {found!r}; supported: dense Qwen3, where it is {wanted!r}")
    try:
        return Qwen3Shape(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else raw["rope_theta"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_positions=raw["max_position_embeddings"],
            raw=raw,
        )
    except KeyError as error:
        raise UnsupportedModelError(f"{path}: no {error.args[0]!r}; a dense Qwen3 config has it") from None


def uses_transformer_engine() -> bool:
    """Whether linear layers and norms come from Transformer Engine: it needs CUDA and the package."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(shape: Qwen3Shape) -> TransformerConfig:
    """Megatron's float32 configuration for `shape` under the current layout; fusions that need CUDA or Apex are off."""
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    split = {
        "vocab_size": shape.vocab_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
    }
    for field, value in {**split, "intermediate_size": shape.intermediate_size}.items():
        if value % tp_size:
            raise ParallelError(f"tensor_parallel_size {tp_size} must divide {field} ({value})")
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp_size,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        # False would leave the tensor-parallel marks off the weights: the gradient norm is then silently wrong
        perform_initialization=True,
        calculate_per_token_loss=True,
        cuda_graph_scope=[],  # the default is deprecated and warns
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
    )


def build_model(shape: Qwen3Shape) -> GPTModel:
    """An initialised GPTModel on this process's device, weights random until `hf_weights.load` fills them."""
    config = transformer_config(shape)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=uses_transformer_engine(), normalization="RMSNorm")
    for layer in spec.layer_specs:
        # Megatron's own refuses packed sequences, Transformer Engine's refuses float32
        layer.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta) if shape.rope_theta.is_integer() else shape.rope_theta,
    )
    return model.to(parallel.device())
