"""Samples, their checks, and packing into micro-batches under a token budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evo_hpc.training.errors import SampleError


@dataclass(frozen=True)
class Sample:
    """One token sequence of the policy with what the loss needs; every array is aligned to `token_ids`.

    `loss_mask` is 1 where the policy produced the token. Log-probabilities at t are log p(token_t | tokens before t);
    position 0 is never scored. `sampled_logprobs` are those of the rollout engine; `weights` correct the policy gradient of each token
    for them, `scale` is how much the loss of each token counts (training/weighting.py makes both).
    """

    token_ids: list[int]
    loss_mask: list[int]
    advantage: float = 0.0
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    sampled_logprobs: np.ndarray | None = None
    weights: np.ndarray | None = None
    scale: float = 1.0

    def __len__(self) -> int:
        return len(self.token_ids)


def check(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raise SampleError, naming the sample: empty or misaligned parts, a scored first token, an id out of range."""
    for i, sample in enumerate(samples):
        length = len(sample)
        if length == 0:
            raise SampleError(f"sample {i} has no tokens")
        arrays = {
            "loss_mask": sample.loss_mask,
            "old_logprobs": sample.old_logprobs,
            "ref_logprobs": sample.ref_logprobs,
            "sampled_logprobs": sample.sampled_logprobs,
            "weights": sample.weights,
        }
        for name, array in arrays.items():
            if array is not None and len(array) != length:
                raise SampleError(f"sample {i}: {name} has {len(array)} entries, token_ids {length}")
        if sample.loss_mask[0]:
            raise SampleError(f"sample {i}: loss_mask[0] is 1, but the first token has no context to be predicted from")
        low, high = min(sample.token_ids), max(sample.token_ids)
        if low < 0 or high >= vocab_size:
            raise SampleError(
                f"sample {i}: token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
            )


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of each micro-batch: at most `token_budget` tokens, neighbours in length, or one longer sample alone.

    Deterministic. Longest first, so that the attention of a micro-batch pads little and the largest comes first.
    """
    micro_batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not micro_batches or lengths[index] > room:
            micro_batches.append([])
            room = token_budget
        micro_batches[-1].append(index)
        room -= lengths[index]
    return micro_batches


def shard(lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Indices of this data-parallel rank, longest first to the least loaded; deterministic, one owner an index."""
    load = [0] * world_size
    mine: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        owner = min(range(world_size), key=lambda r: (load[r], r))
        load[owner] += lengths[index]
        if owner == rank:
            mine.append(index)
    return sorted(mine)
