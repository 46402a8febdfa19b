"""How far a training run is for the watch: which parts of its tables are there, and which step is to be looked at next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from evo_hpc.config.campaign import Campaign, Watch
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.outputs import Part, PartsSoFar, TrainOutputs, parse_outputs
from evo_hpc.jobs.spec import load_spec
from evo_hpc.store.atomic import StoreError, read_json


@dataclass(frozen=True)
class Running:
    """A training run that is not published yet, as far as its newest attempt has shown."""

    parts: tuple[Part, ...]
    watch: Watch
    """As it was declared when the attempt was planned: a rule that changes while the run is on does not count for it."""
    finished: bool
    """All steps are done."""

    def reached(self) -> int:
        """The last step whose rows can be read."""
        return max((part.last_step for part in self.parts), default=0)

    def next_look(self, looked: int, steps: int) -> int | None:
        """The next step to look at after `looked`, when its rows are there. The last step is not one: the run is over then."""
        if not self.watch.every:
            return None
        step = looked + self.watch.every
        return step if step < steps and self.reached() >= step else None

    def up_to(self, step: int) -> tuple[Part, ...]:
        """The parts that make up the run's first `step` steps."""
        return tuple(part for part in self.parts if part.last_step <= step)


def read_running(root: Path, attempts: list[JobStatus], run: str | None) -> Running | None:
    """The newest attempt that has something to show of this very run; None before that. Raises StoreError on damage."""
    for status in reversed(attempts):
        if status.intent is None or run is None or status.intent.work != run:
            continue
        spec = load_spec(status.job)
        watch = Campaign.model_validate(spec.config).watch
        if status.result is not None and status.result.outcome == "done":
            made = parse_outputs(TrainOutputs, status.result.outputs, status.job, root)
            return Running(tuple(made.parts), watch, finished=True)
        for incarnation in reversed(status.job.incarnations()):
            if incarnation.parts.exists():
                found = _read_parts(incarnation.parts)
                if found.run == run:
                    return Running(tuple(found.parts), watch, finished=False)
        return Running((), watch, finished=False)
    return None


def _read_parts(path: Path) -> PartsSoFar:
    try:
        return PartsSoFar.model_validate(read_json(path))
    except ValidationError as error:
        raise StoreError(f"{path}: not a list of table parts ({error.errors()[0]['msg']}); remove it: the run writes it again") from error
