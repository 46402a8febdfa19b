"""What a Hugging Face config.json says of a model that the trainer can build: Qwen3, Qwen3-MoE, Qwen2 and Llama. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_hpc.training.errors import UnsupportedModelError

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM",
}  # fmt: skip
"""model_type -> the class of the checkpoint. Qwen2.5 is a qwen2; Llama 3, 3.1 and 3.2 are a llama."""

_FIXED: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
    "pretraining_tp": 1, "quantization_config": None,
}  # fmt: skip
"""Fields that may be absent, and otherwise must have this value: nothing else is built."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The numbers of llama3 rope scaling that Megatron has built in (RotaryEmbedding._apply_scaling); only `factor` is an argument."""


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers: softmax over all experts, then the `top_k` best; `sparse[i]`: layer i is one of them."""

    count: int
    top_k: int
    intermediate_size: int
    normalised: bool
    """Whether the weights of the chosen experts are divided by their sum (`norm_topk_prob`)."""
    sparse: tuple[bool, ...]


@dataclass(frozen=True)
class ModelShape:
    """A decoder with RMSNorm before each part, rotary positions, grouped queries and a SiLU-gated MLP.

    `intermediate_size` is that of a dense layer. `rope_factor` is the factor of llama3 rope scaling, None without it.
    `raw` is the whole config.json, to be written back unchanged.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_factor: float | None
    qk_norm: bool
    qkv_bias: bool
    tied: bool
    max_positions: int
    experts: Experts | None
    raw: dict[str, Any]

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer`, counted from 0, is a mixture of experts."""
        return self.experts is not None and self.experts.sparse[layer]


def read_shape(folder: Path) -> ModelShape:
    """Read `folder`/config.json; raises UnsupportedModelError, with file, field and value, on what cannot be built."""
    return shape_of(read_config(folder), str(Path(folder) / "config.json"))


def read_config(folder: Path) -> dict[str, Any]:
    """`folder`/config.json as it is. Raises UnsupportedModelError if it is absent, unreadable, or not a JSON object."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist: give a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise UnsupportedModelError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"{path}: unreadable ({error})") from None
    if not isinstance(raw, dict):
        raise UnsupportedModelError(f"{path}: not a JSON object")
    return raw


def shape_of(raw: Mapping[str, Any], where: str) -> ModelShape:
    """`read_shape` of a config that is read already; `where` names it in errors."""
    model_type = raw.get("model_type")
    if model_type not in ARCHITECTURES:
        _refuse(where, "model_type", model_type, f"one of {', '.join(ARCHITECTURES)}")
    for name in raw.get("architectures") or []:
        if name != ARCHITECTURES[model_type]:
            _refuse(where, "architectures", name, repr(ARCHITECTURES[model_type]))
    for field, wanted in _FIXED.items():
        if raw.get(field, wanted) != wanted:
            _refuse(where, field, raw[field], repr(wanted))
    if others := [kind for kind in raw.get("layer_types") or [] if kind != "full_attention"]:
        _refuse(where, "layer_types", others[0], "'full_attention' in every layer")
    theta, factor = _rope(raw, where)
    heads = _number(raw, "num_attention_heads", where)
    kv_heads = _number(raw, "num_key_value_heads", where, default=heads)
    hidden = _number(raw, "hidden_size", where)
    # transformers takes 128 for a qwen3 that does not say, and hidden_size / heads for the others
    head_dim = _number(raw, "head_dim", where, default=None if model_type == "qwen3" else hidden // heads)
    if heads % kv_heads:
        _refuse(where, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    layers = _number(raw, "num_hidden_layers", where)
    return ModelShape(
        model_type=model_type,
        vocab_size=_number(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_number(raw, "intermediate_size", where),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(_value(raw, "rms_norm_eps", where)),
        rope_theta=theta,
        rope_factor=factor,
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        qkv_bias=model_type == "qwen2",
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=_number(raw, "max_position_embeddings", where),
        experts=_experts(raw, layers, where) if model_type == "qwen3_moe" else None,
        raw=dict(raw),
    )


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, float | None]:
    """(theta, factor of llama3 scaling or None), from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope: Mapping[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope["rope_theta"] if "rope_theta" in rope else _value(raw, "rope_theta", where))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        _refuse(where, "partial_rotary_factor", partial, "1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        _refuse(where, "rope_type", kind, "'default' or 'llama3'")
    for field, built_in in _LLAMA3.items():
        found = _value(rope, field, where)
        if found != built_in:
            _refuse(where, f"rope scaling: {field}", found, f"{built_in}: Megatron has no other")
    return theta, float(_value(rope, "factor", where))


def _experts(raw: Mapping[str, Any], layers: int, where: str) -> Experts | None:
    count, step = _number(raw, "num_experts", where, default=raw.get("num_local_experts")), _number(raw, "decoder_sparse_step", where, default=1)
    dense = set(raw.get("mlp_only_layers") or [])
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        return None
    top_k, normalised = _number(raw, "num_experts_per_tok", where), bool(raw.get("norm_topk_prob", False))
    if top_k > count:
        _refuse(where, "num_experts_per_tok", top_k, f"at most num_experts ({count})")
    if top_k == 1 and normalised:
        _refuse(where, "norm_topk_prob", True, "false where num_experts_per_tok is 1: the router's weight would always be 1, and never learn")
    return Experts(count, top_k, _number(raw, "moe_intermediate_size", where), normalised, sparse)


def _value(raw: Mapping[str, Any], field: str, where: str) -> Any:
    if raw.get(field) is None:
        raise UnsupportedModelError(f"{where}: no {field!r}; the config of such a model has it")
    return raw[field]


def _number(raw: Mapping[str, Any], field: str, where: str, default: int | None = None) -> int:
    """A positive integer."""
    value = default if raw.get(field) is None and default is not None else _value(raw, field, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(where, field, value, "a positive integer")
    return int(value)


def _refuse(where: str, field: str, found: Any, supported: str) -> None:
    raise UnsupportedModelError(f"{where}: {field} is {found!r}; supported: {supported}")
