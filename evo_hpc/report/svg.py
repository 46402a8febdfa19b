"""Drawing of inline SVG: escaped elements, axes with round ticks, and the shapes of a version's standing.

Drawn by hand rather than by a plotting library so that colours follow the page (light, dark, print), the text stays
text, and the bytes depend on the numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from evo_hpc.report.words import MINUS, one_line


def element(name: str, content: str | Markup | None = None, **attributes: str | float | None) -> Markup:
    """One element; text and attributes are escaped. `class_` and names with `_` for `-` are turned into what SVG calls them."""
    shown = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), coordinate(value) if isinstance(value, float) else one_line(str(value)))
        for key, value in attributes.items() if value is not None
    )
    if content is None:
        return Markup("<{}{}/>").format(Markup(name), shown)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), shown, content if isinstance(content, Markup) else escape(one_line(content)))


def coordinate(value: float) -> str:
    """Short, and never `-0`."""
    shown = f"{value:.1f}".removesuffix(".0")
    return "0" if shown == "-0" else shown


def picture(key: str, width: float, height: float, title: str, description: str, content: Sequence[Markup], class_: str = "") -> Markup:
    """A whole `<svg>` that scales with its column; `key` makes its ids unique on the page, title and description are read aloud."""
    head = [element("title", title, id=f"{key}-title"), element("desc", description, id=f"{key}-desc")]
    return element(
        "svg", Markup("").join([*head, *content]), viewBox=f"0 0 {coordinate(width)} {coordinate(height)}", width=float(width), height=float(height),
        role="img", aria_labelledby=f"{key}-title {key}-desc", class_=class_ or None,
    )


def path(points: Sequence[tuple[float, float]]) -> str:
    """The `d` of a line through points."""
    return "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in points)


@dataclass(frozen=True)
class Axis:
    """A scale from data to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 4) -> list[float]:
        """Round values inside the scale."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first) / about))
            return [10.0**power for power in range(first, last + 1, stride)]
        step = round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        return [round(step * i, 12) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(rough: float) -> float:
    """The nearest 1, 2 or 5 times a power of ten at or above `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def axis_over(values: Sequence[float], start: float, end: float, *, margin: float = 0.05, at_least: float = 1e-6, log: bool = False) -> Axis:
    """A scale that holds all of `values` with some room; `at_least`: its smallest span, for values that hardly differ."""
    low, high = min(values), max(values)
    if log:
        span = max(math.log10(high / low), 1.0)
        return Axis(low / 10 ** (margin * span), high * 10 ** (margin * span), start, end, log=True)
    span = max(high - low, at_least, 1e-9 * max(abs(low), abs(high)))
    middle = (low + high) / 2
    return Axis(middle - span * (0.5 + margin), middle + span * (0.5 + margin), start, end)


def tick_label(value: float, step: float) -> str:
    """With as many digits as the distance between ticks needs."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step < 1 else 0
    return f"{value:.{digits}f}".replace("-", MINUS)


SHAPES = {
    "base": "M-5 -5H5V5H-5Z", "kept": "M0 -6A6 6 0 1 1 -0.01 -6Z", "pruned": "M-5 -5L5 5M5 -5L-5 5", "reverted": "M-6 -4H6L0 6Z",
    "stopped early": "M-3.2 -6H3.2L6 -3.2V3.2L3.2 6H-3.2L-6 3.2V-3.2ZM-3 0H3", "open": "M0 -5A5 5 0 1 1 -0.01 -5Z",
}
"""The outline of each standing around (0, 0), so that it shows without colour."""


def standing_class(standing: str) -> str:
    """The CSS class of a standing."""
    return f"is-{standing.replace(' ', '-')}"


def mark(standing: str, x: float, y: float) -> Markup:
    """The shape of a standing at a place."""
    return element("path", d=SHAPES[standing], transform=f"translate({coordinate(x)} {coordinate(y)})", class_=f"mark {standing_class(standing)}")


def text(x: float, y: float, content: str, class_: str = "", anchor: str | None = None) -> Markup:
    """A line of text."""
    return element("text", content, x=float(x), y=float(y), class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)
