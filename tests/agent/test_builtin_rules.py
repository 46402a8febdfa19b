"""The rules that are shipped: each can act, in words that people read."""

from __future__ import annotations

import pytest

from evo_hpc.agent.intervention import check_allowed
from evo_hpc.agent.propose import propose
from evo_hpc.agent.rules import Rule, Rules, load_rules
from evo_hpc.assets import asset_dir
from evo_hpc.config.yaml_io import load_tree
from evo_hpc.lineage.findings import Measure
from tests.agent.made import START, Made, turned

BUILT_IN = load_rules(asset_dir("analyzers") / "rules.yaml")


@pytest.mark.parametrize("rule", BUILT_IN.rules, ids=lambda rule: rule.id)
def test_each_rule_acts_on_what_it_waits_for(rule: Rule) -> None:
    findings = [condition.findings[0] for condition in rule.when if condition.findings]
    measures = {c.measure: Measure(value=c.above + 1 if c.above is not None else (c.below or 0) - 1) for c in rule.when if c.measure}
    start = turned(START, {"data_filter.zero_variance": "keep"})  # so that there is something to drop
    proposals, considered = propose(Made(*findings, measures=measures, start=start).evidence(), Rules(rules=[rule]), width=1, left=1)
    assert [each.outcome for each in considered] == ["proposed"], considered[0].why
    [proposal] = proposals
    check_allowed(start, proposal.recipe)
    version = proposal.version
    for sentence in (version.hypothesis, version.rollback, rule.about):
        assert sentence.strip() and sentence.rstrip()[-1] in ".!" and "{" not in sentence, sentence
    assert {citation.finding for citation in version.evidence} == set(findings)
    assert propose(Made().evidence(), Rules(rules=[rule]), width=1, left=1)[0] == [], "without a finding nothing is done"


def test_the_rules_speak_of_what_the_built_in_analyzers_say() -> None:
    known = set()
    for manifest in sorted(asset_dir("analyzers").glob("*/analyzer.yaml")):
        for found in load_tree(manifest)["findings"]:
            known |= {f"{manifest.parent.name}.{found['id']}", f"{manifest.parent.name}.{found['measure']}"}
    assert len(known) > 20
    assert BUILT_IN.mentioned().keys() <= known


def test_a_larger_step_is_not_taken_by_a_run_that_falls_apart() -> None:
    made = Made("optimisation.inert_clip", "optimisation.small_updates", "score.collapse")
    proposals, _ = propose(made.evidence(), BUILT_IN, width=9, left=9)
    assert [(proposal.version.rule, proposal.recipe.optimizer.lr) for proposal in proposals] == [("smaller-steps", 2.5e-5)]
