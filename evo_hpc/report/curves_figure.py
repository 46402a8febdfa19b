"""Training curves as small multiples: every run in one colour throughout, smoothed lines over the faint raw ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from evo_hpc.report.model import CampaignReport, Curves, VersionReport
from evo_hpc.report.svg import Axis, axis_over, coordinate, element, line, path, picture, round_step, text, tick_label
from evo_hpc.report.words import field_value, number

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340.0, 196.0, 46.0, 12.0, 30.0, 26.0
COLOURS = 10
"""Colours of the page's palette; the eleventh run takes the first again, dashed."""
STOP = "M-4 -4L4 4M4 -4L-4 4M-6 -6H6V6H-6Z"
"""The outline of the mark at the end of a run that was stopped early."""
_RAW_POINTS = 300
_LOG_RATIO = 30.0
Point = tuple[int, float]


@dataclass(frozen=True)
class Panel:
    """One metric of the step table, or the sum of several."""

    key: str
    title: str
    columns: tuple[str, ...]
    unit: str = ""


PANELS = (
    Panel("score", "Train score", ("score_mean",)), Panel("reward", "Reward", ("reward_mean",)), Panel("entropy", "Entropy", ("entropy",), "nat"),
    Panel("kl", "KL to the init", ("kl",), "nat"), Panel("grad", "Gradient norm", ("grad_norm",)),
    Panel("clip", "Clip fraction", ("clip_fraction_low", "clip_fraction_high")),
    Panel("zero", "Zero-variance groups", ("zero_variance_fraction",)), Panel("length", "Response length", ("response_tokens_mean",), "tokens"),
    Panel("truncated", "Truncated responses", ("truncated_fraction",)),
)
COLUMNS = tuple(column for panel in PANELS for column in panel.columns)


def trained(report: CampaignReport) -> list[VersionReport]:
    """Versions with a curve, in the order that gives them their colours."""
    return [v for v in report.versions if v.curves is not None and v.curves.steps]


def series_class(index: int) -> str:
    """The CSS classes of the index-th run."""
    return f"s{index % COLOURS}{' dashed' if index // COLOURS % 2 else ''}"


def curve_figures(report: CampaignReport) -> list[Markup]:
    """One picture a metric that any run has; empty before the first run has written a step."""
    runs = trained(report)
    return [drawn for panel in PANELS if (drawn := _panel(panel, runs, report.incumbent)) is not None]


def points_of(curves: Curves, panel: Panel) -> list[Point]:
    """The panel's value at each step that has one."""
    columns = [curves.values[name] for name in panel.columns if name in curves.values]
    if len(columns) < len(panel.columns):
        return []
    rows = zip(curves.steps, *columns, strict=True)
    return [(step, sum(values)) for step, *values in rows if all(value is not None for value in values)]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Mean over the `window` (odd) points around each, at the ends over those that there are."""
    half, values = window // 2, [value for _, value in points]
    near = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [(step, sum(around) / len(around)) for (step, _), around in zip(points, near, strict=True)]


def window_of(points: Sequence[Point]) -> int:
    """An odd number of steps, a tenth of the run, from 3 to 25."""
    return max(3, min(25, len(points) // 10)) | 1


def thinned(points: Sequence[Point], most: int = _RAW_POINTS) -> list[Point]:
    """At most about `most` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _panel(panel: Panel, runs: Sequence[VersionReport], incumbent: str | None) -> Markup | None:
    lines = [(index, run, points_of(run.curves, panel)) for index, run in enumerate(runs) if run.curves]
    lines = [entry for entry in lines if entry[2]]
    if not lines:
        return None
    values = [value for _, _, points in lines for _, value in points]
    # A run that blew up must not press all others flat.
    log = min(values) > 0 and max(values) / sorted(values)[len(values) // 2] > _LOG_RATIO
    y = axis_over(values, HEIGHT - BOTTOM, TOP, at_least=1e-9, log=log)
    x = axis_over([step for _, _, points in lines for step, _ in points], LEFT, WIDTH - RIGHT, margin=0.02)
    parts = _frame(x, y, panel, log)
    parts += [element("path", d=path([(x(s), y(v)) for s, v in thinned(points)]), class_=f"raw {series_class(i)}") for i, _, points in lines]
    for index, run, points in sorted(lines, key=lambda entry: entry[1].id == incumbent):
        smooth = smoothed(points, window_of(points))
        class_ = f"smooth {series_class(index)}{' the-incumbent' if run.id == incumbent else ''}"
        parts.append(element("path", element("title", run.id), d=path([(x(s), y(v)) for s, v in thinned(smooth)]), class_=class_))
        if run.stopped_early is not None:
            end = smooth[-1]
            parts.append(element("path", element("title", f"{run.id} stopped early at step {run.stopped_early.step}"), d=STOP,
                                 transform=f"translate({coordinate(x(end[0]))} {coordinate(y(end[1]))})", class_=f"stop {series_class(index)}"))
    told = "; ".join(f"{run.id}: {number(points[0][1], 3)} at step {points[0][0]} to {number(points[-1][1], 3)} at step {points[-1][0]}"
                     for _, run, points in lines)
    return picture(f"curve-{panel.key}", WIDTH, HEIGHT, f"{panel.title} by training step", told, parts, "panel")


def _frame(x: Axis, y: Axis, panel: Panel, log: bool) -> list[Markup]:
    about = f"{panel.unit}{', ' if panel.unit and log else ''}{'log scale' if log else ''}"
    title = [element("tspan", panel.title, class_="panel-title"), *([element("tspan", about, class_="unit", dx="6")] if about else [])]
    parts = [element("text", Markup("").join(title), x=LEFT - 38, y=TOP - 14)]
    step = round_step((y.high - y.low) / 4)
    for tick in y.ticks(4):
        parts += [line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid"),
                  text(LEFT - 6, y(tick) + 4, field_value(tick) if log else tick_label(tick, step), "tick", "end")]
    ticks = [tick for tick in x.ticks(5) if tick == int(tick)]
    parts += [text(x(tick), HEIGHT - BOTTOM + 15, str(int(tick)), "tick", "middle") for tick in ticks]
    return parts
