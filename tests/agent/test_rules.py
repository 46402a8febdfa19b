"""Rules read from YAML: every mistake is named with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.agent.rules import BadRules, load_rules
from tests.agent.made import GROUPS, LARGER, rules

HEAD = """rules:
  - id: one
    when: [{finding: a.b}]
    change: {field: optimizer.lr, multiply: [2]}
    hypothesis: Text.
    prediction: {metric: dev/avg_at_k, direction: up, by: 0.01}
    rollback: Text.
"""


def test_rules_are_read_in_their_order(tmp_path: Path) -> None:
    found = rules(tmp_path, GROUPS, LARGER)
    assert [rule.id for rule in found.rules] == ["larger-groups", "larger-steps"]
    assert found.rules[1].change.rungs == [4, 2] and found.rules[1].change.ladder == "multiply"
    assert found.mentioned() == {"signal.dead_group_fraction": ["larger-groups"], "optimisation.inert_clip": ["larger-steps"]}


@pytest.mark.parametrize("old, new, line, message", [
    ("optimizer.lr", "optimizer.lrr", 4, r"`optimizer\.lrr` is not a field of a recipe; did you mean `optimizer\.lr`\?"),
    ("optimizer.lr", "steps", 4, r"`steps` is not an agent's to change \(factor budget\)"),
    ("optimizer.lr", "seed", 4, r"`seed` is not an agent's to change"),
    ("optimizer.lr", "checkpoint.every", 4, r"`checkpoint\.every` is not an agent's to change \(factor system\)"),
    ("optimizer.lr", "evaluation.temperature", 4, r"`evaluation\.temperature` is not a field of a recipe; did you mean `rollout\.temperature`"),
    ("optimizer.lr, multiply: [2]", "optimizer.advantage, multiply: [2]", 4, r"optimizer\.advantage is not a number; give its values with `set`"),
    ("optimizer.lr, multiply: [2]", "optimizer.lr, set: [1.0e-3, fast]", 4, r"`rules\.0\.change\.set\.1`: optimizer\.lr = 'fast' is not.*number"),
    ("optimizer.lr, multiply: [2]", "optimizer.lr, set: [-1]", 4, r"set\.0`: .*greater than 0"),
    ("optimizer.lr, multiply: [2]", "rollout.group_size, set: [8.5]", 4, r"set\.0`: .*integer"),
    ("optimizer.lr, multiply: [2]", "optimizer.lr", 4, "exactly one of `set`, `multiply` and `add`"),
    ("multiply: [2]", "multiply: [2], add: [1]", 4, "exactly one of `set`, `multiply` and `add`"),
    ("multiply: [2]", "multiply: []", 4, "at least one value"),
    ("multiply: [2]", "multiply: [1]", 4, "positive and not 1"),
    ("multiply: [2]", "add: [0]", 4, "changes nothing"),
    ("multiply: [2]", "multiply: [2], at_least: 1, at_most: 0.5", 4, "`at_least` is greater than `at_most`"),
    ("multiply: [2]", "multiply: [2], atmost: 1", 4, r"unknown key `rules\.0\.change\.atmost`; did you mean `at_most`"),
    ("{finding: a.b}", "", 3, r"`rules\.0\.when`: .*at least 1 item"),
    ("{finding: a.b}", "{finding: nodot}", 3, "pattern"),
    ("{finding: a.b}", "{finding: a.b, measure: c.d, above: 1}", 3, "one of `finding`, `any_of` and `measure`"),
    ("{finding: a.b}", "{measure: c.d}", 3, "a measure comes with `above` or `below`"),
    ("{finding: a.b}", "{finding: a.b, above: 1}", 3, "a measure comes with `above` or `below`"),
    ("hypothesis: Text.", "hypothesis: '{{ befor }}'", 5, r"`rules\.0\.hypothesis`: .*befor unknown; a sentence may use field, before"),
    ("hypothesis: Text.", "hypothesis: '{% if after %}a{% else %}{{ nonsense }}{% endif %}'", 5, "nonsense unknown"),
    ("hypothesis: Text.", "hypothesis: '{{ before'", 5, "hypothesis"),
    ("hypothesis: Text.", "hypothesis: '{{ before.__class__.mro() }}'", 5, "unsafe|undefined"),
    ("hypothesis: Text.", "hypothesis: '{{ before | nofilter }}'", 5, "nofilter"),
    ("hypothesis: Text.", "hypothesis: '{{ before / 0 }}'", 5, "division"),
    ("hypothesis: Text.", "hypothesis: ''", 5, "an empty sentence"),
    ("rollback: Text.", "rollback: '{{ findings.x.nothing }}'", 7, "rollback.*nothing"),
    ("dev/avg_at_k", "test/avg_at_k", 6, r"test/avg_at_k is neither a score \(dev/avg_at_k, probe/avg_at_k\) nor a measure"),
    ("by: 0.01", "by: -0.01", 6, "negative; the direction says which way"),
    ("id: one", "id: merge", 2, "is the name of a merge of siblings"),
    ("id: one", "id: One rule", 2, "pattern"),
    ("id: one", "id: one\n    domain: arithmetics", 3, "unknown domain 'arithmetics'.*did you mean 'arithmetic'"),
    ("id: one\n", "", 2, r"`rules\.0\.id` is missing"),
])
def test_a_mistake_is_named_with_file_and_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    path = tmp_path / "rules.yaml"
    text = HEAD.replace("  - id: one\n    when", "  - when") if old == "id: one\n" else HEAD.replace(old, new)
    assert text != HEAD
    path.write_text(text)
    with pytest.raises(BadRules, match=rf"rules\.yaml:{line}: .*({message})"):
        load_rules(path)


def test_a_reward_component_of_another_domain_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(HEAD.replace("id: one", "id: one\n    domain: arithmetic").replace("optimizer.lr", "reward.weights.formt"))
    with pytest.raises(BadRules, match=r"rules\.yaml:5: .*no reward component 'formt'; it has correct, format"):
        load_rules(path)


def test_an_id_is_given_once(tmp_path: Path) -> None:
    with pytest.raises(BadRules, match=r"rules\.yaml:9: `rules\.1\.id`: larger-steps is the id of rule 1 too"):
        rules(tmp_path, LARGER, LARGER)


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadRules) as caught:
        rules(tmp_path, LARGER.replace("optimizer.lr", "optimizer.lrr"), GROUPS.replace("by: 0.05", "by: -1"))
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["4", "13"]


def test_a_value_that_other_fields_must_fit_is_judged_on_the_recipe(tmp_path: Path) -> None:
    odd = LARGER.replace("optimizer.lr, multiply: [4, 2], at_most: 1.0e-2", "optimizer.mini_batches, set: [3]")
    assert rules(tmp_path, odd).rules[0].change.rungs == [3], "3 does not divide the 16 prompts of a default recipe, but may divide another's"


def test_a_missing_or_broken_file_is_bad_rules_too(tmp_path: Path) -> None:
    with pytest.raises(BadRules, match="missing"):
        load_rules(tmp_path / "rules.yaml")
    (tmp_path / "rules.yaml").write_text("rules: [\n")
    with pytest.raises(BadRules, match=r"rules\.yaml:\d"):
        load_rules(tmp_path / "rules.yaml")
