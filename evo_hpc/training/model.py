"""The policy network: a Megatron GPTModel of the shape that a Hugging Face config.json describes."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from evo_hpc.config.recipe import Compute
from evo_hpc.training import parallel
from evo_hpc.config.layout import check_layout
from evo_hpc.training.architectures import ModelShape
from evo_hpc.training.mcore import GPTModel, IdentityOp, TransformerConfig, get_gpt_decoder_block_spec, parallel_state
from evo_hpc.training.norm import RMSNorm
from evo_hpc.training.sdpa_attention import SdpaCoreAttention


def uses_transformer_engine() -> bool:
    """Whether linear layers and norms come from Transformer Engine: it needs CUDA and the package."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def layout_arguments(compute: Compute) -> dict[str, Any]:
    """Megatron's arguments for the current layout, the precision and the recomputation."""
    layout, dtype = parallel.current_layout(sequence=compute.sequence_parallel), parallel.dtype_of(compute)
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[compute.recompute]
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": layout.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": layout.pipeline > 1,  # micro-batches are packed: each has its own number of tokens
        "moe_token_dispatcher_type": "alltoall",
        **recompute,
    }


def shape_arguments(shape: ModelShape) -> dict[str, Any]:
    """The network itself, for TransformerConfig."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "qk_layernorm": shape.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **expert_arguments(shape),
    }


def expert_arguments(shape: ModelShape) -> dict[str, Any]:
    """The mixture of experts as transformers' Qwen3MoeSparseMoeBlock computes it: every token gets all its experts.

    The router multiplies in the model's own type and takes the softmax in float32, as the sampling engine does. There
    is no auxiliary loss: a policy gradient with one would follow another objective than the one reported.
    """
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(sparse) for sparse in experts.sparse],
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": "softmax",
        # the softmax over the chosen alone is the softmax over all, divided by the sum of the chosen
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_dtype": None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": None,
        "moe_grouped_gemm": uses_transformer_engine(),
        "moe_permute_fusion": False,
    }


def transformer_config(shape: ModelShape, compute: Compute) -> TransformerConfig:
    """Megatron's configuration for `shape` under the current layout; fusions that need CUDA or Apex are off."""
    return TransformerConfig(
        **shape_arguments(shape),
        **layout_arguments(compute),
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


def build_model(shape: ModelShape, compute: Compute = Compute()) -> GPTModel:  # noqa: B008
    """An initialised GPTModel, or this rank's pipeline stage of one, on its device; weights random until `hf_weights.load_state` fills them.

    Norms compute in float32 whatever the precision is. Raises LayoutError where the current layout does not fit the model.
    """
    check_layout(compute, torch.distributed.get_world_size(), shape.raw)
    config = transformer_config(shape, compute)
    engine = uses_transformer_engine()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization="RMSNorm")
    for layer in spec.layer_specs:
        # Megatron's own refuses packed sequences, Transformer Engine's refuses float32
        layer.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    if not engine:
        _replace_norms(spec)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta) if shape.rope_theta.is_integer() else shape.rope_theta,
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 1.0,
    )
    return model.to(parallel.device(), config.params_dtype)  # dtype: torch's RMSNorm does not look at params_dtype


def _replace_norms(spec: Any) -> None:
    """Our RMSNorm wherever the local layers have one."""
    spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        for part, name in (
            (layer.submodules, "input_layernorm"), (layer.submodules, "pre_mlp_layernorm"), (attention, "q_layernorm"), (attention, "k_layernorm"),
        ):
            if getattr(part, name) not in (None, IdentityOp):
                setattr(part, name, RMSNorm)
