"""Every random stream derives from names, not from the order of events: any worker may run any group, any time."""

from __future__ import annotations

import hashlib
import random


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) determined by `parts`, e.g. (campaign seed, version, step, group, sample)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def refill_positions(count: int, per_step: int, step: int, first: int, more: int, *seed: int | str) -> list[int]:
    """Which tasks a step samples beyond its own `per_step`: those of its groups number first, first + 1, ... (first >= per_step).

    A shuffle of the step's own over the tasks that it has not had; where there are fewer, it begins again. A function of seed, step and
    index alone, whatever was asked for before.
    """
    own = set(positions_for_step(count, per_step, step, *seed))
    rest = [position for position in range(count) if position not in own] or list(range(count))
    random.Random(derive_seed(*seed, "refill", step)).shuffle(rest)
    return [rest[(index - per_step) % len(rest)] for index in range(first, first + more)]


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
