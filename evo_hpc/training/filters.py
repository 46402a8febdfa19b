"""Which groups of a batch are learned from, beyond those that teach nothing: by the spread of their rewards. Pure, but for what it remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from evo_hpc.config.recipe import DataFilter


@dataclass(frozen=True)
class SpreadMemory:
    """What earlier batches were like; part of a checkpoint, so that a resumed run filters as an undisturbed one does."""

    mean: float = 0.0
    """Exponential moving average of the reward standard deviation of a group."""
    groups: int = 0
    """How many it was made of."""

    def with_group(self, std: float, decay: float) -> SpreadMemory:
        """After one more group."""
        mean = std if self.groups == 0 else decay * self.mean + (1 - decay) * std
        return replace(self, mean=mean, groups=self.groups + 1)


def top_share(stds: Sequence[float], share: float) -> set[int]:
    """Indices of the fewest groups, the widest first, whose spreads make up `share` of all; of equal ones the earlier."""
    order = sorted(range(len(stds)), key=lambda i: (-stds[i], i))
    total, sums = sum(stds), np.cumsum([stds[i] for i in order])
    needed = next((n for n, found in enumerate(sums, start=1) if found >= share * total * (1 - 1e-12)), len(order))
    return set(order[:needed])


def narrow_groups(stds: Sequence[float], config: DataFilter, memory: SpreadMemory) -> tuple[dict[int, str], SpreadMemory]:
    """Why groups are left out, by index, and what is remembered of all of them.

    stds: reward standard deviation of each group that is not of zero variance, in order. `std_top_p`: the widest that make up that share
    of the spread stay (RAGEN, arXiv 2504.20073). `std_ema`: those stay that are at least `std_ema_factor` times as wide as the moving
    average of the groups before this batch, once `std_warmup` groups were seen. Whatever they say, the widest `keep_at_least` of the
    groups stay.
    """
    why: dict[int, str] = {}
    if config.std_top_p is not None:
        kept = top_share(stds, config.std_top_p)
        why |= {i: "std_top_p" for i in range(len(stds)) if i not in kept}
    if config.std_ema is not None and memory.groups >= config.std_warmup:
        bound = config.std_ema_factor * memory.mean
        why |= {i: "std_ema" for i, std in enumerate(stds) if std < bound and i not in why}
    floor = int(np.ceil(config.keep_at_least * len(stds)))
    widest = sorted(range(len(stds)), key=lambda i: (-stds[i], i))[:floor]
    for index in widest:
        why.pop(index, None)
    if config.std_ema is not None:
        for std in stds:
            memory = memory.with_group(std, config.std_ema)
    return why, memory
