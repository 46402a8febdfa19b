"""Tiny random models of every architecture that the trainer builds, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

VOCAB = 32
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "dtype": "float32",
    "bos_token_id": None, "eos_token_id": 1,  # no pad_token_id: transformers gives its embedding no gradient
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}

CASES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=False, rope_theta=1e6),
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=False, rope_theta=1e6),
    "qwen2-tied": Qwen2Config(**_COMMON, tie_word_embeddings=True, rope_theta=1e6),
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=False, rope_theta=5e5),
    "llama-scaled-tied": LlamaConfig(**{**_COMMON, "max_position_embeddings": 16384}, tie_word_embeddings=True, rope_parameters=_LLAMA3),
    "moe": Qwen3MoeConfig(**_COMMON, **_EXPERTS, tie_word_embeddings=False, norm_topk_prob=True),
    "moe-some-dense-tied": Qwen3MoeConfig(**{**_COMMON, **_EXPERTS, "moe_intermediate_size": 64}, tie_word_embeddings=True, norm_topk_prob=False, mlp_only_layers=[0]),
    "moe-every-second": Qwen3MoeConfig(**_COMMON, **_EXPERTS, norm_topk_prob=False, decoder_sparse_step=2),
}


def write_model(folder: Path, case: str, seed: int = 0) -> Path:
    """Save a model with weights large enough for distributions far from uniform, norms away from one, biases from zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CASES[case]).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.12 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under their names on disk: transformers keeps a layer's experts in one tensor in memory."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    named[f"{name.removesuffix('gate_up_proj')}{i}.{part}.weight"] = half
        elif name.endswith("experts.down_proj"):
            named.update({f"{name.removesuffix('down_proj')}{i}.down_proj.weight": each for i, each in enumerate(tensor)})
        else:
            named[name] = tensor
    return named
