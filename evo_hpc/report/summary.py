"""What a report says in sentences: the outcome, what is still missing, and what its numbers may be taken for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evo_hpc.lineage.comparison import Comparison
from evo_hpc.report.model import SUITE, CampaignReport, SealedRead, VersionReport
from evo_hpc.report.words import alpha, count, duration, listed, percent, percent_interval, points, points_interval


def summary(report: CampaignReport) -> list[str]:
    """The campaign in one paragraph: its outcome, its claim, what was tried, the time."""
    return [*_outcome(report), _claim(report), _tried(report)]


def _outcome(report: CampaignReport) -> list[str]:
    base, best = report.base, report.best
    if base is None or best is None:
        return ["Nothing has been scored yet."]
    if best.score is None:
        return [f"{best.id}, the version to beat, has no score on {SUITE} yet."]
    score = f"{percent(best.score.avg_at_k)}, 95 % interval {percent_interval(best.score.ci_low, best.score.ci_high)} ({_size(best)})"
    if best is base:
        others = [v for v in report.tried if v.score is not None]
        beaten = "No version has been shown to beat it." if others else "No other version has been scored yet."
        return [f"The base policy, {base.id}, scores {score}. {beaten}"]
    standing = f"{best.id} is the best version" if report.decided else f"{best.id} has the highest score so far (nothing has been decided yet)"
    if best.over_base is None or base.score is None:
        return [f"{standing}: it scores {score}. It was not scored under the same evaluator epoch as {base.id}, so the gain is not known."]
    gain = best.over_base
    return [
        f"{standing}: from {base.id}, the base policy, to {best.id}, the score goes from {percent(gain.mean_a)} to {percent(gain.mean_b)}, "
        f"{points(gain.difference)} points, 95 % interval {points_interval(gain.ci_low, gain.ci_high)} ({_size(best)}).",
        "It was chosen on these same tasks, so this gain leans high.",
    ]


def _size(version: VersionReport) -> str:
    assert version.score is not None
    return f"Avg@{version.score.k} on {SUITE}, n = {count(version.score.n_tasks, 'task')} × {version.score.k}"


def _claim(report: CampaignReport) -> str:
    claim = report.claim
    if claim is None or claim.result is None:
        told = "a read of the sealed tasks is declared, but not finished" if any(read.own for read in report.sealed) else \
            "this campaign has not read the sealed tasks"
        return f"There is no final claim: {told}."
    found, pair = claim.result.comparison, (claim.candidate, claim.baseline)
    said = {"better": "{} scores higher than {}", "worse": "{} scores lower than {}", "not shown": "no difference between {} and {} is shown"}
    return (f"The final claim: {said[claim.result.verdict].format(*pair)} on {count(claim.result.n_tasks, 'sealed task')}, "
            f"{points(found.difference)} points, {100 * (1 - found.alpha):g} % interval {points_interval(found.ci_low, found.ci_high)}; "
            f"{before(report, claim)}.")


def before(report: CampaignReport, claim: SealedRead) -> str:
    """How often the sealed tasks had been read when a claim was made, and by whom."""
    earlier = [read for read in report.sealed if read.number < claim.number]
    if not earlier:
        return "nobody had read these tasks before"
    return f"these tasks had been read {count(len(earlier), 'time')} before, by {listed(sorted({read.campaign for read in earlier}))}"


def _tried(report: CampaignReport) -> str:
    known = report.standings
    kinds = [f"{known[kind]} {kind}" for kind in ("kept", "pruned", "reverted", "stopped early") if known[kind]]
    if known["open"]:
        kinds.append(f"{known['open']} not decided yet")
    tried = f"{count(len(report.tried), 'version')} tried: {', '.join(kinds)}." if report.tried else "No version has been tried yet."
    return f"{tried} {duration(report.seconds)} of job time in all."


def gaps(report: CampaignReport) -> list[str]:
    """What a reader should know is not there (yet); empty for a finished campaign."""
    waiting: dict[str, list[str]] = {}
    for version in report.versions:
        if version.standing == "open" or (not version.parents and version.score is None):
            waiting.setdefault(version.stage, []).append(version.id)
    found = [f"not decided yet, {stage}: {listed(ids)}" for stage, ids in waiting.items()]
    if report.tried and not any(v.analyses for v in report.versions):
        found.append("no analyzer has looked at any version")
    if len({v.score.epoch for v in report.versions if v.score}) > 1:
        found.append("the versions were scored under several evaluator epochs: their scores on dev are not comparable across them")
    return found


def replicates(report: CampaignReport) -> list[str]:
    """Versions that change nothing but the seed."""
    return [v.id for v in report.versions if v.first_changes and {c.factor for c in v.first_changes} == {"seed"}]


def cautions(report: CampaignReport) -> list[str]:
    """What the numbers may and may not be taken for."""
    missing = sum(score.missing for v in report.versions for score in v.scores.values())
    same = replicates(report)
    found = [
        f"The gate looked at {SUITE} {count(len(report.looks), 'time')} and spent {alpha(report.alpha_spent)} of the {report.alpha:g} declared "
        "before the first look; look i may spend 6α/(π²i²).",
        "A higher score on dev is exploratory. It says that one policy scores higher than another on these tasks; it is not a claim about the "
        "intervention, which needs replicate seeds.",
        f"Replicates here: {listed(same)}." if same else "No version here is a replicate: each recipe was trained with one seed.",
        "Intervals resample tasks, not rollouts: they say how far the score would move on other tasks of the same kind, not on another training run.",
        f"{count(missing, 'rollout')} of all evaluations {'is' if missing == 1 else 'are'} missing; a missing rollout counts as a failure.",
    ]
    notes = [(f"{v.id} on {suite}", score.note) for v in report.versions for suite, score in v.scores.items()]
    notes += [(f"{v.id} against {c.against}", c.at_look_alpha.note) for v in report.versions for c in v.comparisons]
    found += [f"The interval of {what}: {note}." for what, note in notes if note]
    if report.claim is None:
        found.append("Nothing here is a final claim: that takes one predeclared test on the sealed tasks.")
    return found


@dataclass(frozen=True)
class Line:
    """One row of the score table: a version, and one of its comparisons if it has any."""

    version: VersionReport
    first: bool
    """Whether it is the version's first row, which carries the score."""
    comparison: Comparison | None


def score_lines(report: CampaignReport) -> list[Line]:
    """Every version, once for each comparison of it, and once if it has none."""
    lines = []
    for version in report.versions:
        pairs: Sequence[Comparison | None] = version.comparisons or (None,)
        lines += [Line(version, index == 0, comparison) for index, comparison in enumerate(pairs)]
    return lines


def inert(report: CampaignReport) -> list[tuple[str, str, str]]:
    """Knobs that were turned and did nothing: version, finding, sentence."""
    return [(v.id, f.id, f.text) for v in report.versions for f in v.findings if "inert" in f.id]
