"""The rule-based agent: from decided versions and rules to the next versions, each one factor away from the incumbent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evo_hpc.agent.barred import Run, run_of
from evo_hpc.agent.conditions import cited, fact, holds, lack
from evo_hpc.agent.evidence import Evidence, VersionEvidence
from evo_hpc.agent.intervention import value_of
from evo_hpc.agent.ladder import climb
from evo_hpc.agent.merge import merged, merges
from evo_hpc.agent.proposal import Considered, Proposal
from evo_hpc.agent.rules import MERGE, Rule, Rules
from evo_hpc.agent.sentences import BadSentence, render, shown
from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.findings import Citation
from evo_hpc.lineage.version import Version
from evo_hpc.paths import version_id


def propose(evidence: Evidence, rules: Rules, *, width: int, left: int) -> tuple[list[Proposal], list[Considered]]:
    """At most `width`, and at most `left`, new versions, and what became of every merge and rule, in order.

    Merges come first; then the rules in order, each with the first value of its ladder that is not barred. Pure: the
    same evidence and rules give the same proposals.
    """
    room = max(min(width, left), 0)
    first = max((int(name[1:]) for name in evidence.versions), default=-1) + 1
    proposals: list[Proposal] = []
    considered: list[Considered] = []
    taken: list[Run] = []

    def passed(rule: str, why: str) -> None:
        considered.append(Considered(rule=rule, outcome="passed over", why=why))

    def proposed(rule: str, proposal: Proposal, init: str, why: str) -> None:
        proposals.append(proposal)
        taken.append(run_of(proposal.recipe, init))
        considered.append(Considered(rule=rule, outcome="proposed", why=f"{proposal.version.id}: {why}"))

    for pair in merges(evidence):
        if isinstance(pair, Considered):
            considered.append(pair)
            continue
        names, name = f"{pair[0].id} and {pair[1].id}", version_id(first + len(proposals))
        proposal = merged(pair, evidence.versions[pair[0].version.parents[0]].recipe, name)
        if run_of(proposal.recipe, pair[0].init) in taken:
            passed(MERGE, f"{names}: another merge of this round gives the same recipe")
        elif len(proposals) >= room:
            passed(MERGE, f"{names} can be joined; {_full(room)}")
        else:
            proposed(MERGE, proposal, pair[0].init, f"joins {names}, kept siblings that change different fields")
    for rule in rules.rules:
        step = _consider(evidence, rule, taken)
        if isinstance(step, str):
            passed(rule.id, step)
        elif len(proposals) >= room:
            passed(rule.id, f"{step.held}, for {step.turn}; {_full(room)}")
        else:
            version = step.version(version_id(first + len(proposals)), evidence.start)
            why = f"{step.turn}, since {step.held}{step.skipped}"
            proposed(rule.id, Proposal(version=version, recipe=step.recipe), evidence.versions[evidence.start].init, why)
    return proposals, considered


@dataclass(frozen=True)
class _Step:
    """What a rule would do to the incumbent."""

    rule: Rule
    recipe: Recipe
    turn: str
    """The change, in words."""
    held: str
    """The conditions that held, in words."""
    skipped: str
    """The values that were barred, in words."""
    evidence: list[Citation]
    hypothesis: str
    rollback: str

    def version(self, name: str, incumbent: str) -> Version:
        return Version(
            id=name, parents=[incumbent], author="agent", hypothesis=self.hypothesis, prediction=self.rule.prediction,
            rollback=self.rollback, rule=self.rule.id, evidence=self.evidence,
        )


def _consider(evidence: Evidence, rule: Rule, taken: Sequence[Run]) -> _Step | str:
    """The step that a rule asks for, or why it asks for none."""
    incumbent = evidence.versions[evidence.start]
    if rule.domain not in (None, evidence.domain):
        return f"is for the domain {rule.domain}, and this is {evidence.domain}"
    if incumbent.recipe.steps == 0:
        return f"{incumbent.id} has no training to change (steps: 0)"
    for condition in rule.when:
        if not holds(condition, incumbent):
            return f"needs {lack(condition, incumbent)}"
    for condition in rule.unless:
        if holds(condition, incumbent):
            return f"does not act while {fact(condition, incumbent)}"
    held = " and ".join(fact(condition, incumbent) for condition in rule.when)
    recipe, barred = climb(evidence, rule.change, taken)
    if recipe is None:
        return f"{held}, but no value of {rule.change.field} is left: {'; '.join(barred)}"
    before, after = (value_of(each, rule.change.field) for each in (incumbent.recipe, recipe))
    support = [citation for citation in incumbent.findings if any(citation in cited(condition, incumbent) for condition in rule.when)]
    names = _names(rule, incumbent, before, after, support)
    try:
        hypothesis, rollback = render(rule.hypothesis, names), render(rule.rollback, names)
    except BadSentence as error:
        return f"{held}, but its sentence cannot be written: {error}"
    return _Step(
        rule=rule, recipe=recipe, turn=f"{rule.change.field} {shown(before)} -> {shown(after)}", held=held,
        skipped=f" ({'; '.join(barred)})" if barred else "", evidence=support, hypothesis=hypothesis, rollback=rollback,
    )


def _names(rule: Rule, incumbent: VersionEvidence, before: object, after: object, support: Sequence[Citation]) -> dict[str, object]:
    """What the rule's sentences may speak of (sentences.NAMES); a measure that came out empty is not there."""
    return {
        "field": rule.change.field, "before": before, "after": after, "because": " ".join(citation.text for citation in support),
        "measures": {name: measure.value for name, measure in incumbent.measures.items() if measure.value is not None},
        "findings": {citation.finding: citation for citation in incumbent.findings},
    }


def _full(room: int) -> str:
    if room == 0:
        return "the campaign has no proposal left"
    return "this round's one place is taken" if room == 1 else f"this round's {room} places are taken"
