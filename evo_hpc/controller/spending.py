"""What a campaign has spent: the costs of its attempts summed by owner and kind of work, and how much of it was of use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evo_hpc.controller.cost import asked_by, cost_of
from evo_hpc.dispatch.attempt import load, load_record, load_result, read_attempt
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.jobs.cost import Cost, CostRecord, total
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.schemas import STEP
from evo_hpc.store.tables import read_tables


@dataclass(frozen=True)
class AttemptCost:
    """What one attempt has cost so far."""

    job: JobPaths
    owner: str
    """A version id, `base` or `final`."""
    cost: Cost
    recorded: bool
    """Nothing more comes to it."""
    counts: int | None = None
    """The incarnation whose outputs count."""


@dataclass(frozen=True)
class Spent:
    """What a campaign has used so far."""

    campaign: Cost
    owners: Mapping[str, Cost]
    """By version id, `base` and `final`."""

    @classmethod
    def of(cls, owners: Mapping[str, Cost]) -> Spent:
        """With the sum of all."""
        return cls(total(owners.values()), owners)


@dataclass(frozen=True)
class Work:
    """All attempts at one kind of work of one owner."""

    owner: str
    kind: str
    attempts: int
    cost: Cost
    useful_seconds: float | None
    """Of the seconds that its jobs ran; null while it goes on, and where the files that tell are gone."""

    @property
    def allocated_seconds(self) -> float:
        return 3600 * self.cost.wall_hours


@dataclass
class CostBook:
    """Costs of attempts; those that can change no more are read once, and their owner's sum is made once."""

    _final: dict[Path, AttemptCost] = field(default_factory=dict)
    _closed: dict[str, tuple[list[JobPaths], Cost]] = field(default_factory=dict)

    def read(self, jobs: Iterable[JobPaths], accounted: Iterable[SlurmJob] = ()) -> list[AttemptCost]:
        """What each has cost by now. Raises StoreError when a record is damaged."""
        accounted = list(accounted)
        return [self._final.get(job.root) or self._read(job, accounted) for job in jobs]

    def spent(self, owners: Mapping[str, Sequence[JobPaths]], accounted: Iterable[SlurmJob] = ()) -> Spent:
        """What is used by now, by owner and in all; for every tick: an owner whose attempts are all closed costs a comparison."""
        accounted = list(accounted)
        return Spent.of({owner: self._owner(owner, list(jobs), accounted) for owner, jobs in owners.items()})

    def _owner(self, owner: str, jobs: list[JobPaths], accounted: Sequence[SlurmJob]) -> Cost:
        closed = self._closed.get(owner)
        if closed is not None and closed[0] == jobs:
            return closed[1]
        cost = total(each.cost for each in self.read(jobs, accounted))
        if all(job.root in self._final for job in jobs):
            self._closed[owner] = jobs, cost
        return cost

    def _read(self, job: JobPaths, accounted: Sequence[SlurmJob]) -> AttemptCost:
        record, owner = load_record(job), job.owner.name
        counts = record.incarnation if record is not None else None
        if record is not None and job.cost.exists():
            found = AttemptCost(job, owner, load(CostRecord, job.cost).cost, True, counts)
            self._final[job.root] = found
            return found
        attempt = read_attempt(job)
        return AttemptCost(job, owner, cost_of(attempt, asked_by(attempt), accounted), record is not None, counts)


def all_jobs(paths: CampaignPaths) -> list[JobPaths]:
    """Every attempt of every owner, that on sealed included."""
    return [job for owner in (paths.base, *paths.versions(), paths.final) for job in owner.jobs()]


def spent(attempts: Iterable[AttemptCost]) -> Spent:
    """Sums by owner and of all. Pure."""
    by_owner: dict[str, list[Cost]] = defaultdict(list)
    for attempt in attempts:
        by_owner[attempt.owner].append(attempt.cost)
    return Spent.of({owner: total(costs) for owner, costs in by_owner.items()})


def works(paths: CampaignPaths, attempts: Iterable[AttemptCost]) -> list[Work]:
    """Costs by owner and kind, in the order of the attempts, with what of them was of use. Raises BadTable on damaged step tables."""
    grouped: dict[tuple[str, str], list[AttemptCost]] = defaultdict(list)
    for attempt in attempts:
        grouped[attempt.owner, attempt.job.kind].append(attempt)
    return [
        Work(owner, kind, len(each), total(a.cost for a in each), _useful(paths, owner, kind, each))
        for (owner, kind), each in grouped.items()
    ]


def _useful(paths: CampaignPaths, owner: str, kind: str, attempts: Sequence[AttemptCost]) -> float | None:
    """Seconds of the steps that ended in the published run, whichever attempt made them; else of the incarnation that counts."""
    if not all(attempt.recorded for attempt in attempts):
        return None
    if kind != "train":
        counted = [a.job.incarnation(a.counts) for a in attempts if a.counts is not None]
        if not all(incarnation.result.exists() for incarnation in counted):
            return None  # removed by hand
        return sum(load_result(incarnation).seconds for incarnation in counted)
    version = paths.version(owner)
    if not version.train.exists() and any(attempt.counts is not None for attempt in attempts):
        return None  # removed by hand: published again, or trained again
    seconds = read_tables(sorted(version.steps.glob("*.parquet")), STEP, ["seconds_step"]).column("seconds_step").to_pylist()
    return sum(each for each in seconds if each is not None)


def goodput(all_works: Iterable[Work]) -> float | None:
    """Useful seconds over the seconds that jobs ran, of the work that is over; null where none is. Pure."""
    over = [work for work in all_works if work.useful_seconds is not None]
    allocated = sum(work.allocated_seconds for work in over)
    return sum(work.useful_seconds or 0.0 for work in over) / allocated if allocated else None
