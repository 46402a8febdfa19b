"""What a check of the surroundings found: one record a fact, for people and for scripts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class CheckResult:
    """One finding. An error will make something fail; a warning costs time, work or certainty."""

    check: str
    """What was looked at, in a few words; what it is for comes first: `train: partition`."""
    level: Level
    text: str
    """What was found."""
    remedy: str | None = None
    """What to do about it; null where nothing need be done."""


def near_match(word: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` where a known name is close, else the empty string."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def some_of(names: Iterable[str], most: int = 12) -> str:
    """Names in a sentence, cut off after `most`."""
    every = sorted(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "") or "none"
