"""The final claim as a record and in words: the test, its interval, and every other read of the same tasks."""

from __future__ import annotations

from datetime import datetime, timezone

from evo_hpc.config.base import Config
from evo_hpc.lineage.reads import Estimate, OtherRead, Read, ReadResult, other_read
from evo_hpc.lineage.sealed import Entry, place_of, read_ledger
from evo_hpc.paths import CampaignPaths

_METHODS = {"studentized": "bootstrap-t", "t": "t interval", "bca": "BCa bootstrap", "percentile": "percentile bootstrap"}
_VERDICTS = {
    "better": "{b} scores higher than {a} on the sealed tasks", "worse": "{b} scores lower than {a} on the sealed tasks",
    "not shown": "No difference between {b} and {a} is shown on the sealed tasks",
}


class FinalResult(Config):
    """What `finalize` gives."""

    read: Read
    result: ReadResult
    fresh: bool
    """Whether the scores were taken now; false: an earlier `finalize` of this campaign took them."""
    later: list[OtherRead]
    """Reads of the same tasks declared after this one, by any campaign."""
    notes: list[str]
    """What the user should know besides."""


def final_result(entry: Entry, entries: list[Entry], *, fresh: bool = False, notes: list[str] | None = None) -> FinalResult:
    """The record of a finished read; `entries` is the whole ledger."""
    assert entry.result is not None
    later = [other_read(other.read) for other in entries if other.read.number > entry.read.number]
    return FinalResult(read=entry.read, result=entry.result, fresh=fresh, later=later, notes=notes or [])


def final_claim(paths: CampaignPaths, task_set: str) -> FinalResult | None:
    """The campaign's newest finished read of a sealed task set, None where there is none; reads no task. Raises BadSealedLedger."""
    entries = read_ledger(paths.workspace, task_set)
    own = [entry for entry in entries if entry.read.place == place_of(paths) and entry.result is not None]
    return final_result(own[-1], entries) if own else None


def describe(final: FinalResult) -> str:
    """The claim in a few plain sentences, one a line."""
    read, result = final.read, final.result
    a, b, c = read.baseline.version, read.candidate.version, result.comparison
    level = f"{100 * (1 - read.alpha):g} % interval"
    lines = [
        f"{_VERDICTS[result.verdict].format(a=a, b=b)}: {100 * c.difference:+.1f} points, {level} [{100 * c.ci_low:+.1f}, {100 * c.ci_high:+.1f}], "
        f"{_p(c.p_value)} (two-sided), n = {result.n_tasks} tasks x {result.k} rollouts.",
        f"Avg@{result.k} with its {level}: {a} {_estimate(result.baseline)}, {b} {_estimate(result.candidate)}.",
        f"Paired {_METHODS[read.method]} over whole tasks; the t method gives [{100 * result.comparison_t.ci_low:+.1f}, "
        f"{100 * result.comparison_t.ci_high:+.1f}].{f' Note: {c.note}.' if c.note else ''}",
    ]
    if missing := result.baseline.missing + result.candidate.missing:
        lines.append(f"{missing} rollouts have no score ({result.baseline.missing} of {a}, {result.candidate.missing} of {b}); they count as "
                     "failures.")
    lines.append(f"The test was declared before any of these tasks was read for it (read {read.number}, {_time(read.declared_at)}). It is a claim "
                 "about two policies; that the changes between them are the cause would need other seeds.")
    if read.why:
        lines.append(f"Why it was read: {read.why}")
    if result.earlier:
        lines.append(f"These tasks had been read before, which weakens the claim: {_reads(result.earlier)}.")
    else:
        lines.append("Nobody had read these tasks before.")
    if final.later:
        lines.append(f"Since then: {_reads(final.later)}.")
    return "\n".join([*lines, *final.notes])


def _reads(reads: list[OtherRead]) -> str:
    return "; ".join(
        f"read {r.number} by campaign {r.campaign} ({r.place}), {r.candidate} against {r.baseline}, {_time(r.declared_at)}"
        + (f", because: {r.why}" if r.why else "")
        for r in reads
    )


def _estimate(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f} % [{100 * estimate.ci_low:.1f}, {100 * estimate.ci_high:.1f}]"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.4f}" if value < 0.01 else f"p = {value:.2f}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
