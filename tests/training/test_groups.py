"""Rollout rows to samples: advantages by group, the exact zero-variance filter, errors that are not wrong answers."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.recipe import DataFilter, Optimizer
from evo_hpc.training.groups import score_groups, split_mini_batches, to_sample

KEEP = DataFilter(zero_variance="keep")


def rows(*rewards: list[float | None]) -> list[dict[str, Any]]:
    """Groups of rollouts with these rewards; None = the verifier failed."""
    return [
        {"group_id": f"g{g}", "sample": s, "reward": r, "error_class": "verifier" if r is None else None, "prompt_ids": [5, 6],
         "response_ids": [7, 8, 9], "loss_mask": [1, 1, 1], "logprobs": [-0.1, -0.2, -0.3], "response_tokens": 3, "truncated": False,
         "components": [("correct", float(bool(r)))] if r is not None else [], "advantage": None, "kept": None}
        for g, group in enumerate(rewards) for s, r in enumerate(group)
    ]


def test_advantages_and_counts() -> None:
    data = rows([1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1])
    random.Random(0).shuffle(data)
    batch = score_groups(data, 4, Optimizer(), DataFilter())
    kept = batch.kept()
    assert len(kept) == 1
    wanted = (np.array([1, 0, 0, 0]) - 0.25) / (np.std([1, 0, 0, 0], ddof=1) + 1e-6)
    assert np.allclose(kept[0].advantages, wanted)
    assert [r["advantage"] for r in kept[0].rows] == pytest.approx(list(wanted))
    m = batch.metrics
    assert (m["groups"], m["groups_kept"], m["groups_all_fail"], m["groups_all_pass"], m["groups_errored"]) == (3, 1, 1, 1, 0)
    assert m["zero_variance_fraction"] == pytest.approx(2 / 3) and m["reward_mean"] == pytest.approx(5 / 12)
    assert all(r["kept"] is (r["group_id"] == "g0") for r in data)


def test_no_more_groups_than_wanted_are_learned_from() -> None:
    data = rows([1, 0], [0, 0], [0, 1], [1, 0])
    batch = score_groups(data, 2, Optimizer(), DataFilter(), most=2)
    assert [g.kept for g in batch.groups] == [True, False, True, False] and batch.groups[3].why_dropped == "surplus"
    assert batch.metrics["groups_kept"] == 2 and batch.metrics["groups_filtered"] == 0 and data[-1]["kept"] is False
    assert len(score_groups(data, 2, Optimizer(), DataFilter()).kept()) == 3, "the same rows may be scored again, with others"


def test_filters_that_remember_see_all_groups_of_a_step_in_order() -> None:
    """Scored again with the refilled groups, from the same memory, it is as if all had come at once."""
    config = DataFilter(std_ema=0.5, std_warmup=1, zero_variance="keep")
    before = score_groups(rows([4, 0]), 2, Optimizer(), config).memory
    own, more = rows([1, 0], [0, 0]), rows([1, 0], [0, 0], [3, 0])[-2:]
    score_groups(own, 2, Optimizer(), config, before)
    again, once = score_groups([*own, *more], 2, Optimizer(), config, before), score_groups(rows([1, 0], [0, 0], [3, 0]), 2, Optimizer(), config, before)
    assert again.memory == once.memory != before and [g.kept for g in again.groups] == [g.kept for g in once.groups]


def test_a_verifier_error_drops_the_group_and_is_counted() -> None:
    batch = score_groups(rows([1, None], [1, 0]), 2, Optimizer(), DataFilter())
    assert [g.kept for g in batch.groups] == [False, True]
    assert batch.metrics["groups_errored"] == 1 and batch.metrics["reward_mean"] == 0.5


def test_nothing_but_errors_is_no_score() -> None:
    batch = score_groups(rows([None, None]), 2, Optimizer(), DataFilter())
    assert batch.kept() == [] and math.isnan(batch.metrics["reward_mean"])


def test_what_was_cut_off_can_be_scored_and_not_learned_from() -> None:
    (row, *_) = rows([1.0, 0.0])
    row["advantage"] = 1.0
    assert to_sample(row, mask_truncated=True).loss_mask == [0, 0, 1, 1, 1]
    row["truncated"] = True
    assert to_sample(row, mask_truncated=True).loss_mask == [0] * 5
    assert to_sample(row).loss_mask == [0, 0, 1, 1, 1]


def test_groups_are_left_out_by_pass_rate_and_spread_with_the_reason() -> None:
    data = rows([1, 1, 1, 0], [1, 0, 0, 0], [0.1, 0, 0, 0])
    batch = score_groups(data, 4, Optimizer(), DataFilter(pass_rate=(0.0, 0.5)))
    assert [g.why_dropped for g in batch.groups] == ["pass_rate", "", ""] and batch.metrics["groups_filtered"] == 1
    batch = score_groups(data, 4, Optimizer(), DataFilter(std_top_p=0.9, keep_at_least=0.0))
    assert [g.why_dropped for g in batch.groups] == ["", "", "std_top_p"] and batch.metrics["groups_kept"] == 2
    remembered = score_groups(data, 4, Optimizer(), DataFilter(std_ema=0.9))
    assert remembered.memory.groups == 3 and score_groups(data, 4, Optimizer(), DataFilter(std_ema=0.9), remembered.memory).memory.groups == 6


def test_equal_rewards_can_be_kept_with_zero_advantage() -> None:
    batch = score_groups(rows([0.1, 0.1, 0.1]), 3, Optimizer(), KEEP)
    assert batch.groups[0].kept and list(batch.groups[0].advantages) == [0, 0, 0]


@given(st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=2, max_size=8))
def test_only_exact_equality_is_zero_variance(rewards: list[float]) -> None:
    batch = score_groups(rows(rewards), len(rewards), Optimizer(), DataFilter())
    assert batch.groups[0].kept == (max(rewards) != min(rewards))
    assert abs(sum(batch.groups[0].advantages)) < 1e-6


@pytest.mark.parametrize("broken", [rows([1, 0])[:1], rows([1, 0]) + rows([1, 0])[:1]])
def test_incomplete_groups_are_refused(broken: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="group g0 has samples"):
        score_groups(broken, 2, Optimizer(), DataFilter())


def test_the_trainer_sees_the_very_tokens_of_the_engine() -> None:
    row = rows([1, 0])[0] | {"advantage": 0.7}
    sample = to_sample(row)
    assert sample.token_ids == [5, 6, 7, 8, 9] and sample.loss_mask == [0, 0, 1, 1, 1] and sample.advantage == 0.7
    assert sample.sampled_logprobs is not None and np.allclose(sample.sampled_logprobs, [0, 0, -0.1, -0.2, -0.3])


@given(st.integers(0, 20), st.integers(1, 6))
def test_mini_batches_cover_whole_groups_once(count: int, parts: int) -> None:
    groups = list(range(count))
    cut = split_mini_batches(groups, parts)  # type: ignore[arg-type]
    assert [g for part in cut for g in part] == groups
    assert len(cut) == min(count, parts) and (not cut or max(map(len, cut)) - min(map(len, cut)) <= 1)
