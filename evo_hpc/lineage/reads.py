"""The records of a read of sealed tasks: who is compared by which test, and what came out; signed, so that an edit shows."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from evo_hpc.lineage.comparison import Interval
from evo_hpc.lineage.decision import Verdict
from evo_hpc.lineage.signed import Signed


class Candidate(BaseModel):
    """A version that is read for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    policy: str
    """Identity of its policy (lineage/identity.py)."""


class Read(Signed):
    """`read-N.json`: who is compared and by which test, written before any sealed task is read."""

    schema_version: Literal[1] = 1
    number: int
    """1 for the first read of these tasks by any campaign; 0 in a draft."""
    task_set: str
    """Hash of the sealed tasks."""
    campaign: str
    """Its name, for people."""
    place: str
    """The campaign's folder relative to the workspace: what tells campaigns apart, also after the workspace has moved."""
    folder: str
    """The campaign's absolute folder at the time."""
    baseline: Candidate
    candidate: Candidate
    alpha: float
    """Of the one two-sided test."""
    method: Literal["t", "studentized", "bca", "percentile"]
    draws: int
    seed: int
    evaluator: dict[str, str]
    """Settings that determine the scores; the evaluator epoch, which also names the engine, is in the result."""
    why: str | None = None
    """Why the campaign reads again, in words; null at its first read."""
    generation: int
    """Of the controller lease under which it was declared."""
    declared_at: float
    """Unix time in seconds."""
    previous: str = ""
    """Digest of the read before it; empty for the first."""


class Estimate(BaseModel):
    """Avg@k of one version on sealed, with its interval over tasks (see stats.MeanEstimate)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    ci_low: float
    ci_high: float
    missing: int
    """Rollouts without a score; they count as failures."""
    note: str


class OtherRead(BaseModel):
    """Another read of the same tasks, as it is shown beside a claim."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    campaign: str
    place: str
    baseline: str
    candidate: str
    declared_at: float
    """Unix time in seconds."""
    why: str | None


class ReadResult(Signed):
    """`result-N.json`: what came out of a read."""

    schema_version: Literal[1] = 1
    read: int
    read_digest: str
    evaluator_epoch: str
    evaluations: tuple[str, str]
    """Identities of the two evaluations, the baseline's first."""
    n_tasks: int
    k: int
    """Rollouts a task."""
    baseline: Estimate
    candidate: Estimate
    comparison: Interval
    """Candidate minus baseline, by the declared test."""
    comparison_t: Interval
    """The same by the t method, as a check."""
    verdict: Verdict
    """Where the interval of the declared test lies: above zero, around it, below it."""
    earlier: list[OtherRead]
    """Reads of the same tasks declared before this one, by any campaign."""
    generation: int
    finished_at: float
    """Unix time in seconds."""


def other_read(read: Read) -> OtherRead:
    """What is shown of a read beside the claim of another."""
    return OtherRead(
        number=read.number, campaign=read.campaign, place=read.place, baseline=read.baseline.version, candidate=read.candidate.version,
        declared_at=read.declared_at, why=read.why,
    )
