"""Kept siblings are joined, once, when their changes fit together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evo_hpc.agent.merge import merge_partner
from evo_hpc.agent.propose import propose
from evo_hpc.agent.rules import Rules
from evo_hpc.lineage.factors import changes
from tests.agent.made import GROUPS, LARGER, START, Made, finding, rules, turned

NONE = Rules(rules=[])


def two(second: str = "merge", **settings: object) -> Made:
    """v0002 kept with a larger lr, v0003 with larger groups (or `settings`), to be merged with it."""
    made = Made()
    made.add({"optimizer.lr": 2e-4}, "keep")
    made.add(settings or {"rollout.group_size": 16}, second, merge_with=["v0002"] if second == "merge" else None)
    return made


def test_two_kept_siblings_are_joined() -> None:
    proposals, considered = propose(two().evidence(), NONE, width=1, left=3)
    [proposal] = proposals
    assert proposal.recipe == turned(START, {"optimizer.lr": 2e-4, "rollout.group_size": 16})
    version = proposal.version
    assert (version.id, version.parents, version.author, version.rule, version.init) == ("v0004", ["v0002", "v0003"], "agent", None, None)
    assert version.hypothesis.startswith("Both v0002 (optimizer.lr 5e-05 -> 0.0002) and v0003 (rollout.group_size 8 -> 16) were kept")
    assert version.prediction is not None and (version.prediction.metric, version.prediction.direction) == ("dev/avg_at_k", "up")
    assert "without the change of v0003" in version.rollback
    assert [citation.finding for citation in version.evidence] == ["signal.dead_groups"], "what both rest on, each once"
    assert [(each.rule, each.outcome, each.why) for each in considered] == [
        ("merge", "proposed", "v0004: joins v0002 and v0003, kept siblings that change different fields")]


def test_the_incumbent_is_the_first_parent() -> None:
    made = two()
    [proposal] = propose(made.evidence("v0003"), NONE, width=1, left=1)[0]
    assert proposal.version.parents == ["v0003", "v0002"]
    assert [change.field for change in changes(made.versions["v0003"].recipe, proposal.recipe)] == ["optimizer.lr"]


def test_merges_come_before_rules_and_count(tmp_path: Path) -> None:
    made = two()
    made.versions["v0001"] = replace(made.versions["v0001"], findings=(finding("optimisation.inert_clip"),))
    proposals, considered = propose(made.evidence(), rules(tmp_path, LARGER, GROUPS), width=2, left=2)
    assert [(proposal.version.id, proposal.version.rule) for proposal in proposals] == [("v0004", None), ("v0005", "larger-steps")]
    assert [each.rule for each in considered] == ["merge", "larger-steps", "larger-groups"]
    proposals, considered = propose(made.evidence(), rules(tmp_path, LARGER), width=1, left=2)
    assert [proposal.version.rule for proposal in proposals] == [None]
    assert considered[1].why.endswith("this round's one place is taken")


def test_a_merge_is_made_once() -> None:
    made = two()
    made.add({"rollout.group_size": 16}, "prune", parent="v0002", parents=["v0002", "v0003"])
    proposals, considered = propose(made.evidence(), NONE, width=1, left=1)
    assert proposals == [] and considered[0].why == "v0002 and v0003: joined in v0004 already"
    assert merge_partner(made.versions, "v0003") == []


def test_a_recipe_that_has_both_changes_already_is_not_made_again() -> None:
    made = two()
    made.add({"optimizer.lr": 2e-4, "rollout.group_size": 16}, "prune")
    proposals, considered = propose(made.evidence(), NONE, width=1, left=1)
    assert proposals == [] and considered[0].why == "v0002 and v0003: v0004 has exactly the changes of both"


def test_pairs_are_merged_one_after_the_other() -> None:
    made = two()
    made.add({"data_filter.zero_variance": "keep"}, "merge", merge_with=["v0002", "v0003"])
    proposals, considered = propose(made.evidence(), NONE, width=2, left=9)
    assert [proposal.version.parents for proposal in proposals] == [["v0002", "v0003"], ["v0002", "v0004"]]
    assert considered[2].why == "v0003 and v0004 can be joined; this round's 2 places are taken"


def test_partners_are_the_kept_siblings_that_fit() -> None:
    made = Made()
    kept = made.add({"optimizer.lr": 2e-4}, "keep")
    made.add({"rollout.temperature": 1.2}, "prune")
    made.add({"rollout.temperature": 1.1}, None)
    also = made.add({"reward.weights.format": 0.2}, "merge", merge_with=[kept])
    made.add({"optimizer.lr": 1e-4}, "keep")
    made.add({"rollout.group_size": 16}, "keep", init="v0001@60")
    made.add({"rollout.group_size": 16}, "keep", parent="v0002")
    new = made.add({"optimizer.lr": 4e-4}, None)
    assert merge_partner(made.versions, new) == [also], "not what changes lr too, starts elsewhere, is not kept, or is no sibling"
    other = made.add({"rollout.group_size": 4}, None)
    assert merge_partner(made.versions, other) == ["v0002", "v0005", "v0006"]


def test_only_what_an_agent_may_change_is_joined() -> None:
    for settings in ({"steps": 90}, {"seed": 3}, {"token_budget": 99}):
        made = Made()
        made.add({"optimizer.lr": 2e-4}, "keep")
        made.add({}, "keep", recipe=START.model_copy(update=settings))
        assert merge_partner(made.versions, "v0002") == [] == merge_partner(made.versions, "v0003")
    made = Made()
    made.add({"optimizer.lr": 2e-4, "rollout.temperature": 1.2}, "keep")
    made.add({"reward.weights.format": 0.2}, "merge", merge_with=["v0002"])
    proposals, considered = propose(made.evidence(), NONE, width=1, left=1)
    assert proposals == [] and "touches 2 factors, optimizer and rollout" in considered[0].why


def test_a_merge_that_a_person_asks_for_and_cannot_be_is_explained() -> None:
    proposals, considered = propose(two(**{"optimizer.lr": 1e-4}).evidence(), NONE, width=1, left=1)
    assert proposals == [] and considered[0].why == "v0002 and v0003: both change optimizer.lr"
    made = Made()
    made.add({"optimizer.lr": 2e-4}, "merge", merge_with=["v0042"])
    assert propose(made.evidence(), NONE, width=1, left=1)[1][0].why == "v0042 and v0002: there is no version v0042"
    made = Made()
    made.add({"optimizer.lr": 2e-4}, "merge", merge_with=["v0001"])
    assert propose(made.evidence(), NONE, width=1, left=1)[1][0].why == "v0001 and v0002: are not siblings"
    made = Made()
    made.add({"optimizer.mini_batches": 8}, "keep")
    made.add({"rollout.prompts_per_step": 12}, "merge", merge_with=["v0002"])
    assert "must divide" in propose(made.evidence(), NONE, width=1, left=1)[1][0].why


def test_a_sibling_that_a_person_pruned_after_all_is_not_joined() -> None:
    made = two()
    pruned = made.versions["v0002"].decision
    assert pruned is not None
    made.versions["v0002"] = replace(made.versions["v0002"], decision=pruned.model_copy(update={"decision": "prune"}))
    proposals, considered = propose(made.evidence(), NONE, width=1, left=1)
    assert proposals == [] and considered[0].why == "v0002 and v0003: v0002 is not kept"
