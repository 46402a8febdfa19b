"""Features of a rollout's token ids: repetition, the same for every domain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def text_features(token_ids: Sequence[int]) -> dict[str, int]:
    """Repetition counts of one response: 3-grams, distinct 3-grams, and the longest run of one token."""
    trigrams = list(zip(token_ids, token_ids[1:], token_ids[2:]))
    return {
        "trigrams_total": len(trigrams),
        "trigrams_unique": len(set(trigrams)),
        "longest_token_run": max((sum(1 for _ in run) for _, run in groupby(token_ids)), default=0),
    }
