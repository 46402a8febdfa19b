"""What a report shows of a campaign, as plain records, and how they are put together: pure, nothing is read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from pydantic import BaseModel

from evo_hpc.agent.proposal import Round
from evo_hpc.lineage.comparison import Comparison, Interval
from evo_hpc.lineage.decision import KEPT, Decision
from evo_hpc.lineage.factors import Change
from evo_hpc.lineage.findings import AnalyzerReport, Finding
from evo_hpc.lineage.looks import Look
from evo_hpc.lineage.reads import ReadResult
from evo_hpc.lineage.version import Version
from evo_hpc.report.words import change_words

SCHEMA_VERSION = 1
"""Version of the report's format."""
SUITE = "dev"
"""What the gate reads, and what a version's score means where no suite is named."""
STANDINGS = ("base", "kept", "pruned", "reverted", "stopped early", "open")
"""What became of a version, in a word; `open`: not decided yet."""


@dataclass(frozen=True)
class Score:
    """Avg@k of one version on one suite, with its 95 % interval over tasks; missing rollouts count as failures."""

    avg_at_k: float
    ci_low: float | None
    """Null where there is one task only."""
    ci_high: float | None
    n_tasks: int
    k: int
    missing: int
    epoch: str
    """Evaluator epoch: scores of different ones are not comparable."""
    note: str = ""


@dataclass(frozen=True)
class Curves:
    """A training run by steps: one tuple a metric, as long as `steps`; null where a metric was not finite."""

    steps: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True)
class StoppedEarly:
    """Where the futility rule ended a training run, and the findings that it named."""

    step: int
    findings: tuple[str, ...]


@dataclass(frozen=True)
class VersionReport:
    """One version with everything that is known of it."""

    version: Version
    recipe_steps: int
    seed: int
    init: str
    stage: str
    """How far it is, in words, for one that is not decided."""
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    """Against each parent, by its id."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """By suite."""
    over_base: Interval | None = None
    """On dev against the root, at 95 %: described, never tested; null where epochs differ or a score is missing."""
    comparisons: tuple[Comparison, ...] = ()
    """Oldest look first."""
    decision: Decision | None = None
    curves: Curves | None = None
    harness: str | None = None
    """Whose analyzers `analyses` are of."""
    analyses: tuple[AnalyzerReport, ...] = ()
    stopped_early: StoppedEarly | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of its jobs by kind, all attempts together."""
    failed_attempts: int = 0

    @property
    def id(self) -> str:
        return self.version.id

    @property
    def parents(self) -> list[str]:
        return self.version.parents

    @property
    def standing(self) -> str:
        """One of STANDINGS."""
        if not self.parents:
            return "base"
        if self.stopped_early is not None or (self.decision is not None and self.decision.outcome == "stopped_early"):
            return "stopped early"
        if self.decision is None:
            return "open"
        return "kept" if self.decision.decision in KEPT else {"prune": "pruned", "revert": "reverted"}[self.decision.decision]

    @property
    def verdict(self) -> str:
        """Its standing for people: of an open one, how far it is; where a person overruled the gate, that too."""
        by_hand = " by hand" if self.decision is not None and self.decision.by == "person" else ""
        return self.stage if self.standing == "open" else self.standing + by_hand

    @property
    def score(self) -> Score | None:
        """On dev."""
        return self.scores.get(SUITE)

    @property
    def first_changes(self) -> tuple[Change, ...]:
        """Against the first parent."""
        return self.changes.get(self.parents[0], ()) if self.parents else ()

    @property
    def origin(self) -> str:
        """What it changes against its first parent, or what it merges, in a few words; empty for a root."""
        if len(self.parents) > 1:
            return f"merge with {', '.join(self.parents[1:])}"
        return (change_words(self.first_changes) or "no change") if self.parents else ""

    @property
    def findings(self) -> list[Finding]:
        """Of all analyzers, the severest first."""
        order = {"critical": 0, "warning": 1, "info": 2}
        return sorted((f for report in self.analyses for f in report.findings), key=lambda f: (order[f.severity], f.id))


@dataclass(frozen=True)
class SealedRead:
    """One read of the sealed tasks, by this campaign or another that shares them."""

    number: int
    campaign: str
    own: bool
    """Whether it was this campaign's."""
    baseline: str
    candidate: str
    declared_at: float
    """Unix time in seconds."""
    why: str | None = None
    """Why a campaign read again."""
    result: ReadResult | None = None
    """The predeclared test of this campaign's own read; null while it is not done, and for the reads of others."""


