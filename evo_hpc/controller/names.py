"""Names by which campaign.yaml and rules.yaml speak of what analyzers find: each must be one that an analyzer can make."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from evo_hpc.agent.rules import load_rules
from evo_hpc.controller.state import CampaignState
from evo_hpc.errors import UserError


class UnknownName(UserError):
    """A finding or analyzer that does not exist is waited for; one line a name."""


def check_names(state: CampaignState) -> None:
    """Raise UnknownName for a futility rule or a rule of the agent that names what no analyzer on disk makes, BadRules, BadAnalyzer."""
    analyzers, campaign, paths = state.found.analyzers, state.settings.campaign, state.paths
    every = {each for analyzer in analyzers for each in analyzer.finding_ids}
    live = {each for analyzer in analyzers if analyzer.manifest.live for each in analyzer.finding_ids}
    names = {analyzer.name for analyzer in analyzers}
    problems = []
    if campaign.watch.every:
        problems += [
            f"{paths.campaign_yaml}: watch.stop_on names {name}, which no live analyzer finds{_hint(name, live)}"
            for name in campaign.watch.stop_on if name not in live
        ]
    rules_now = load_rules(state.found.rules)
    findings = {name for rule in rules_now.rules for condition in (*rule.when, *rule.unless) for name in condition.findings}
    for name, rules in rules_now.mentioned().items():
        if name not in every and name.split(".")[0] not in names:
            problems.append(f"{state.found.rules}: rule {', '.join(rules)} waits for {name}, but there is no analyzer {name.split('.')[0]}; there are: "
                            f"{', '.join(sorted(names))}")
        elif name not in every and name in findings:
            problems.append(f"{state.found.rules}: rule {', '.join(rules)} waits for {name}, which no analyzer finds{_hint(name, every)}")
    if problems:
        raise UnknownName("\n".join(problems))


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sorted(known))}"
