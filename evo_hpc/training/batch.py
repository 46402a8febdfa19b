"""A packed micro-batch as tensors: rows predict the next token, so each sequence gives length - 1 rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evo_hpc.training.packing import Sample
from evo_hpc.training.sdpa_attention import PackedLayout, blocks_of


@dataclass(frozen=True)
class MicroBatch:
    """Sequences back to back; row t of one sees its tokens 0..t and scores token t + 1, so the last is only a target.

    `tokens`, `targets`, `positions` are [1, rows]. The rest is [n], for the n rows in `loss_rows`, whose target has a
    loss: elsewhere samples may hold anything. `old`, `ref`, `sampled`, `weights` are None unless every sample has them.
    `sequence` is the number of the sample, in `rows`, that each comes from.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    loss_rows: Tensor
    loss_targets: Tensor
    advantage: Tensor
    scale: Tensor
    sequence: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampled: Tensor | None
    weights: Tensor | None
    rows: list[int]
    layout: PackedLayout


def collate(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Pack `samples`, each of at least two tokens, into one micro-batch on `device`."""
    rows = [len(sample) - 1 for sample in samples]
    loss_rows = np.flatnonzero(np.concatenate([np.asarray(sample.loss_mask[1:]) for sample in samples]))

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    def at_loss(arrays: list[np.ndarray | None]) -> Tensor | None:
        if any(array is None for array in arrays):
            return None
        values = np.concatenate([np.asarray(array[1:], np.float32) for array in arrays if array is not None])
        return tensor(values[loss_rows], torch.float32)

    ids = [np.asarray(sample.token_ids, np.int64) for sample in samples]
    targets = np.concatenate([i[1:] for i in ids])
    of_sample = np.repeat(np.arange(len(samples)), rows)[loss_rows]
    bounds = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32, device=device)
    layout = PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(rows),
        max_seqlen_kv=max(rows),
        blocks=blocks_of(rows, device),
    )
    return MicroBatch(
        tokens=tensor(np.concatenate([i[:-1] for i in ids]), torch.int64)[None],
        targets=tensor(targets, torch.int64)[None],
        positions=tensor(np.concatenate([np.arange(n) for n in rows]), torch.int64)[None],
        loss_rows=tensor(loss_rows, torch.int64),
        loss_targets=tensor(targets[loss_rows], torch.int64),
        advantage=tensor(np.array([sample.advantage for sample in samples])[of_sample], torch.float32),
        scale=tensor(np.array([sample.scale for sample in samples])[of_sample], torch.float32),
        sequence=tensor(of_sample, torch.int64),
        old=at_loss([sample.old_logprobs for sample in samples]),
        ref=at_loss([sample.ref_logprobs for sample in samples]),
        sampled=at_loss([sample.sampled_logprobs for sample in samples]),
        weights=at_loss([sample.weights for sample in samples]),
        rows=rows,
        layout=layout,
    )
