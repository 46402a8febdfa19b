"""Random streams by name."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.seeds import derive_seed, positions_for_step, refill_positions


def test_seeds_are_fixed_for_ever() -> None:
    """Changing them would change every campaign's data order: these values are part of the format."""
    assert derive_seed(7, "v0001", 3, 0, 1) == 802904055479783075
    assert derive_seed("1") != derive_seed(1)


@given(st.lists(st.one_of(st.integers(), st.text(max_size=5)), min_size=1, max_size=4))
def test_seeds_fit_the_engine(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


@given(count=st.integers(1, 50), per_step=st.integers(1, 20), seed=st.integers(0, 5))
def test_each_epoch_has_every_task_once_and_steps_stand_alone(count: int, per_step: int, seed: int) -> None:
    steps = -(-3 * count // per_step)
    order = [p for step in range(1, steps + 1) for p in positions_for_step(count, per_step, step, seed)]
    for epoch in range(3):
        assert Counter(order[epoch * count : (epoch + 1) * count]) == Counter(range(count))
    assert positions_for_step(count, per_step, steps, seed) == order[-per_step:], "a step does not need those before it"


@given(count=st.integers(1, 30), per_step=st.integers(1, 12), step=st.integers(1, 20), first=st.integers(0, 20), more=st.integers(0, 40))
def test_a_refill_goes_on_with_tasks_that_the_step_has_not_had(count: int, per_step: int, step: int, first: int, more: int) -> None:
    start = per_step + first
    found = refill_positions(count, per_step, step, start, more, 0)
    assert found == [refill_positions(count, per_step, step, start + i, 1, 0)[0] for i in range(more)], "a function of the index alone"
    own = set(positions_for_step(count, per_step, step, 0))
    rest = count - len(own) or count
    assert max(Counter(found).values(), default=0) <= -(-more // rest) and len(found) == more
    assert len(own) == count or not own & set(found)


def test_epochs_differ() -> None:
    assert positions_for_step(30, 30, 1, 0) != positions_for_step(30, 30, 2, 0)
