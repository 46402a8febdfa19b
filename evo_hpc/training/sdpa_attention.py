"""Causal core attention on torch's scaled_dot_product_attention: dense [s, b, h, d] and packed THD [t, h, d]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evo_hpc.training.mcore import MegatronModule, PackedSeqParams, TransformerConfig

MAX_PADDING = 1.25
"""A block of sequences is padded to its longest at most this much: beyond it, another block is cheaper."""


@dataclass(frozen=True)
class Block:
    """Neighbouring sequences of a packed micro-batch that attend together, right-padded to the longest.

    `gather` [n * longest]: packed row of each padded slot (padding repeats the last row).
    `scatter` [tokens]: padded slot of each packed row.
    """

    start: int
    stop: int
    count: int
    longest: int
    gather: Tensor | None
    scatter: Tensor | None


def blocks_of(lengths: list[int], device: torch.device | str = "cpu") -> list[Block]:
    """Split sequences, in packed order, into blocks of similar length; causal attention never sees right padding."""
    blocks: list[Block] = []
    first, offset = 0, 0
    while first < len(lengths):
        last, longest, total = first, 0, 0
        while last < len(lengths):
            new_longest = max(longest, lengths[last])
            if new_longest * (last - first + 1) > MAX_PADDING * (total + lengths[last]):
                break
            longest, total, last = new_longest, total + lengths[last], last + 1
        blocks.append(_block(lengths[first:last], offset, longest, total, device))
        first, offset = last, offset + total
    return blocks


def _block(lengths: list[int], offset: int, longest: int, total: int, device: torch.device | str) -> Block:
    count = len(lengths)
    if count * longest == total:
        return Block(offset, offset + total, count, longest, None, None)
    size = torch.tensor(lengths)
    begin = torch.cumsum(size, 0) - size
    slot = torch.arange(longest)
    gather = (begin[:, None] + torch.minimum(slot[None], size[:, None] - 1)).flatten()
    scatter = (torch.arange(count)[:, None] * longest + slot[None])[slot[None] < size[:, None]]
    return Block(offset, offset + total, count, longest, gather.to(device), scatter.to(device))


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the blocks, computed once a micro-batch instead of once a layer."""

    blocks: list[Block] | None = None


class SdpaCoreAttention(MegatronModule):
    """Drop-in for Megatron's core attention: no dropout, grouped queries, one context-parallel rank."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[t, h, d] -> [t, h * d] with `packed_seq_params`, else [s, b, h, d] -> [s, b, h * d]. The mask is causal."""
        if packed_seq_params is None:
            q, k, v = (t.permute(1, 0, 2, 3) for t in (query, key, value))
            return self._attend(q, k, v).permute(1, 0, 2, 3).flatten(2)
        blocks = getattr(packed_seq_params, "blocks", None)
        if blocks is None:
            blocks = blocks_of(torch.diff(packed_seq_params.cu_seqlens_q).tolist(), query.device)
        parts = [self._packed(query, key, value, block) for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Tensor:
        def padded(t: Tensor) -> Tensor:
            t = t[block.start : block.stop]
            t = t if block.gather is None else t.index_select(0, block.gather)
            return t.view(block.count, block.longest, *t.shape[1:])

        out = self._attend(padded(query), padded(key), padded(value)).flatten(2).flatten(0, 1)
        return out if block.scatter is None else out.index_select(0, block.scatter)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[b, s, h, d] -> [b, s, h, d]."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped).transpose(
            1, 2
        )
