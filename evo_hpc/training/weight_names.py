"""Hugging Face <-> Megatron names of a model's weights, and how Megatron joins and shards them. Names and shapes only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from evo_hpc.training.architectures import ModelShape
from evo_hpc.training.errors import WeightsError

EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

Rule = Literal["none", "rows", "columns", "gated", "qkv"]
"""How a weight lies on tensor-parallel ranks: replicated; split by rows or columns; gate and up each split by rows, then
joined; q, k and v interleaved by KV group, then split by rows."""


@dataclass(frozen=True)
class Entry:
    """A Megatron parameter: the Hugging Face tensors that it is made of, and how.

    `expert`: whether it is of one expert, and thus sharded over the expert-tensor-parallel ranks.
    """

    parts: tuple[str, ...]
    rule: Rule
    expert: bool = False


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_LAYER: dict[str, Entry] = {
    # With Transformer Engine a norm's weight is inside the linear layer that follows it: the second name of each pair.
    # A mixture of experts has a router behind its norm: there the norm is a module of its own in both.
    "input_layernorm.weight": Entry(("input_layernorm.weight",), "none"),
    "self_attention.linear_qkv.layer_norm_weight": Entry(("input_layernorm.weight",), "none"),
    "pre_mlp_layernorm.weight": Entry(("post_attention_layernorm.weight",), "none"),
    "mlp.linear_fc1.layer_norm_weight": Entry(("post_attention_layernorm.weight",), "none"),
    "self_attention.q_layernorm.weight": Entry(("self_attn.q_norm.weight",), "none"),
    "self_attention.k_layernorm.weight": Entry(("self_attn.k_norm.weight",), "none"),
    "self_attention.linear_qkv.weight": Entry(tuple(f"{name}.weight" for name in _QKV), "qkv"),
    "self_attention.linear_qkv.bias": Entry(tuple(f"{name}.bias" for name in _QKV), "qkv"),
    "self_attention.linear_proj.weight": Entry(("self_attn.o_proj.weight",), "columns"),
    "mlp.linear_fc1.weight": Entry(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    "mlp.linear_fc2.weight": Entry(("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": Entry(("mlp.gate.weight",), "none"),
}
_TOP: dict[str, Entry] = {
    "embedding.word_embeddings.weight": Entry((EMBEDDING,), "rows"),
    "decoder.final_layernorm.weight": Entry((FINAL_NORM,), "none"),
    "output_layer.weight": Entry((LM_HEAD,), "rows"),
}
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(  # one MLP an expert, or Transformer Engine's grouped linear with a weight an expert
    r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.(?P<fc>linear_fc[12])\.weight|(?P<grouped>linear_fc[12])\.weight(?P<index>\d+))"
)


def entry_of(name: str, shape: ModelShape, *, layer_offset: int = 0, expert_offset: int = 0) -> Entry:
    """What Megatron's parameter `name` is made of.

    `layer_offset`, `expert_offset`: number of layer 0 and of expert 0 of this process in the whole model. A tied model
    has an `output_layer.weight` on the last of several pipeline stages: it is made of the embedding.
    Raises WeightsError on a name that is not in the map.
    """
    if name == "output_layer.weight" and shape.tied:
        return Entry((EMBEDDING,), "rows")
    if name in _TOP:
        return _TOP[name]
    if matched := _IN_LAYER.fullmatch(name):
        layer, rest = int(matched[1]) + layer_offset, matched[2]
        entry = _LAYER.get(rest) or _expert_entry(rest, expert_offset)
        if entry is not None:
            return Entry(tuple(f"model.layers.{layer}.{part}" for part in entry.parts), entry.rule, entry.expert)
    raise WeightsError(f"Megatron's parameter {name} has no Hugging Face name for model_type {shape.model_type!r}; report it: the map lacks it")


def _expert_entry(rest: str, offset: int) -> Entry | None:
    matched = _EXPERT.fullmatch(rest)
    if matched is None:
        return None
    prefix = f"mlp.experts.{int(matched['one'] or matched['index']) + offset}"
    if (matched["fc"] or matched["grouped"]) == "linear_fc1":
        return Entry((f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), "gated", True)
    return Entry((f"{prefix}.down_proj.weight",), "columns", True)


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face checkpoint, in the order of the network."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    for i in range(shape.num_layers):
        shapes.update({f"model.layers.{i}.{name}": size for name, size in _layer_shapes(shape, shape.is_sparse(i)).items()})
    shapes[FINAL_NORM] = (shape.hidden_size,)
    if not shape.tied:
        shapes[LM_HEAD] = (shape.vocab_size, shape.hidden_size)
    return shapes


def _layer_shapes(shape: ModelShape, sparse: bool) -> dict[str, tuple[int, ...]]:
    hidden, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in zip(_QKV, (q, kv, kv), strict=True):
        sizes[f"{name}.weight"] = (rows, hidden)
        if shape.qkv_bias:
            sizes[f"{name}.bias"] = (rows,)
    if shape.qk_norm:
        sizes |= {"self_attn.q_norm.weight": (shape.head_dim,), "self_attn.k_norm.weight": (shape.head_dim,)}
    sizes |= {"self_attn.o_proj.weight": (hidden, q), "post_attention_layernorm.weight": (hidden,)}
    if not sparse or shape.experts is None:
        return sizes | _mlp_shapes("mlp", hidden, shape.intermediate_size)
    sizes["mlp.gate.weight"] = (shape.experts.count, hidden)
    for i in range(shape.experts.count):
        sizes |= _mlp_shapes(f"mlp.experts.{i}", hidden, shape.experts.intermediate_size)
    return sizes


def _mlp_shapes(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"{prefix}.{name}.weight": size for name, size in zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True)}
