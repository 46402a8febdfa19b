"""The files of one attempt, read into one record; damage is an error that names the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from evo_hpc.jobs.claims import read_claim
from evo_hpc.jobs.spec import Ended, Identity, Intent, Record, Result, Start, Submission
from evo_hpc.paths import CampaignPaths, IncarnationPaths, JobPaths
from evo_hpc.store.atomic import StoreError, read_json

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Attempt:
    """What an attempt's folder says."""

    job: JobPaths
    intent: Intent | None
    starts: tuple[Start, ...]
    """In order; the last is the one that counts."""
    submissions: Mapping[int, Submission]
    """By start, where Slurm's answer is known."""
    ended: Mapping[int, Ended]
    """By start, where this program cancelled its Slurm job."""
    claims: tuple[tuple[int, Identity], ...]
    """Incarnations and who they are, in order; the last holds the attempt."""
    results: Mapping[int, Result]
    """By incarnation."""
    beats: Mapping[int, float]
    """Unix time of the last heartbeat, by incarnation."""
    steps: Mapping[int, int]
    """How far each incarnation came, by its own progress file."""

    def of_start(self, number: int) -> tuple[int, Identity] | None:
        """The newest incarnation of a start."""
        return next(((n, identity) for n, identity in reversed(self.claims) if identity.start == number), None)

    def beaten(self) -> Attempt:
        """The same with the newest heartbeat of its last incarnation as it is now."""
        if not self.claims:
            return self
        number = self.claims[-1][0]
        beat = last_beat(self.job, number, self.beats.get(number, 0.0))
        return replace(self, beats={**self.beats, number: beat}) if beat else self

    @property
    def stale(self) -> int:
        """Incarnations in a row, the newest last, that came no step further than those before them."""
        best, stale = -1, 0
        for number, _ in self.claims:
            step = self.steps.get(number, -1)
            stale = 0 if step > best else stale + 1
            best = max(best, step)
        return stale


def read_attempt(job: JobPaths) -> Attempt:
    """All records of an attempt. Raises StoreError when one is damaged."""
    # Results after claims: a job that ends in between has claimed before it ended.
    claims = tuple((number, read_claim(job, number)) for number, _ in job.claims())
    incarnations = job.incarnations()
    return Attempt(
        job=job, intent=load_intent(job),
        starts=tuple(load(Start, path) for _, path in job.starts()),
        submissions={number: load(Submission, path) for number, path in job.submissions()},
        ended={number: load(Ended, path) for number, path in job.endeds()},
        claims=claims, results={inc.number: load(Result, inc.result) for inc in incarnations if inc.result.exists()},
        beats={inc.number: beat for inc in incarnations if (beat := _number(inc.heartbeat, "time")) is not None},
        steps={inc.number: int(step) for inc in incarnations if (step := _number(inc.progress, "step")) is not None},
    )


def load_intent(job: JobPaths) -> Intent | None:
    """Null before anything is to be run. Raises StoreError."""
    return load(Intent, job.intent) if job.intent.exists() else None


def load_record(job: JobPaths) -> Record | None:
    """Null until the controller has written its last word. Raises StoreError."""
    return load(Record, job.record) if job.record.exists() else None


def load_result(incarnation: IncarnationPaths) -> Result:
    """The last word of an incarnation. Raises StoreError when there is none or it is damaged."""
    return load(Result, incarnation.result)


def load(model: type[M], path: Path) -> M:
    """One JSON record. Raises StoreError, naming the file."""
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        raise StoreError(f"{path}: not a {model.__name__.lower()} ({error.errors()[0]['msg']})") from error


def campaign_root(job: JobPaths) -> str:
    """Absolute folder of the campaign that a job lies in, links resolved."""
    return str(CampaignPaths.of_job(job).root.resolve())


def last_beat(job: JobPaths, incarnation: int, otherwise: float) -> float:
    """Unix time of an incarnation's last sign of life."""
    beat = _number(job.incarnation(incarnation).heartbeat, "time")
    return otherwise if beat is None else beat


def reached(job: JobPaths) -> int:
    """The step that an attempt came to; 0 for one without steps. What is damaged says nothing."""
    return int(max((step for each in job.incarnations() if (step := _number(each.progress, "step")) is not None), default=0))


def work_of(job: JobPaths) -> str | None:
    """What an attempt is, or was, to do; null where that is not to be read."""
    try:
        intent = load_intent(job)
    except StoreError:
        return None
    return intent.work if intent is not None else None


def _number(path: Path, field: str) -> float | None:
    """A number in a file that jobs rewrite all the time; what cannot be read says nothing yet."""
    try:
        value = read_json(path).get(field)
    except (StoreError, AttributeError):
        return None
    return float(value) if isinstance(value, (int, float)) else None
