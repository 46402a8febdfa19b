"""The tasks of `arithmetic`: disjoint splits drawn without replacement from all unordered pairs."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from itertools import chain, islice, zip_longest

from evo_hpc.domains.arithmetic.config import DRAW_ORDER, ArithmeticConfig, pair_count, share
from evo_hpc.domains.base import SPLITS, Task


def make_tasks(config: ArithmeticConfig) -> dict[str, list[Task]]:
    """Tasks of every split: no pair (12+34 is 34+12) occurs twice; digit counts alternate within a split."""
    by_split: dict[str, list[list[Task]]] = {split: [] for split in SPLITS}
    for place, digits in enumerate(config.digits):
        pairs = draw_pairs(config.seed, digits)
        for split in DRAW_ORDER:
            wanted = share(config.size(split), len(config.digits), place)
            by_split[split].append([make_task(a, b, split) for a, b in islice(pairs, wanted)])
    return {split: _interleave(columns) for split, columns in by_split.items()}


def make_task(a: int, b: int, split: str) -> Task:
    """The task `a+b`; its id is that of the unordered pair."""
    low, high = sorted((a, b))
    return Task(
        task_id=f"add-{low}-{high}",
        split=split,
        messages=({"role": "user", "content": f"{a}+{b}"},),
        answer=str(a + b),
        attributes={"digits": len(str(high)), "carries": carry_count(a, b)},
    )


def carry_count(a: int, b: int) -> int:
    """Carries in the written sum: each one lowers the digit sum by nine."""
    return (digit_sum(a) + digit_sum(b) - digit_sum(a + b)) // 9


def digit_sum(number: int) -> int:
    """Sum of the decimal digits."""
    return sum(int(digit) for digit in str(number))


def draw_pairs(seed: int, digits: int) -> Iterator[tuple[int, int]]:
    """All pairs of `digits`-digit numbers in a random order, each unordered pair once, either number first.

    A Fisher-Yates shuffle that keeps only the moved entries: the first n do not depend on how many are drawn later.
    """
    rng = random.Random(derive_seed("arithmetic-tasks", seed, digits))
    total = pair_count(digits)
    moved: dict[int, int] = {}
    for i in range(total):
        j = rng.randrange(i, total)
        index = moved.get(j, j)
        moved[j] = moved.pop(i, i)
        pair = unrank_pair(index, 10 ** (digits - 1))
        yield pair if rng.random() < 0.5 else pair[::-1]


def unrank_pair(index: int, smallest: int) -> tuple[int, int]:
    """The `index`-th pair (low <= high), ordered by high: high contributes high - smallest + 1 pairs."""
    row = (math.isqrt(8 * index + 1) - 1) // 2
    return smallest + index - row * (row + 1) // 2, smallest + row


def derive_seed(*parts: str | int) -> int:
    """A 64-bit seed from named parts, the same in every process and Python version."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode("utf-8")).digest()[:8], "big")


def _interleave(columns: list[list[Task]]) -> list[Task]:
    return [task for task in chain.from_iterable(zip_longest(*columns)) if task is not None]
