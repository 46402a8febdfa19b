"""The rule-based agent: conditions, ladders, barred values, width, ids, and words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.agent.barred import known_bad
from evo_hpc.agent.evidence import Evidence
from evo_hpc.agent.intervention import check_allowed, value_of
from evo_hpc.agent.proposal import Considered, Proposal
from evo_hpc.agent.propose import propose
from evo_hpc.agent.rules import Rules, load_rules
from evo_hpc.assets import asset_dir
from evo_hpc.lineage.factors import changes
from evo_hpc.lineage.findings import Measure
from evo_hpc.lineage.identity import learning_fields
from tests.agent.made import GROUPS, LARGER, START, Made, decided, finding, rules, turned

INERT = "optimisation.inert_clip"
DEAD = {"signal.dead_group_fraction": Measure(value=0.42)}


def one(evidence: Evidence, given_rules: Rules, width: int = 1, left: int = 8) -> tuple[Proposal | None, Considered]:
    proposals, considered = propose(evidence, given_rules, width=width, left=left)
    return (proposals[0] if proposals else None), considered[-1]


def test_a_finding_gives_a_version_with_its_reasons(tmp_path: Path) -> None:
    proposal, considered = one(Made(INERT, "score.plateau").evidence(), rules(tmp_path, LARGER))
    assert proposal is not None
    version = proposal.version
    assert (version.id, version.parents, version.init, version.author, version.rule) == ("v0002", ["v0001"], None, "agent", "larger-steps")
    assert version.hypothesis == "optimizer.lr 5e-05 -> 0.0002: optimisation.inert_clip holds."
    assert version.rollback == "Back to 5e-05."
    assert [citation.finding for citation in version.evidence] == [INERT]
    assert version.prediction is not None and version.prediction.metric == "dev/avg_at_k"
    assert proposal.recipe == turned(START, {"optimizer.lr": 2e-4})
    assert considered.outcome == "proposed"
    assert considered.why == "v0002: optimizer.lr 5e-05 -> 0.0002, since v0001 has optimisation.inert_clip"


def test_a_measure_can_be_the_reason(tmp_path: Path) -> None:
    proposal, considered = one(Made(measures=DEAD).evidence(), rules(tmp_path, GROUPS))
    assert proposal is not None and proposal.recipe.rollout.group_size == 16
    assert proposal.version.hypothesis == "42 % of the groups are dead." and proposal.version.evidence == []
    assert considered.why.endswith("since signal.dead_group_fraction is 0.42 on v0001, above 0.3")


@pytest.mark.parametrize("measures, why", [
    ({}, "it was not measured on v0001"),
    ({"signal.dead_group_fraction": Measure(value=None)}, "it was not measured on v0001"),
    ({"signal.dead_group_fraction": Measure(value=0.3)}, "it is 0.3 on v0001"),
])
def test_a_measure_on_the_right_side_is_no_reason(tmp_path: Path, measures: dict[str, Measure], why: str) -> None:
    proposal, considered = one(Made(measures=measures).evidence(), rules(tmp_path, GROUPS))
    assert proposal is None
    assert considered.why == f"needs signal.dead_group_fraction above 0.3; {why}"


def test_a_missing_finding_is_named(tmp_path: Path) -> None:
    proposal, considered = one(Made("score.plateau").evidence(), rules(tmp_path, LARGER))
    assert proposal is None and considered.outcome == "passed over"
    assert considered.why == "needs optimisation.inert_clip, which v0001 does not have"


def test_unless_holds_a_rule_back(tmp_path: Path) -> None:
    careful = LARGER.replace("change:", "unless: [{any_of: [score.collapse, optimisation.kl_high]}]\n    change:")
    assert one(Made(INERT).evidence(), rules(tmp_path, careful))[0] is not None
    proposal, considered = one(Made(INERT, "optimisation.kl_high").evidence(), rules(tmp_path, careful))
    assert proposal is None
    assert considered.why == "does not act while v0001 has optimisation.kl_high"


def test_all_conditions_must_hold(tmp_path: Path) -> None:
    first = "{finding: optimisation.inert_clip}"
    both = LARGER.replace(first, first + ", {any_of: [score.plateau, score.still_rising, score.collapse]}")
    why = one(Made(INERT).evidence(), rules(tmp_path, both))[1].why
    assert why == "needs score.plateau, score.still_rising or score.collapse, which v0001 does not have"
    proposal, _ = one(Made("score.still_rising", INERT).evidence(), rules(tmp_path, both))
    assert proposal is not None and {citation.finding for citation in proposal.version.evidence} == {INERT, "score.still_rising"}


def test_a_rule_of_another_domain_is_passed_over(tmp_path: Path) -> None:
    evidence = replace(Made(INERT).evidence(), domain="other")
    why = one(evidence, rules(tmp_path, LARGER.replace("when:", "domain: arithmetic\n    when:")))[1].why
    assert why == "is for the domain arithmetic, and this is other"


def test_a_version_that_was_not_trained_gives_nothing_to_change(tmp_path: Path) -> None:
    """While the base policy is not beaten, the first version that trains is what is changed."""
    made = Made(INERT)
    proposal, _ = one(made.evidence("v0000"), rules(tmp_path, LARGER))
    assert proposal is not None and proposal.version.parents == ["v0001"]
    del made.versions["v0001"]
    made.versions["v0000"] = replace(made.versions["v0000"], findings=(finding(INERT, "v0000"),))
    assert one(made.evidence("v0000"), rules(tmp_path, LARGER))[1].why == "v0000 has no training to change (steps: 0)"


@pytest.mark.parametrize("fate, tried", [("prune", True), ("revert", False)])
def test_what_did_harm_is_not_tried_again_from_another_recipe(tmp_path: Path, fate: str, tried: bool) -> None:
    """What only showed no gain may still gain once something else has changed."""
    made = Made(INERT)
    made.add({"optimizer.lr": 2e-4}, fate)
    made.add({"optimizer.kl_coef": 0.0}, "keep")
    made.versions["v0003"] = replace(made.versions["v0003"], findings=(finding(INERT, "v0003"),))
    proposal, _ = one(made.evidence("v0003"), rules(tmp_path, LARGER.replace("[4, 2]", "[4]")))
    assert (proposal is not None) == tried


@pytest.mark.parametrize("fate, expected", [("prune", 1e-4), ("revert", 1e-4), ("keep", 1e-4)])
def test_the_ladder_goes_on_after_a_value_that_was_tried(tmp_path: Path, fate: str, expected: float) -> None:
    made = Made(INERT)
    made.add({"optimizer.lr": 2e-4}, fate)
    proposal, considered = one(made.evidence(), rules(tmp_path, LARGER))
    assert proposal is not None and proposal.recipe.optimizer.lr == expected and proposal.version.id == "v0003"
    assert f"(0.0002 was tried in v0002 and {'kept' if fate == 'keep' else fate + 'd' if fate == 'prune' else 'reverted'})" in considered.why


def test_a_used_up_ladder_says_so(tmp_path: Path) -> None:
    made = Made(INERT)
    made.add({"optimizer.lr": 2e-4}, "revert")
    made.add({"optimizer.lr": 1e-4}, "prune")
    proposal, considered = one(made.evidence(), rules(tmp_path, LARGER))
    assert proposal is None
    assert considered.why == ("v0001 has optimisation.inert_clip, but no value of optimizer.lr is left: 0.0002 was tried in v0002 and reverted; "
                              "0.0001 was tried in v0003 and pruned")


def test_the_same_recipe_elsewhere_in_the_tree_counts_and_another_init_does_not(tmp_path: Path) -> None:
    made = Made(INERT)
    made.add({"optimizer.lr": 2e-4}, "prune", parent="v0000", recipe=START)
    assert one(made.evidence(), rules(tmp_path, LARGER))[0].recipe.optimizer.lr == 1e-4  # type: ignore[union-attr]
    made = Made(INERT)
    made.add({"optimizer.lr": 2e-4}, "prune", init="v0001@60")
    assert one(made.evidence(), rules(tmp_path, LARGER))[0].recipe.optimizer.lr == 2e-4  # type: ignore[union-attr]


def test_saving_and_packing_do_not_make_it_another_recipe(tmp_path: Path) -> None:
    made = Made(INERT)
    made.add({"optimizer.lr": 2e-4}, "keep", recipe=START.model_copy(update={"token_budget": 99}))
    assert one(made.evidence(), rules(tmp_path, LARGER))[0].recipe.optimizer.lr == 1e-4  # type: ignore[union-attr]


@pytest.mark.parametrize("bad, fate, factors, expected", [
    (1.5e-4, "prune", "[4, 2]", 1e-4),       # 2e-4 lies beyond 1.5e-4
    (1.5e-4, "revert", "[4, 2]", 1e-4),
    (1.5e-4, "keep", "[4, 2]", 2e-4),        # it was no failure
    (8e-4, "prune", "[4, 2]", 2e-4),         # 2e-4 lies before it
    (2e-5, "prune", "[4, 2]", 2e-4),         # the other way
    (3e-5, "prune", "[0.5, 0.9]", 4.5e-5),   # downwards
    (6e-5, "prune", "[4, 2]", None),
])
def test_nothing_at_or_beyond_a_known_bad_is_proposed(tmp_path: Path, bad: float, fate: str, factors: str, expected: float | None) -> None:
    made = Made(INERT)
    made.add({"optimizer.lr": bad}, fate)
    proposal, considered = one(made.evidence(), rules(tmp_path, LARGER.replace("[4, 2]", factors)))
    assert (None if proposal is None else proposal.recipe.optimizer.lr) == expected
    if expected is None:
        assert "0.0001 lies beyond 6e-05, tried in v0002 and pruned" in considered.why


def test_a_failure_under_other_settings_bars_nothing(tmp_path: Path) -> None:
    for settings in ({"optimizer.lr": 1.5e-4, "optimizer.kl_coef": 0.0}, {"optimizer.kl_coef": 0.01}):
        made = Made(INERT)
        made.add(settings, "prune")
        assert one(made.evidence(), rules(tmp_path, LARGER))[0].recipe.optimizer.lr == 2e-4  # type: ignore[union-attr]
    made = Made(INERT)
    made.add({"rollout.group_size": 16}, "keep")
    made.add({"optimizer.lr": 1.5e-4}, "prune", parent="v0002")
    assert one(made.evidence(), rules(tmp_path, LARGER))[0].recipe.optimizer.lr == 2e-4  # type: ignore[union-attr]


def test_a_failure_on_the_way_bars_from_an_equal_recipe_with_another_start_of_the_number(tmp_path: Path) -> None:
    made = Made()
    made.add({"optimizer.lr": 1.5e-4}, "prune")
    better = made.add({"optimizer.lr": 1e-4}, "keep")
    made.versions[better] = replace(made.versions[better], findings=(finding(INERT, better),))
    proposal, considered = one(made.evidence(better), rules(tmp_path, LARGER))
    assert proposal is None and considered.why.count("lies beyond 0.00015, tried in v0002 and pruned") == 2


def test_only_a_lone_change_in_the_same_direction_bars(tmp_path: Path) -> None:
    down = Made(INERT)  # 8e-4 was kept, and going down from there to 1.5e-4 was not
    far = down.add({"optimizer.lr": 8e-4}, "keep")
    down.add({"optimizer.lr": 1.5e-4}, "prune", parent=far)
    together = Made(INERT)  # 1.5e-4 failed along with smaller groups, though the recipe is like the incumbent's otherwise
    grouped = together.add({"rollout.group_size": 16}, "keep")
    together.add({"optimizer.lr": 1.5e-4, "rollout.group_size": 8}, "prune", parent=grouped)
    for made in (down, together):
        assert one(made.evidence(), rules(tmp_path, LARGER))[0].recipe.optimizer.lr == 2e-4  # type: ignore[union-attr]


def test_a_known_bad_value_itself_and_all_beyond_it_are_known_bad() -> None:
    made = Made()
    made.add({"optimizer.lr": 1e-4}, "prune")
    versions, start = made.versions, made.versions["v0001"]
    found = [known_bad(versions, start, "optimizer.lr", value) is not None for value in (2.5e-5, 9.9e-5, 1e-4, 2e-4)]
    assert found == [False, False, True, True]
    assert known_bad(versions, start, "data_filter.zero_variance", "keep") is None


def test_bounds_and_invalid_values_are_barred(tmp_path: Path) -> None:
    made = Made(INERT, start=turned(START, {"optimizer.lr": 4e-3}))
    proposal, considered = one(made.evidence(), rules(tmp_path, LARGER))
    assert proposal is not None and proposal.recipe.optimizer.lr == 8e-3 and "0.016 is above the rule's bound of 0.01" in considered.why
    made = Made(INERT, start=turned(START, {"optimizer.lr": 5e-3}))
    assert one(made.evidence(), rules(tmp_path, LARGER))[0].recipe.optimizer.lr == 1e-2, "the bound itself is within"  # type: ignore[union-attr]
    lower = LARGER.replace("multiply: [4, 2], at_most: 1.0e-2", "multiply: [0.1, 0.5], at_least: 1.0e-5")
    assert one(Made(INERT).evidence(), rules(tmp_path, lower))[0].recipe.optimizer.lr == 2.5e-5  # type: ignore[union-attr]
    batches = LARGER.replace("optimizer.lr, multiply: [4, 2], at_most: 1.0e-2", "optimizer.mini_batches, set: [3, 1, 4]")
    proposal, considered = one(Made(INERT).evidence(), rules(tmp_path, batches))
    assert proposal is not None and proposal.recipe.optimizer.mini_batches == 4
    assert "must divide" in considered.why and "it is 1 already" in considered.why


def test_a_number_that_is_unset_cannot_be_multiplied(tmp_path: Path) -> None:
    clip = LARGER.replace("optimizer.lr", "reward.clip")
    assert "it is unset in v0001, so there is no number to change" in one(Made(INERT).evidence(), rules(tmp_path, clip))[1].why
    clip = clip.replace("multiply: [4, 2], at_most: 1.0e-2", "set: [null, 2.0]")
    assert one(Made(INERT).evidence(), rules(tmp_path, clip))[0].recipe.reward.clip == 2.0  # type: ignore[union-attr]


def test_amounts_are_added_and_zero_stays_zero(tmp_path: Path) -> None:
    warmer = LARGER.replace("optimizer.lr, multiply: [4, 2], at_most: 1.0e-2", "rollout.temperature, add: [0.1]")
    assert one(Made(INERT).evidence(), rules(tmp_path, warmer))[0].recipe.rollout.temperature == 1.1  # type: ignore[union-attr]
    free = Made(INERT, start=turned(START, {"optimizer.kl_coef": 0.0}))
    assert "it is 0 already" in one(free.evidence(), rules(tmp_path, LARGER.replace("optimizer.lr", "optimizer.kl_coef")))[1].why


def test_a_sentence_about_a_measure_that_is_not_there_is_no_proposal(tmp_path: Path) -> None:
    about = LARGER.replace("{{ because }}", "{{ measures['length.truncation_fraction'] }}")
    proposal, considered = one(Made(INERT).evidence(), rules(tmp_path, about))
    assert proposal is None and "its sentence cannot be written" in considered.why and "length.truncation_fraction" in considered.why


@pytest.mark.parametrize("width, left, expected", [(1, 8, 1), (2, 8, 2), (5, 8, 2), (2, 1, 1), (2, 0, 0), (2, -1, 0)])
def test_width_and_what_is_left_bound_the_round(tmp_path: Path, width: int, left: int, expected: int) -> None:
    proposals, considered = propose(Made(INERT, measures=DEAD).evidence(), rules(tmp_path, LARGER, GROUPS), width=width, left=left)
    assert [proposal.version.id for proposal in proposals] == ["v0002", "v0003"][:expected]
    assert [each.outcome for each in considered] == ["proposed"] * expected + ["passed over"] * (2 - expected)
    if expected == 1:
        assert considered[1].why == ("signal.dead_group_fraction is 0.42 on v0001, above 0.3, for rollout.group_size 8 -> 16; "
                                     "this round's one place is taken")
    if expected == 0:
        assert considered[0].why.endswith("the campaign has no proposal left")


def test_two_rules_never_propose_the_same_recipe_in_a_round(tmp_path: Path) -> None:
    proposals, considered = propose(Made(INERT).evidence(), rules(tmp_path, LARGER, LARGER.replace("larger-steps", "again")), width=2, left=8)
    assert [proposal.recipe.optimizer.lr for proposal in proposals] == [2e-4, 1e-4]
    assert "0.0002 is proposed in this round already" in considered[1].why


def test_ids_go_on_after_the_highest_one(tmp_path: Path) -> None:
    made = Made(INERT)
    made.versions["v0041"] = replace(made.versions["v0001"], version=made.versions["v0001"].version.model_copy(update={"id": "v0041"}))
    assert one(made.evidence(), rules(tmp_path, LARGER))[0].version.id == "v0042"  # type: ignore[union-attr]


BUILT_IN = load_rules(asset_dir("analyzers") / "rules.yaml")
FIELDS: dict[str, list[Any]] = {
    "optimizer.lr": [2e-5, 1e-4, 2e-4, 8e-4], "optimizer.kl_coef": [0.0, 4e-3], "optimizer.mini_batches": [2, 4], "rollout.group_size": [16],
    "rollout.temperature": [1.2], "data_filter.difficulty.digits": [[4]], "data_filter.zero_variance": ["keep"], "reward.weights.format": [0.2],
}


@st.composite
def campaigns(draw: st.DrawFn) -> Evidence:
    """A tree of random changes and decisions, with random findings on a random trained incumbent."""
    mentioned = sorted(BUILT_IN.mentioned())
    made = Made(measures=DEAD)
    for _ in range(draw(st.integers(0, 9))):
        parent = draw(st.sampled_from(sorted(set(made.versions) - {"v0000"})))
        settings = {f: draw(st.sampled_from(FIELDS[f])) for f in draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2, unique=True))}
        name = made.add(settings, draw(st.sampled_from(["keep", "prune", "revert"])), parent=parent)
        siblings = [each for each, v in made.versions.items() if v.version.parents == [parent] and v.kept and each != name]
        if siblings and made.versions[name].kept and draw(st.booleans()):
            partners = draw(st.lists(st.sampled_from(siblings), min_size=1, unique=True))
            made.versions[name] = replace(made.versions[name], decision=decided(name, "merge", partners))
    incumbent = draw(st.sampled_from(sorted(name for name, v in made.versions.items() if v.kept)))
    findings = draw(st.lists(st.sampled_from(mentioned), unique=True))
    made.versions[incumbent] = replace(made.versions[incumbent], findings=tuple(finding(name, incumbent) for name in findings), measures=DEAD)
    return made.evidence(incumbent)


@given(campaigns(), st.integers(1, 12), st.integers(0, 12))
def test_whatever_was_decided_every_proposal_is_new_allowed_and_of_one_factor(evidence: Evidence, width: int, left: int) -> None:
    proposals, considered = propose(evidence, BUILT_IN, width=width, left=left)
    assert (proposals, considered) == propose(evidence, BUILT_IN, width=width, left=left)
    assert len(proposals) <= min(width, left)
    assert [proposal.version.id for proposal in proposals] == [f"v{len(evidence.versions) + place:04d}" for place in range(len(proposals))]
    assert [each.rule for each in considered if each.rule != "merge"] == [rule.id for rule in BUILT_IN.rules]
    assert len([each for each in considered if each.outcome == "proposed"]) == len(proposals)
    seen = [learning_fields(version.recipe) for version in evidence.versions.values()]
    for proposal in proposals:
        parents = [evidence.versions[parent] for parent in proposal.version.parents]
        check_allowed(parents[0].recipe, proposal.recipe)
        assert learning_fields(proposal.recipe) not in seen
        seen.append(learning_fields(proposal.recipe))
        if len(parents) == 2:
            sibling = {change.field for change in parents[1].changes}
            assert {change.field for change in changes(parents[0].recipe, proposal.recipe)} == sibling
            assert all(parent.kept for parent in parents)
        else:
            assert proposal.version.parents == [evidence.incumbent]
            turned_field = next(rule.change.field for rule in BUILT_IN.rules if rule.id == proposal.version.rule)
            assert value_of(parents[0].recipe, turned_field) != value_of(proposal.recipe, turned_field)
    rules_used = [proposal.version.rule for proposal in proposals if proposal.version.rule]
    assert len(rules_used) == len(set(rules_used))
