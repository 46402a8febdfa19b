"""Whether two runs of one campaign came to the same: decisions, scores, policies and the claim, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping

from evo_hpc.controller.claim import final_claim
from evo_hpc.controller.state import read_state
from evo_hpc.paths import CampaignPaths


def outcome(paths: CampaignPaths) -> dict[str, str]:
    """What a campaign came to, without times and places; floats in full, policies by their identity."""
    state = read_state(paths)
    found: dict[str, str] = {}
    for version in state.versions.values():
        decision = version.decision
        found[f"{version.id} decision"] = f"{decision.decision}, promoted {decision.promoted}" if decision else "none"
        found[f"{version.id} from"] = " ".join([*version.node.version.parents, version.node.version.hypothesis])
        for suite, record in version.evaluations.items():
            found[f"{version.id} {suite}"] = "none" if record is None else repr(record.avg_at_k)
        found[f"{version.id} policy"] = version.policy_identity or "none"
    claim = final_claim(paths, state.tasks.splits["sealed"].task_set) if state.tasks else None
    if claim is not None:
        result, interval = claim.result, claim.result.comparison
        found["claim"] = (f"{claim.read.candidate.version} {result.verdict} {interval.difference!r} "
                          f"[{interval.ci_low!r}, {interval.ci_high!r}]")
    return found


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What two outcomes do not share, in words."""
    names = list(dict.fromkeys([*theirs, *ours]))
    return [f"{name}: {ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} there" for name in names if ours.get(name) != theirs.get(name)]


def comparison(paths: CampaignPaths, other: CampaignPaths) -> str:
    """The same or not, for people."""
    ours, theirs = outcome(paths), outcome(other)
    found = differences(ours, theirs)
    if not found:
        return f"The same as {other.root}: {len(ours)} decisions, scores, policies and claims are equal to the last bit."
    head = f"Not the same as {other.root} (as it is where both ran on one machine, with the same code and settings):"
    return "\n".join([head, *(f"  {line}" for line in found)])
