"""Predictions at their edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.agent.predict import check_prediction
from evo_hpc.lineage.findings import Measure
from evo_hpc.lineage.version import Prediction

DEV = "dev/avg_at_k"
DEAD = "signal.dead_group_fraction"


def score(by: float, interval: tuple[float, float, float] | None, direction: str = "up") -> object:
    found = check_prediction(
        Prediction(metric=DEV, direction=direction, by=by), "v0001", Measure(value=0.5),  # type: ignore[arg-type]
        Measure(value=0.5 + (interval[0] if interval else 0.03)), interval,
    )
    return found.outcome


@pytest.mark.parametrize("by, interval, outcome", [
    (0.02, (0.03, 0.01, 0.05), "held"),
    (0.03, (0.03, 0.01, 0.05), "held"),            # exactly as much as was said
    (0.02, (0.03, 0.0, 0.06), "inconclusive"),     # the interval touches zero
    (0.02, (0.03, -0.01, 0.07), "inconclusive"),
    (0.04, (0.03, 0.01, 0.05), "inconclusive"),    # less than was said, but that much is possible
    (0.05, (0.03, 0.01, 0.05), "inconclusive"),    # just possible
    (0.051, (0.03, 0.01, 0.05), "failed"),         # up, but that much is ruled out
    (0.0, (-0.02, -0.04, 0.0), "failed"),          # not up at all
    (0.0, (-0.02, -0.04, 0.001), "inconclusive"),
    (0.0, (0.0, 0.0, 0.0), "failed"),
    (0.0, (0.01, 0.001, 0.02), "held"),
])
def test_a_score_is_judged_by_its_interval(by: float, interval: tuple[float, float, float], outcome: str) -> None:
    assert score(by, interval) == outcome
    difference, low, high = interval
    assert score(by, (-difference, -high, -low), "down") == outcome, "down is up in a mirror"


def test_a_tie_is_a_tie_despite_binary_fractions() -> None:
    assert 0.3 - 0.1 < 0.2
    found = check_prediction(Prediction(metric="a.b", direction="up", by=0.2), "v0001", Measure(value=0.1), Measure(value=0.3), None)
    assert found.outcome == "held"


@pytest.mark.parametrize("before, after, direction, by, outcome", [
    (0.5, 0.4, "down", 0.05, "held"), (0.5, 0.4, "down", 0.2, "failed"), (0.5, 0.4, "up", 0.05, "failed"),
    (0.5, 0.5, "down", 0.0, "failed"), (0.5, 0.6, "up", 0.0, "held"),
])
def test_without_an_interval_the_movement_decides_and_that_is_said(before: float, after: float, direction: str, by: float, outcome: str) -> None:
    for ses in ((None, None), (0.1, None), (None, 0.1)):
        found = check_prediction(
            Prediction(metric=DEAD, direction=direction, by=by), "v0001", Measure(value=before, se=ses[0]),  # type: ignore[arg-type]
            Measure(value=after, se=ses[1]), None,
        )
        assert (found.outcome, found.ci_low, found.ci_high) == (outcome, None, None)
        assert "there is no interval" in found.why


def test_two_standard_errors_make_an_interval() -> None:
    less = Prediction(metric=DEAD, direction="down", by=0.05)
    found = check_prediction(less, "v0001", Measure(value=0.5, se=0.03), Measure(value=0.4, se=0.04), None)
    assert found.outcome == "held" and found.difference == pytest.approx(-0.1)
    assert (found.ci_low, found.ci_high) == (pytest.approx(-0.198), pytest.approx(-0.002)), "1.96 x sqrt(0.03^2 + 0.04^2) = 0.098"
    assert found.why == ("signal.dead_group_fraction fell by 0.1 against v0001, from 0.5 to 0.4 (95 % interval -0.198 to -0.002): "
                         "the prediction (down by at least 0.05) held.")
    wide = check_prediction(less, "v0001", Measure(value=0.5, se=0.05), Measure(value=0.4, se=0.05), None)
    assert wide.outcome == "inconclusive"


@pytest.mark.parametrize("before, after, missing", [
    (None, Measure(value=0.5), "v0001"), (Measure(value=None), Measure(value=0.5), "v0001"),
    (Measure(value=0.5), None, "this version"), (None, Measure(value=None), "v0001 and this version"),
])
def test_a_missing_value_leaves_it_open(before: Measure | None, after: Measure | None, missing: str) -> None:
    found = check_prediction(Prediction(metric=DEAD, direction="down", by=0.05), "v0001", before, after, None)
    assert found.outcome == "inconclusive" and found.difference is None
    assert found.why == f"{DEAD} has no value for {missing}, so the prediction (down by at least 0.05) cannot be checked."


def test_scores_are_told_in_points() -> None:
    more = Prediction(metric=DEV, direction="up", by=0.01)
    found = check_prediction(more, "v0001", Measure(value=0.512), Measure(value=0.554), (0.042, 0.011, 0.073))
    assert found.why == ("dev/avg_at_k rose by 4.2 points against v0001, from 51.2 to 55.4 (95 % interval +1.1 to +7.3): "
                         "the prediction (up by at least 1.0 point) held.")
    assert (found.before, found.after, found.difference, found.ci_low, found.ci_high) == (0.512, 0.554, 0.042, 0.011, 0.073)
    still = check_prediction(Prediction(metric=DEV, direction="up", by=0.0), "v0001", Measure(value=0.5), Measure(value=0.5), (0.0, -0.02, 0.02))
    assert still.why.startswith("dev/avg_at_k did not move against v0001") and still.why.endswith("the prediction (up) is inconclusive.")


@given(st.floats(-1, 1), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.5))
def test_more_can_never_be_promised_and_hold_while_less_fails(difference: float, below: float, above: float, by: float) -> None:
    order = {"failed": 0, "inconclusive": 1, "held": 2}
    interval = (difference, difference - below, difference + above)
    assert order[score(by, interval)] >= order[score(by + 0.1, interval)]  # type: ignore[index]
