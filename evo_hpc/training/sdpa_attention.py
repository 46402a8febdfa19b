"""Causal core attention on torch's scaled_dot_product_attention: dense [s, b, h, d] and packed THD [t, h, d]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evo_hpc.training.mcore import MegatronModule, PackedSeqParams, TransformerConfig, parallel_state, tensor_parallel

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


@dataclass(frozen=True)
class ContextSplit:
    """How a packed micro-batch lies on the ranks of context parallelism, which each hold some rows of every sequence.

    `queries`: the blocks of this rank's rows; same sequences as in the blocks of all rows. `positions` [local rows]: of
    each in its sequence. `order` [rows]: where each row of all is among the rows of the ranks, one rank after the other.
    """

    queries: list[Block]
    positions: Tensor
    order: Tensor


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's packed-sequence parameters plus the blocks, computed once a micro-batch instead of once a layer."""

    blocks: list[Block] | None = None
    context: ContextSplit | None = None


class SdpaCoreAttention(MegatronModule):
    """Drop-in for Megatron's core attention: no dropout, grouped queries.

    Under context parallelism, which needs a PackedLayout with its `context`, each rank gathers the keys and values of all
    (their gradients are summed back) and attends with its own rows' queries.
    """

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
        context = getattr(packed_seq_params, "context", None)
        if context is None:
            assert self.config.context_parallel_size == 1, "context parallelism needs a PackedLayout that says who has which rows"
            parts = [self._packed(query, key, value, block) for block in blocks]
        else:
            group = parallel_state.get_context_parallel_group()
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(t, group=group).index_select(0, context.order) for t in (key, value)
            )
            parts = [self._split(query, key, value, own, block, context) for own, block in zip(context.queries, blocks, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Tensor:
        return _unpad(self._attend(_pad(query, block), _pad(key, block), _pad(value, block)), block)

    def _split(self, query: Tensor, key: Tensor, value: Tensor, own: Block, block: Block, context: ContextSplit) -> Tensor:
        """Queries of some rows, keys of all: who sees whom goes by positions, not by place."""
        last_seen = _pad(context.positions, own)
        sees = torch.arange(block.longest, device=query.device) <= last_seen[..., None]
        return _unpad(self._attend(_pad(query, own), _pad(key, block), _pad(value, block), sees[:, None]), own)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None = None) -> Tensor:
        """[b, s, h, d], keys of [b, t, ...] -> [b, s, h, d]; `sees` [b, 1, s, t], None: causal."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.size(1) != k.size(1)
        if grouped and sees is not None:  # with a mask only torch's plain attention knows groups, which keeps all scores
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=sees, is_causal=sees is None, scale=self.scale, enable_gqa=grouped
        ).transpose(1, 2)


def _pad(t: Tensor, block: Block) -> Tensor:
    """[tokens, ...] -> [count, longest, ...] of the block's sequences."""
    t = t[block.start : block.stop]
    t = t if block.gather is None else t.index_select(0, block.gather)
    return t.view(block.count, block.longest, *t.shape[1:])


def _unpad(t: Tensor, block: Block) -> Tensor:
    """[count, longest, h, d] -> [tokens, h * d]."""
    t = t.flatten(2).flatten(0, 1)
    return t if block.scatter is None else t.index_select(0, block.scatter)
