"""How the reports write numbers, texts and changes: one format for HTML, Markdown, figures and the terminal."""

from __future__ import annotations

import json
import math
import re
import shlex
import unicodedata
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from evo_hpc.lineage.decision import PredictionCheck
from evo_hpc.lineage.factors import Change
from evo_hpc.lineage.version import Prediction

NONE = "–"
"""What stands where there is no number."""
MINUS = "\u2212"


def visible(text: str) -> str:
    """The same text with control and format characters made visible; line breaks and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The same text without control characters, on one line."""
    return re.sub(r"[ \t\n]+", " ", visible(text)).strip(" ")


def shell_word(text: str) -> str:
    """As one word of a shell command on one line; control characters by bash's $'…'."""
    if visible(text) == text and not set(text) & set("\n\t"):
        return shlex.quote(text)
    letters = (c if c.isprintable() and c not in "\\'" else "".join(f"\\x{byte:02x}" for byte in c.encode(errors="surrogateescape")) for c in text)
    return f"$'{''.join(letters)}'"


def percent(value: float | None) -> str:
    """A share of one as `74.6 %`."""
    return NONE if value is None else f"{100 * value:.1f}\u00a0%"


def signed(value: float, digits: int = 1) -> str:
    """With its sign always, and a true minus."""
    return f"{value:+.{digits}f}".replace("-", MINUS) if value else f"{0:.{digits}f}"


def points(difference: float | None) -> str:
    """A difference of two shares of one, in points: `+3.1`."""
    return NONE if difference is None else signed(100 * difference)


def points_interval(low: float | None, high: float | None) -> str:
    """`[+1.2, +5.0]`, in points."""
    return "" if low is None or high is None else f"[{points(low)}, {points(high)}]"


def percent_interval(low: float | None, high: float | None) -> str:
    """`[71.0, 78.2]`, in percent."""
    return "" if low is None or high is None else f"[{100 * low:.1f}, {100 * high:.1f}]"


def number(value: float | None, digits: int = 4) -> str:
    """Any number to `digits` significant digits, short: `0.0013`, `2e-04`, `61.2`, `1,280`."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}".replace("-", MINUS)
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}".replace("-", MINUS, 1 if value < 0 else 0)
    return f"{value:.{digits}g}".replace("-", MINUS)


def alpha(value: float) -> str:
    """An error probability: `0.03040`."""
    return f"{value:.5f}" if value >= 1e-5 else f"{value:.1e}"


def field_value(value: Any) -> str:
    """A recipe's value as it reads in YAML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return number(value, 6).replace(",", "").replace(MINUS, "-")
    return one_line(value) if isinstance(value, str) else one_line(json.dumps(value, sort_keys=True))


def change_words(changes: Sequence[Change], limit: int = 1, *, short: bool = False) -> str:
    """`optimizer.lr 5e-05 → 2e-04`, and how many more there are beyond `limit`; `short`: fields by their last part, `…lr`."""
    # A mapping that gets its first key shows as {} that goes, beside the key that comes: only the key says something.
    real = [c for c in changes if any(side not in (None, {}) for side in (c.before, c.after))] or list(changes)
    shown = [f"{_field(c.field, short)} {field_value(c.before)} → {field_value(c.after)}" for c in real[:limit]]
    more = len(real) - limit
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _field(name: str, short: bool) -> str:
    head, dot, last = one_line(name).rpartition(".")
    return f"…{last}" if short and dot and head else one_line(name)


def duration(seconds: float) -> str:
    """`48 s`, `13 min`, `2 h 05 min`, `3 d 4 h`."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(at: float | None) -> str:
    """A Unix time as `2026-11-30 04:12 UTC`."""
    return NONE if at is None else datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def count(n: int, singular: str, plural: str | None = None) -> str:
    """`1 task`, `160 tasks`."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def is_score(metric: str) -> bool:
    """Whether a metric is a score, a share of one that reads in percent and points."""
    return metric.endswith("/avg_at_k")


def prediction_words(prediction: Prediction) -> str:
    """`dev/avg_at_k up by at least 2.0 points`, or `dev/avg_at_k up`."""
    size = f"{100 * prediction.by:.1f} points" if is_score(prediction.metric) else number(prediction.by)
    return f"{one_line(prediction.metric)} {prediction.direction}" + (f" by at least {size}" if prediction.by else "")


def observed_words(check: PredictionCheck) -> str:
    """`74.6 % → 77.7 %, +3.1 points [+1.2, +5.0]`."""
    if check.before is None or check.after is None:
        return "not measured"
    if is_score(check.prediction.metric):
        gained = f", {points(check.difference)} points" if check.difference is not None else ""
        return f"{percent(check.before)} → {percent(check.after)}{gained} {points_interval(check.ci_low, check.ci_high)}".rstrip()
    words = f"{number(check.before)} → {number(check.after)}"
    if check.difference is not None:
        words += f", {'+' if check.difference > 0 else ''}{number(check.difference)}"
    return words + (f" [{number(check.ci_low)}, {number(check.ci_high)}]" if check.ci_low is not None and check.ci_high is not None else "")
