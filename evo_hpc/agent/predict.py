"""A prediction against what happened: held, failed, or inconclusive; by code, not by opinion."""

from __future__ import annotations

import math
from typing import Literal

from evo_hpc.agent.rules import SCORES
from evo_hpc.lineage.decision import PredictionCheck
from evo_hpc.lineage.findings import Measure
from evo_hpc.lineage.version import Prediction

_Z95 = 1.96
_TIE = 1e-9
"""Two numbers this close are equal: 0.3 - 0.1 is a rise by 0.2."""


def check_prediction(
    prediction: Prediction, against: str, before: Measure | None, after: Measure | None, interval: tuple[float, float, float] | None,
) -> PredictionCheck:
    """Check a prediction, by the movement and its 95 % interval.

    `interval` is (difference, ci_low, ci_high) of after minus before, for scores. For an analyzer's measure it is made
    of the two standard errors, where both are there. Without one the movement alone decides, and `why` says so.
    """
    start, end = (None if measure is None else measure.value for measure in (before, after))
    if start is None or end is None:
        missing = " and ".join(who for who, value in ((against, start), ("this version", end)) if value is None)
        return PredictionCheck(
            prediction=prediction, against=against, before=start, after=end, outcome="inconclusive",
            why=f"{prediction.metric} has no value for {missing}, so the prediction ({_promise(prediction)}) cannot be checked.",
        )
    assert before is not None and after is not None
    if interval is None and before.se is not None and after.se is not None:
        half = _Z95 * math.hypot(before.se, after.se)
        interval = (end - start, end - start - half, end - start + half)
    difference = end - start if interval is None else interval[0]
    outcome = _outcome(prediction, difference, interval)
    return PredictionCheck(
        prediction=prediction, against=against, before=start, after=end, difference=difference,
        ci_low=None if interval is None else interval[1], ci_high=None if interval is None else interval[2],
        outcome=outcome, why=_why(prediction, against, start, end, difference, interval, outcome),
    )


Outcome = Literal["held", "failed", "inconclusive"]


def _outcome(prediction: Prediction, difference: float, interval: tuple[float, float, float] | None) -> Outcome:
    up = prediction.direction == "up"
    moved = difference if up else -difference
    enough = moved >= prediction.by - _TIE
    if interval is None:
        return "held" if enough and moved > 0 else "failed"
    low, high = interval[1:] if up else (-interval[2], -interval[1])
    if enough and low > 0:
        return "held"
    return "failed" if high < prediction.by - _TIE or high <= 0 else "inconclusive"


def _why(
    prediction: Prediction, against: str, start: float, end: float, difference: float, interval: tuple[float, float, float] | None, outcome: Outcome,
) -> str:
    metric = prediction.metric
    moved = "did not move" if difference == 0 else f"{'rose' if difference > 0 else 'fell'} by {_amount(metric, abs(difference))}"
    seen = f"{metric} {moved} against {against}, from {_number(metric, start)} to {_number(metric, end)}"
    if interval is None:
        return f"{seen}, and the prediction ({_promise(prediction)}) {outcome}, by these two values alone: there is no interval."
    around = f"95 % interval {_signed(metric, interval[1])} to {_signed(metric, interval[2])}"
    verdict = "is inconclusive" if outcome == "inconclusive" else outcome
    return f"{seen} ({around}): the prediction ({_promise(prediction)}) {verdict}."


def _promise(prediction: Prediction) -> str:
    if prediction.by == 0:
        return prediction.direction
    return f"{prediction.direction} by at least {_amount(prediction.metric, prediction.by)}"


def _amount(metric: str, value: float) -> str:
    if metric not in SCORES:
        return _number(metric, value)
    return f"{_number(metric, value)} point{'' if _number(metric, value) == '1.0' else 's'}"


def _number(metric: str, value: float) -> str:
    """Scores in points, one digit behind the point; measures to three digits."""
    return f"{100 * value:.1f}" if metric in SCORES else f"{value:.3g}"


def _signed(metric: str, value: float) -> str:
    return f"{100 * value:+.1f}" if metric in SCORES else f"{value:+.3g}"
