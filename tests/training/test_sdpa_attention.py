from __future__ import annotations

import math

import pytest
import torch

from evo_hpc.training import parallel
from evo_hpc.training.mcore import PackedSeqParams, TransformerConfig
from evo_hpc.training.sdpa_attention import PackedLayout, SdpaCoreAttention, blocks_of


@pytest.fixture(scope="module")
def attention() -> SdpaCoreAttention:
    parallel.initialize()
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16)
    return SdpaCoreAttention(config, layer_number=1, attn_mask_type=None, attention_type="self")


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention of one sequence [s, h, d], term by term."""
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    scores = torch.einsum("shd,thd->hst", q, k) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -math.inf)
    return torch.einsum("hst,thd->shd", scores.softmax(-1), v).flatten(1)


def random_qkv(*shape: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, heads, 16) for heads in (4, 2, 2)]


@pytest.mark.parametrize("lengths", [[5], [7, 7, 7], [9, 8, 8, 3, 1], [1, 40, 2, 39, 3]])
@pytest.mark.parametrize("with_blocks", [True, False])
def test_packed_sequences_do_not_see_each_other(attention, lengths, with_blocks):
    q, k, v = random_qkv(sum(lengths))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    plain = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    layout = PackedLayout(**plain, blocks=blocks_of(lengths)) if with_blocks else PackedSeqParams(**plain)
    out = attention(q, k, v, None, packed_seq_params=layout).split(lengths)
    for got, *qkv in zip(out, q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        torch.testing.assert_close(got, by_hand(*qkv), atol=1e-5, rtol=1e-5)


def test_dense_batches_are_causal(attention):
    q, k, v = random_qkv(6, 3)
    out = attention(q, k, v, None)
    for b in range(3):
        torch.testing.assert_close(out[:, b], by_hand(q[:, b], k[:, b], v[:, b]), atol=1e-5, rtol=1e-5)
