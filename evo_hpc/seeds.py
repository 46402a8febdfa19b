"""Every random stream derives from names, not from the order of events: any worker may run any group, any time."""

from __future__ import annotations

import hashlib
import random


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) determined by `parts`, e.g. (campaign seed, version, step, group, sample)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def positions_for_step(count: int, per_step: int, step: int, *seed: int | str) -> list[int]:
    """Which of `count` tasks step number `step` (from 1) samples: epochs of a seeded shuffle, a function of the step alone.

    So a resumed run goes on with the very same data, whatever happened before.
    """
    if count < 1:
        raise ValueError("there is no task to choose from")
    first = (step - 1) * per_step
    chosen, epoch, order = [], -1, []
    for index in range(first, first + per_step):
        if index // count != epoch:
            epoch = index // count
            order = list(range(count))
            random.Random(derive_seed(*seed, "epoch", epoch)).shuffle(order)
        chosen.append(order[index % count])
    return chosen
