"""Sums of costs: the same in any order and grouping, and honest about who says so."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.jobs.cost import Cost, Source, joined, total

HOURS = st.floats(0, 1e6, allow_subnormal=False)
SOURCES = st.sampled_from(["none", "accounted", "estimated", "mixed"])
COSTS = st.builds(Cost, gpu_hours=HOURS, node_hours=HOURS, wall_hours=HOURS, source=SOURCES, starts=st.integers(0, 50))


@given(st.lists(COSTS), st.randoms())
def test_order_does_not_matter(costs: list[Cost], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = random.sample(costs, len(costs))
    assert total(shuffled) == total(costs)


@given(st.lists(st.lists(COSTS, max_size=4), max_size=4))
def test_sums_of_groups_sum_to_the_whole(groups: list[list[Cost]]) -> None:
    by_group, whole = total(total(group) for group in groups), total(cost for group in groups for cost in group)
    assert (by_group.source, by_group.starts) == (whole.source, whole.starts)
    for name in ("gpu_hours", "node_hours", "wall_hours"):
        assert math.isclose(getattr(by_group, name), getattr(whole, name), rel_tol=1e-12)


@given(COSTS)
def test_nothing_changes_nothing(cost: Cost) -> None:
    assert total([cost, Cost()]) == cost == total([cost])


@pytest.mark.parametrize("sources, expected", [
    ([], "none"), (["none", "accounted"], "accounted"), (["estimated", "estimated"], "estimated"), (["accounted", "estimated"], "mixed"),
    (["mixed", "accounted"], "mixed"),
])
def test_who_says_so(sources: list[Source], expected: Source) -> None:
    assert joined(sources) == expected


def test_hours_are_never_negative() -> None:
    with pytest.raises(ValueError, match="wall_hours"):
        Cost(wall_hours=-1.0)
