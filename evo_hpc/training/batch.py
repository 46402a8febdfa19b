"""A packed micro-batch as tensors: rows predict the next token, so each sequence gives length - 1 rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evo_hpc.training.packing import Sample
from evo_hpc.training.sdpa_attention import ContextSplit, PackedLayout, blocks_of


@dataclass(frozen=True)
class Split:
    """Which rows of a micro-batch this rank has.

    Of several context-parallel `ranks`, rank r has pieces r and 2 ranks - 1 - r of the 2 ranks pieces of every sequence
    (as Megatron's rotary embedding and Transformer Engine have it, so that causal attention is as much work for each);
    sequences are padded on the right to whole pieces. `multiple` divides each rank's number of rows: sequence
    parallelism splits them evenly.
    """

    ranks: int = 1
    rank: int = 0
    multiple: int = 1

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """Padded lengths of sequences of `rows`, with one of nothing but padding at the end where the sum asks for it."""
        unit = 2 * self.ranks if self.ranks > 1 else 1
        padded = [-(-n // unit) * unit for n in rows]
        filler = 0
        while (sum(padded) + filler) // self.ranks % self.multiple:
            filler += unit
        return [*padded, filler] if filler else padded

    def own(self, lengths: Sequence[int], rank: int | None = None) -> np.ndarray:
        """Numbers of the rows, of all in packed order, that this rank (or `rank`) has, in its order."""
        if self.ranks == 1:
            return np.arange(sum(lengths))
        rank, pieces, start = self.rank if rank is None else rank, list[np.ndarray](), 0
        for length in lengths:
            piece = length // (2 * self.ranks)
            for number in (rank, 2 * self.ranks - 1 - rank):
                pieces.append(start + number * piece + np.arange(piece))
            start += length
        return np.concatenate(pieces)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences back to back; row t of one sees its tokens 0..t and scores token t + 1, so the last is only a target.

    `tokens`, `targets`, `positions` are [1, local rows]; where context parallelism splits sequences (`Split`), only this
    rank's rows are there. `scored` [m] are the local rows that are no padding, `scored_at` [m] the numbers of these rows
    among all that `rows` counts. The rest is [n], for the n local rows in `loss_rows`, whose target has a loss: elsewhere
    samples may hold anything. `old`, `ref`, `sampled`, `weights` are None unless every sample has them. `sequence` is the
    number of the sample, in `rows`, that each comes from.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    scored: Tensor
    scored_at: np.ndarray
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


def collate(samples: Sequence[Sample], device: torch.device, split: Split = Split()) -> MicroBatch:  # noqa: B008
    """Pack `samples`, each of at least two tokens, into one micro-batch on `device`, or this rank's rows of it."""
    rows = [len(sample) - 1 for sample in samples]
    lengths = split.lengths(rows)
    own = split.own(lengths)
    bounds = np.cumsum([0, *lengths])
    at = np.concatenate([start + np.arange(n) for start, n in zip(bounds, rows, strict=False)])  # of the rows that are no padding

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    def placed(values: np.ndarray, empty: float) -> np.ndarray:
        full = np.full(bounds[-1], empty, values.dtype)
        full[at] = values
        return full[own]

    of_all = placed(np.arange(len(at)), -1)  # local row -> number among the rows that are no padding
    scored = np.flatnonzero(of_all >= 0)
    loss_mask = np.concatenate([np.asarray(sample.loss_mask[1:]) for sample in samples])
    loss_rows = scored[loss_mask[of_all[scored]] != 0]
    of_loss = of_all[loss_rows]

    def at_loss(arrays: list[np.ndarray | None]) -> Tensor | None:
        if any(array is None for array in arrays):
            return None
        values = np.concatenate([np.asarray(array[1:], np.float32) for array in arrays if array is not None])
        return tensor(values[of_loss], torch.float32)

    ids = [np.asarray(sample.token_ids, np.int64) for sample in samples]
    targets = np.concatenate([i[1:] for i in ids])
    of_sample = np.repeat(np.arange(len(samples)), rows)[of_loss]
    positions = np.concatenate([np.arange(n) for n in lengths])[own]
    return MicroBatch(
        tokens=tensor(placed(np.concatenate([i[:-1] for i in ids]), 0), torch.int64)[None],
        targets=tensor(placed(targets, 0), torch.int64)[None],
        positions=tensor(positions, torch.int64)[None],
        scored=tensor(scored, torch.int64),
        scored_at=of_all[scored],
        loss_rows=tensor(loss_rows, torch.int64),
        loss_targets=tensor(targets[of_loss], torch.int64),
        advantage=tensor(np.array([sample.advantage for sample in samples])[of_sample], torch.float32),
        scale=tensor(np.array([sample.scale for sample in samples])[of_sample], torch.float32),
        sequence=tensor(of_sample, torch.int64),
        old=at_loss([sample.old_logprobs for sample in samples]),
        ref=at_loss([sample.ref_logprobs for sample in samples]),
        sampled=at_loss([sample.sampled_logprobs for sample in samples]),
        weights=at_loss([sample.weights for sample in samples]),
        rows=rows,
        layout=_layout(lengths, positions, split, device),
    )


def _layout(lengths: list[int], positions: np.ndarray, split: Split, device: torch.device) -> PackedLayout:
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    context = None
    if split.ranks > 1:
        order = np.argsort(np.concatenate([split.own(lengths, rank) for rank in range(split.ranks)]))
        context = ContextSplit(
            blocks_of([n // split.ranks for n in lengths], device), torch.from_numpy(positions).to(device), torch.from_numpy(order).to(device)
        )
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        blocks=blocks_of(lengths, device),
        context=context,
    )
