"""Which knobs there are, what turning one gives, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.agent.intervention import InvalidIntervention, add, apply, check_allowed, join, multiply, value_of
from evo_hpc.agent.knobs import ForbiddenKnob, UnknownKnob, knob, knobs
from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.factors import changes
from tests.agent.made import START, turned


def test_every_listed_knob_is_one_and_none_is_forbidden() -> None:
    assert {knob(field).field for field in knobs()} == set(knobs())
    assert "optimizer.lr" in knobs() and "reward.weights" in knobs()
    assert not [field for field in knobs() if field.split(".")[0] in ("seed", "steps", "checkpoint", "token_budget", "schema_version")]


@pytest.mark.parametrize("field, kind, factor", [
    ("optimizer.lr", "number", "optimizer"), ("optimizer.mini_batches", "integer", "optimizer"), ("optimizer.advantage", "other", "optimizer"),
    ("reward.clip", "number", "reward"), ("reward.weights.format", "number", "reward"), ("reward.weights", "other", "reward"),
    ("rollout.group_size", "integer", "rollout"), ("tool_use.system_prompt", "other", "tool_use"),
    ("data_filter.difficulty.digits", "other", "data_filter"),
])
def test_a_knob_knows_its_type_and_factor(field: str, kind: str, factor: str) -> None:
    assert (knob(field).kind, knob(field).factor) == (kind, factor)


@pytest.mark.parametrize("field, message", [
    ("optimizer.lrr", "did you mean `optimizer.lr`"),
    ("rollout.lr", "did you mean `optimizer.lr`"),
    ("optimizer.lr.x", "not a field"),
    ("reward.weights.format.x", "not a field"),
    ("reward.weights.", "not a field"),
    ("", "not a field.*there are: "),
    ("optimizer", "whole section.*optimizer.lr"),
])
def test_an_unknown_knob_is_named_with_the_nearest(field: str, message: str) -> None:
    with pytest.raises(UnknownKnob, match=message):
        knob(field)


@pytest.mark.parametrize("field", ["seed", "steps", "token_budget", "checkpoint.every", "checkpoint", "schema_version"])
def test_some_knobs_are_not_an_agents(field: str) -> None:
    with pytest.raises(ForbiddenKnob, match="not an agent's to change"):
        apply(START, field, 3)


@pytest.mark.parametrize("field, value, message", [
    ("optimizer.lr", -1.0, r"optimizer.lr = -1.0 is not valid: optimizer\.lr: .*greater than 0"),
    ("optimizer.mini_batches", 3, r"must divide rollout.prompts_per_step"),
    ("reward.weights", {"correct": 0.0}, "at least one reward weight"),
    ("data_filter.zero_variance", "maybe", "'drop' or 'keep'"),
])
def test_an_invalid_recipe_is_refused_in_pydantics_words(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidIntervention, match=message):
        apply(START, field, value)


def test_turning_a_knob_changes_that_field_alone() -> None:
    for field, value in (("optimizer.lr", 2e-4), ("reward.weights.format", 0.2), ("data_filter.zero_variance", "keep")):
        child = apply(START, field, value)
        assert [change.field for change in changes(START, child)] == [field]
        assert value_of(child, field) == value
    assert value_of(START, "data_filter.difficulty.digits") is None
    assert apply(START, "data_filter.difficulty.digits", [4]).data_filter.difficulty == {"digits": [4]}
    assert START.data_filter.difficulty == {}, "the parent is left as it was"


def test_products_and_sums_are_rounded() -> None:
    lr, size = knob("optimizer.lr"), knob("rollout.max_response_tokens")
    assert multiply(0.1, 3, lr) == 0.3
    assert multiply(3e-5, 3, lr) == 9e-5
    assert add(0.1, 0.2, lr) == 0.3
    assert (multiply(33, 1.5, size), type(multiply(33, 1.5, size))) == (50, int)
    assert multiply(65, 100.02, size) == 6501, "an integer keeps its digits"


def test_one_factor_and_only_an_agents() -> None:
    assert check_allowed(START, turned(START, {"optimizer.lr": 1e-4, "optimizer.kl_coef": 0.0})) == "optimizer"
    with pytest.raises(InvalidIntervention, match=r"2 factors, optimizer and rollout \(optimizer.lr, rollout.temperature\)"):
        check_allowed(START, turned(START, {"optimizer.lr": 1e-4, "rollout.temperature": 0.8}))
    for update in ({"steps": 90}, {"seed": 1}, {"token_budget": 99}):
        with pytest.raises(InvalidIntervention, match="not an agent's"):
            check_allowed(START, START.model_copy(update=update))
    with pytest.raises(InvalidIntervention, match="changes nothing"):
        check_allowed(START, Recipe.model_validate(START.model_dump()))


def test_two_changes_are_joined() -> None:
    one = turned(START, {"optimizer.lr": 1e-4, "data_filter.difficulty.digits": [4]})
    other = turned(START, {"rollout.group_size": 16, "reward.weights.format": 0.3})
    both = join(START, one, other)
    assert both == turned(one, {"rollout.group_size": 16, "reward.weights.format": 0.3}) == join(START, other, one)
    with pytest.raises(InvalidIntervention, match="both change optimizer.lr"):
        join(START, one, turned(START, {"optimizer.lr": 3e-4}))


def test_a_removed_key_stays_removed_in_a_join() -> None:
    start = turned(START, {"data_filter.difficulty": {"digits": [3], "carries": [1]}})
    one, other = turned(start, {"data_filter.difficulty": {"digits": [3]}}), turned(start, {"optimizer.lr": 1e-4})
    assert join(start, one, other).data_filter.difficulty == {"digits": [3]}


def test_a_join_that_is_no_recipe_is_refused() -> None:
    with pytest.raises(InvalidIntervention, match="the two changes together is not valid: .*must divide"):
        join(START, turned(START, {"optimizer.mini_batches": 8}), turned(START, {"rollout.prompts_per_step": 12}))


@given(st.floats(1e-6, 1e-2), st.floats(0.1, 2.0))
def test_a_join_holds_both_values(lr: float, temperature: float) -> None:
    both = join(START, turned(START, {"optimizer.lr": lr}), turned(START, {"rollout.temperature": temperature}))
    assert (both.optimizer.lr, both.rollout.temperature) == (lr, temperature)
