"""Attempts on disk as the package's own writers leave them, without a job that ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evo_hpc.config.cluster import Cluster
from evo_hpc.jobs.spec import Identity, Intent, JobSpec, Record, Result, Start, spec_bytes
from evo_hpc.paths import JobPaths
from evo_hpc.store.atomic import write_bytes, write_json
from evo_hpc.store.processes import ProcessIdentity

PROCESS = ProcessIdentity(host="n1", boot="b", pid=1, start_ticks=1)
NAME = "evo-c-12345678-v0001-train-000"


class Owner:
    """The right to commit, of a test that is alone."""

    generation = 3

    def check(self) -> None:
        """Nobody else writes here."""


def start(number: int = 0, at: float = 0.0, index: int | None = None) -> Start:
    return Start(number=number, generation=1, written_at=at, slurm_name=f"{NAME}-s{number}", array_index=index)


def who(number: int, claimed_at: float, restart: int = 0) -> Identity:
    return Identity(job_name=NAME, generation=1, start=number, restart=restart, process=PROCESS, claimed_at=claimed_at)


def spec(kind: str = "train", **slurm: Any) -> JobSpec:
    cluster = Cluster(slurm=slurm).model_dump(mode="json")  # type: ignore[arg-type]
    return JobSpec(name=NAME, kind=kind, campaign="c", owner="v0001", attempt=0, config={}, cluster=cluster)  # type: ignore[arg-type]


def write_attempt(job: JobPaths, *, executor: str = "slurm", seconds: float = 1800.0, recorded: str | None = "done", **slurm: Any) -> JobPaths:
    """An attempt of one start and one incarnation, as the package's own writers leave it."""
    made = spec(job.kind, **slurm)
    write_bytes(job.spec, spec_bytes(made))
    intent = Intent(name=NAME, spec_sha256="", owner=job.owner.name, work="w", root="/c", generation=1, written_at=0, executor=executor)  # type: ignore[arg-type]
    records: list[tuple[Path, Any]] = [
        (job.intent, intent), (job.start(0), start(0, 1000.0)), (job.claim(0), who(0, 1002.0)),
        (job.incarnation(0).result, Result(outcome="done", seconds=seconds)),
    ]
    if recorded is not None:
        done = recorded == "done"
        records.append((job.record, Record(state=recorded, incarnation=0 if done else None, generation=1, started_by=1, starts=1, seconds=seconds)))  # type: ignore[arg-type]
    for path, model in records:
        write_json(path, model.model_dump())
    return job
