"""What an export has to say: the metrics of a campaign's training runs, step by step, from their Parquet tables alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.errors import UserError
from evo_hpc.lineage.identity import digest
from evo_hpc.store.schemas import METRIC
from evo_hpc.store.tables import read_tables

COLUMNS = ("step", "name", "value", "kind", "time")


@dataclass(frozen=True)
class StepPoints:
    """All that is known of one step."""

    step: int
    time: float
    """When the step was recorded, in Unix seconds."""
    values: dict[str, float]
    """By tag, `kind/name`: what was not finite, or not measured, is left out."""


@dataclass(frozen=True)
class RunPoints:
    """One training run."""

    campaign: str
    version: str
    id: str
    """Of campaign, version and what the run was trained with: the same for every export of it, another one when it is trained anew."""
    steps: tuple[StepPoints, ...]
    """In order of steps, each once."""

    @property
    def last_step(self) -> int:
        return self.steps[-1].step

    def count(self) -> int:
        """Points in all."""
        return sum(len(step.values) for step in self.steps)


def read_runs(state: CampaignState, versions: Sequence[str] = ()) -> list[RunPoints]:
    """The runs of these versions, or of all that have any metrics. Parts that a running job has not finished are not looked at.

    Raises UserError where a named version has no metrics, or none has; BadTable on a damaged table.
    """
    chosen = [state.named(name) for name in dict.fromkeys(versions)] or list(state.versions.values())
    found = [(version, _run(state, version)) for version in chosen]
    if versions and (without := [version.id for version, run in found if run is None]):
        raise UserError(f"{', '.join(without)}: no metrics yet; `evo-hpc status` shows how far it is (a version of 0 steps never has any)")
    runs = [run for _, run in found if run is not None]
    if not runs:
        raise UserError(f"{state.paths.root}: no version has metrics yet; `evo-hpc run` trains them")
    return runs


def _run(state: CampaignState, version: VersionState) -> RunPoints | None:
    steps = _steps(_files(state, version))
    campaign = state.settings.campaign.name
    return RunPoints(campaign, version.id, digest([campaign, version.id, version.run]), steps) if steps else None


def _files(state: CampaignState, version: VersionState) -> list[Path]:
    """Of the published run, or the finished parts of the one that runs now."""
    if version.node.paths.train.exists():
        return sorted(version.node.paths.metrics.glob("*.parquet"))
    return [state.paths.root / part.path for part in version.running.parts if part.table == "metrics"] if version.running else []


def _steps(files: Iterable[Path]) -> tuple[StepPoints, ...]:
    by_step: dict[int, tuple[float, dict[str, float]]] = {}
    for row in read_tables(files, METRIC, COLUMNS).to_pylist():
        time, values = by_step.setdefault(row["step"], (row["time"].timestamp(), {}))
        if row["value"] is not None:
            values[f"{row['kind']}/{row['name']}"] = row["value"]
    return tuple(StepPoints(step, *by_step[step]) for step in sorted(by_step))
