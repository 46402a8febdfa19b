from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.training.batch import collate
from evo_hpc.training.packing import Sample, pack, shard
from evo_hpc.training.sdpa_attention import MAX_PADDING, blocks_of

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 80))
def test_every_sample_travels_once_within_the_budget_or_alone(lengths, budget):
    micro_batches = pack(lengths, budget)
    assert sorted(i for batch in micro_batches for i in batch) == list(range(len(lengths)))
    assert all(batch and (len(batch) == 1 or sum(lengths[i] for i in batch) <= budget) for batch in micro_batches)
    assert micro_batches == pack(lengths, budget)


@given(LENGTHS, st.integers(1, 5))
def test_every_sample_has_one_rank_and_the_load_is_even(lengths, world_size):
    shares = [shard(lengths, rank, world_size) for rank in range(world_size)]
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_blocks_cover_the_packed_rows_in_order_and_pad_little(lengths):
    rows = torch.arange(sum(lengths))
    seen = []
    for block in blocks_of(lengths):
        part = rows[block.start : block.stop]
        padded = part if block.gather is None else part[block.gather]
        assert len(padded) == block.count * block.longest <= MAX_PADDING * len(part)
        seen.append(padded if block.scatter is None else padded[block.scatter])
    assert torch.equal(torch.cat(seen), rows)


def test_collate_shifts_targets_and_keeps_only_tokens_with_a_loss():
    old = np.array([0, -1, -2, -3], np.float32)
    first = Sample([5, 6, 7, 8], [0, 0, 1, 1], 2.0, old_logprobs=old)
    second = Sample([1, 2], [0, 1], -1.0, old_logprobs=np.array([0, -9], np.float32))
    batch = collate([first, second], torch.device("cpu"))
    assert batch.tokens.tolist() == [[5, 6, 7, 1]] and batch.targets.tolist() == [[6, 7, 8, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 0]] and batch.rows == [3, 1]
    assert batch.layout.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.loss_rows.tolist() == [1, 2, 3] and batch.loss_targets.tolist() == [7, 8, 2]
    assert batch.advantage.tolist() == [2.0, 2.0, -1.0] and batch.old is not None and batch.old.tolist() == [-2, -3, -9]
    assert batch.ref is None