@dataclass(frozen=True)
class CampaignReport:
    """Everything that the HTML and the Markdown report show."""

    name: str
    description: str
    folder: str
    """Name of the campaign's folder, as it stands in the commands."""
    domain: str
    seed: int
    alpha: float
    """What all looks at dev may spend together."""
    started_at: float | None
    data_at: float | None
    """Unix time of the newest record that was read."""
    tasks: Mapping[str, int]
    """Tasks by split."""
    versions: tuple[VersionReport, ...]
    """In the order of their ids."""
    looks: tuple[Look, ...]
    rounds: tuple[Round, ...]
    sealed: tuple[SealedRead, ...]
    epochs: Mapping[str, Mapping[str, str]]
    """Evaluator epoch -> what determines a score."""
    software: Mapping[str, tuple[str, ...]]
    """Name -> the distinct versions that ran."""
    other_seconds: float
    """Wall time of the jobs of no version: the base policy's and the final claim's."""

    def __getitem__(self, version: str) -> VersionReport:
        return next(v for v in self.versions if v.id == version)

    @property
    def base(self) -> VersionReport | None:
        """The root, where there is one."""
        return next((v for v in self.versions if not v.parents), None)

    @property
    def decided(self) -> bool:
        """Whether the gate or a person has decided anything yet."""
        return any(v.decision is not None for v in self.versions)

    @property
    def incumbent(self) -> str | None:
        """The version to beat: the last one promoted, else the root; null while there is no version."""
        promoted = [v.id for v in self.versions if v.decision is not None and v.decision.promoted]
        return promoted[-1] if promoted else self.base.id if self.base else None

    @property
    def best(self) -> VersionReport | None:
        """The incumbent; before anything is decided, the highest score so far."""
        if self.decided and self.incumbent is not None:
            return self[self.incumbent]
        scored = [v for v in self.versions if v.score is not None]
        return max(scored, key=lambda v: v.score.avg_at_k if v.score else 0.0, default=None)

    @property
    def tried(self) -> tuple[VersionReport, ...]:
        """All but roots."""
        return tuple(v for v in self.versions if v.parents)

    @property
    def standings(self) -> Mapping[str, int]:
        """How many of those tried stand how."""
        return Counter(v.standing for v in self.tried)

    @property
    def seconds(self) -> float:
        """Wall time of all jobs."""
        return self.other_seconds + sum(sum(v.seconds.values()) for v in self.versions)

    @property
    def alpha_spent(self) -> float:
        return sum(look.alpha for look in self.looks)

    def record(self) -> dict[str, Any]:
        """Plain values, for scripts."""
        found = _plain(self)
        for version, shown in zip(self.versions, found["versions"], strict=True):
            shown.update(id=version.id, standing=version.standing, stage=version.stage)
        return {
            "schema_version": SCHEMA_VERSION, **found, "incumbent": self.incumbent, "best": self.best.id if self.best else None,
            "alpha_spent": self.alpha_spent, "seconds": self.seconds,
        }

    @property
    def claim(self) -> SealedRead | None:
        """This campaign's newest finished read of the sealed tasks."""
        return next((read for read in reversed(self.sealed) if read.own and read.result is not None), None)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def build(
    *, name: str, description: str = "", folder: str, domain: str, seed: int, alpha: float, versions: Sequence[VersionReport],
    looks: Sequence[Look] = (), rounds: Sequence[Round] = (), sealed: Sequence[SealedRead] = (), tasks: Mapping[str, int] | None = None,
    epochs: Mapping[str, Mapping[str, str]] | None = None, software: Mapping[str, tuple[str, ...]] | None = None, other_seconds: float = 0.0,
    times: Sequence[float] = (),
) -> CampaignReport:
    """The report of pieces that were read, in a fixed order whatever order they came in; `times`: of everything that says when it was."""
    return CampaignReport(
        name=name, description=description, folder=folder, domain=domain, seed=seed, alpha=alpha, started_at=min(times, default=None),
        data_at=max(times, default=None), tasks=dict(tasks or {}), versions=tuple(sorted(versions, key=lambda v: int(v.id[1:]))),
        looks=tuple(sorted(looks, key=lambda look: look.number)), rounds=tuple(sorted(rounds, key=lambda found: found.number)),
        sealed=tuple(sorted(sealed, key=lambda read: read.number)),
        epochs={key: dict(sorted(inner.items())) for key, inner in sorted((epochs or {}).items())},
        software=dict(sorted((software or {}).items())), other_seconds=other_seconds,
    )
