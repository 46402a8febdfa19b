"""Scores by version with their intervals, and differences to the parents with two: at 95 %, and at what the look may spend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from evo_hpc.report.model import SUITE, CampaignReport, Score
from evo_hpc.report.svg import Axis, axis_over, element, line, mark, picture, round_step, standing_class, text, tick_label
from evo_hpc.report.words import percent, percent_interval, points, points_interval

WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 520.0, 30.0, 74.0, 178.0, 14.0, 36.0


@dataclass(frozen=True)
class Row:
    """One line of a forest plot, in percent or points."""

    label: str
    standing: str
    mean: float
    low: float
    high: float
    outer: tuple[float, float] | None
    """A second, wider interval; null = none."""
    words: str
    interval: str


def score_figure(report: CampaignReport) -> Markup | None:
    """Avg@k on dev of every version that has one, the incumbent's as a line; None before there is any."""
    rows = [
        Row(v.id, v.standing, 100 * v.score.avg_at_k, *_ends(v.score), None, percent(v.score.avg_at_k),
            percent_interval(v.score.ci_low, v.score.ci_high))
        for v in report.versions if v.score is not None
    ]
    if not rows:
        return None
    incumbent = next((row for row in rows if row.label == report.incumbent), None)
    told = "; ".join(f"{row.label} {row.words} {row.interval}" for row in rows)
    return _forest("scores", rows, incumbent.mean if incumbent else None, f"Avg@k on {SUITE} by version, with 95 % intervals", told,
                   f"Avg@k on {SUITE}, %", "incumbent")


def _ends(score: Score) -> tuple[float, float]:
    """Of the interval; the score itself where there is none."""
    if score.ci_low is None or score.ci_high is None:
        return 100 * score.avg_at_k, 100 * score.avg_at_k
    return 100 * score.ci_low, 100 * score.ci_high


def difference_figure(report: CampaignReport) -> Markup | None:
    """Every comparison of the gate, in the order of the looks; None before the first."""
    found = sorted((c.look.number, v, c) for v in report.versions for c in v.comparisons)
    rows = [
        Row(f"{v.id}−{c.against}", v.standing, 100 * c.interval.difference, 100 * c.interval.ci_low, 100 * c.interval.ci_high,
            (100 * c.at_look_alpha.ci_low, 100 * c.at_look_alpha.ci_high), points(c.interval.difference),
            points_interval(c.interval.ci_low, c.interval.ci_high))
        for _, v, c in found
    ]
    if not rows:
        return None
    told = "; ".join(f"{row.label} {row.words} points {row.interval}" for row in rows)
    return _forest("differences", rows, 0.0, f"Differences on {SUITE} with their intervals", told, "difference, points", "", left=104.0)


def _forest(key: str, rows: Sequence[Row], reference: float | None, title: str, description: str, unit: str, named: str,
            left: float = LEFT) -> Markup:
    ends = [value for row in rows for value in (row.low, row.high, *(row.outer or ()))] + ([reference] if reference is not None else [])
    axis = axis_over(ends, left, WIDTH - RIGHT, margin=0.06, at_least=2.0)
    bottom = TOP + len(rows) * ROW
    ticks = axis.ticks(5)
    parts = [line(axis(tick), TOP, axis(tick), bottom, "grid") for tick in ticks]
    step = round_step((axis.high - axis.low) / 5)
    parts += [text(axis(tick), bottom + 15, tick_label(tick, step), "tick", "middle") for tick in ticks]
    parts.append(text((left + WIDTH - RIGHT) / 2, bottom + 30, unit, "unit", "middle"))
    if reference is not None:
        parts.append(line(axis(reference), TOP - 4, axis(reference), bottom, "reference"))
        if named:
            parts.append(text(axis(reference) + (4 if axis(reference) < WIDTH - RIGHT - 60 else -4), TOP - 1, named, "reference-label",
                              "start" if axis(reference) < WIDTH - RIGHT - 60 else "end"))
    parts += [_row(row, axis, TOP + (index + 0.5) * ROW) for index, row in enumerate(rows)]
    return picture(key, WIDTH, bottom + BOTTOM, title, description, parts, "forest")


def _row(row: Row, axis: Axis, y: float) -> Markup:
    parts = [text(8, y + 4, row.label, "id")]
    if row.outer is not None:
        parts.append(line(axis(row.outer[0]), y, axis(row.outer[1]), y, "outer"))
        parts += [line(axis(end), y - 4, axis(end), y + 4, "outer") for end in row.outer]
    parts += [line(axis(row.low), y, axis(row.high), y, "inner"), mark(row.standing, axis(row.mean), y)]
    parts.append(text(WIDTH - RIGHT + 68, y + 4, row.words, "value", "end"))
    parts.append(text(WIDTH - 4, y + 4, row.interval, "interval", "end"))
    return element("g", Markup("").join(parts), class_=f"row {standing_class(row.standing)}")
