"""Configuration of the domain `arithmetic`, and how many tasks exist."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le
from pydantic import Field, model_validator

from evo_hpc.config.base import Config

Size = Annotated[int, Ge(0), Le(1_000_000)]

# Held-out splits come first, so that a larger train split never changes them.
DRAW_ORDER = ("sealed", "dev", "probe", "train")


class ArithmeticConfig(Config):
    """Which sums the splits hold. The same values give the same tasks everywhere."""

    seed: Annotated[int, Ge(0)] = 0
    """Seed of the task sets."""
    digits: tuple[Annotated[int, Ge(1), Le(6)], ...] = Field(default=(3, 4), min_length=1)
    """Digit counts of the two summands; every split is balanced over them."""
    train: Size = 2048
    """Tasks for training."""
    probe: Size = 64
    """Tasks whose rollouts diagnosis may read."""
    dev: Size = 128
    """Tasks of the promotion gate."""
    sealed: Size = 256
    """Tasks of the final claim."""

    @model_validator(mode="after")
    def _enough_tasks(self) -> ArithmeticConfig:
        if len(set(self.digits)) != len(self.digits):
            raise ValueError(f"digits {list(self.digits)}: each count may be listed once")
        if not self.size("train"):
            raise ValueError("train: at least one task is needed")
        for place, digits in enumerate(self.digits):
            wanted = sum(share(self.size(split), len(self.digits), place) for split in DRAW_ORDER)
            if wanted > pair_count(digits):
                raise ValueError(
                    f"{wanted} tasks with {digits} digits are asked for over all splits, but only {pair_count(digits)} "
                    f"different sums exist: make train, probe, dev or sealed smaller, or add digit counts"
                )
        return self

    def size(self, split: str) -> int:
        """Tasks asked for in `split`."""
        return {"train": self.train, "probe": self.probe, "dev": self.dev, "sealed": self.sealed}[split]


def pair_count(digits: int) -> int:
    """Unordered pairs of two numbers with `digits` digits (no leading zero)."""
    numbers = 9 * 10 ** (digits - 1)
    return numbers * (numbers + 1) // 2


def share(size: int, parts: int, place: int) -> int:
    """How many of `size` tasks fall to part `place` of `parts`: as equal as possible, earlier parts take the rest."""
    return size // parts + (place < size % parts)
