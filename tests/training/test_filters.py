"""Groups left out by the spread of their rewards: by hand, the floor, and a memory that goes on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.recipe import DataFilter
from evo_hpc.training.filters import SpreadMemory, narrow_groups, top_share

STDS = st.lists(st.floats(0.01, 1), min_size=1, max_size=20)


@pytest.mark.parametrize("stds, share, kept", [
    ([0.5, 0.3, 0.2], 0.5, {0}), ([0.5, 0.3, 0.2], 0.51, {0, 1}), ([0.2, 0.5, 0.3], 0.8, {1, 2}), ([0.5, 0.5], 0.5, {0}), ([0.1], 0.1, {0}), ([], 0.9, set()),
    ([0.3, 0.3, 0.3], 1.0, {0, 1, 2}),
])
def test_the_widest_that_make_up_a_share(stds, share, kept):
    assert top_share(stds, share) == kept


def test_the_moving_average_leaves_out_after_its_warm_up():
    config = DataFilter(std_ema=0.5, std_warmup=2, keep_at_least=0.0)
    why, memory = narrow_groups([0.4, 0.2], config, SpreadMemory())
    assert why == {} and memory == SpreadMemory(mean=pytest.approx(0.3), groups=2)
    why, memory = narrow_groups([0.29, 0.31], config, memory)
    assert why == {0: "std_ema"} and memory.groups == 4 and memory.mean == pytest.approx(0.5 * (0.5 * 0.3 + 0.5 * 0.29) + 0.5 * 0.31)
    loose = config.model_copy(update={"std_ema_factor": 0.5})
    assert narrow_groups([0.29, 0.31], loose, SpreadMemory(0.3, 2))[0] == {}


@given(STDS, st.floats(0.05, 1), st.floats(0, 1))
def test_the_floor_holds_and_the_widest_stay(stds, share, floor):
    config = DataFilter(std_top_p=share, std_ema=0.9, std_ema_factor=3.0, std_warmup=0, keep_at_least=floor)
    why, _ = narrow_groups(stds, config, SpreadMemory(0.5, 9))
    kept = [std for i, std in enumerate(stds) if i not in why]
    assert len(kept) >= int(np.ceil(floor * len(stds)))
    assert not kept or not why or min(kept) >= max(std for i, std in enumerate(stds) if i in why) - 1e-12


def test_without_rules_nothing_is_left_out_or_remembered():
    assert narrow_groups([0.1, 0.9], DataFilter(), SpreadMemory()) == ({}, SpreadMemory())


def test_a_band_that_leaves_everything_out_is_refused():
    DataFilter(pass_rate=(0.2, 0.2))
    with pytest.raises(ValueError, match=r"pass_rate: \[0.8, 0.2\] leaves every group out"):
        DataFilter(pass_rate=(0.8, 0.2))
