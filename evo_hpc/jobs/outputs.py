"""What jobs say that they made: typed, and confined to the folders of their own job's owner."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from evo_hpc.config.base import Config
from evo_hpc.paths import JobPaths
from evo_hpc.store.atomic import StoreError


def _inside(value: str) -> str:
    parts = PurePosixPath(value).parts
    if PurePosixPath(value).is_absolute() or ".." in parts or "jobs" not in parts:
        raise ValueError("must be a path inside the campaign's job folders")
    return value


JobPath = Annotated[str, AfterValidator(_inside)]
"""Path relative to the campaign, below a `jobs` folder."""


class SuperviseOutputs(Config):
    """Of a supervised job."""

    policy: JobPath
    step: int
    loss: float
    tokens: float
    effective: dict[str, JobPath]


class Part(Config):
    """One Parquet file of a training run."""

    table: Literal["rollouts", "metrics", "steps"]
    path: JobPath
    first_step: int
    last_step: int
    bytes: int
    sha256: str


class PartsSoFar(Config):
    """`parts.json` of an incarnation: the table parts that make up its run so far."""

    run: str
    """Identity of the run (lineage/identity.py)."""
    parts: list[Part]


class TrainOutputs(Config):
    """Of a training job."""

    step: int
    run: str
    """Identity of the run (lineage/identity.py)."""
    parts: list[Part]
    checkpoint: JobPath
    policy: JobPath
    effective: dict[str, JobPath]


class Chunk(Config):
    """A finished chunk of an evaluation that is under way: some of its tasks, each with all its rollouts, in one Parquet file."""

    version: Annotated[str, Field(pattern=r"^v\d{4,}$")]
    suite: Literal["probe", "dev", "sealed"]
    identity: str
    """Identity of the evaluation (evaluation/chunks.py)."""
    first: int
    """Position of its first task among those of the job."""
    last: int
    tasks: str
    """Hash of its tasks' names, in order."""
    rollouts: int
    bytes: int
    sha256: str


class ChunksSoFar(Config):
    """`parts.json` of an incarnation of an evaluation job: its chunks of what is not complete yet."""

    chunks: list[Chunk]


class EvaluationOutput(Config):
    """One finished evaluation, or a shard of one: its folder says which tasks it has."""

    version: Annotated[str, Field(pattern=r"^v\d{4,}$")]
    suite: Literal["probe", "dev", "sealed"]
    folder: JobPath


class EvaluateOutputs(Config):
    """Of an evaluation job."""

    evaluations: list[EvaluationOutput]


class AnalyseOutputs(Config):
    """Of the analysis of a version."""

    harness: Annotated[str, Field(pattern=r"^h\d{4,}$")]
    folder: JobPath


M = TypeVar("M", bound=Config)


def parse_outputs(model: type[M], outputs: dict[str, Any], job: JobPaths, root: Path) -> M:
    """The outputs of a job's result. Raises StoreError when they are not what that kind of job makes, or lie elsewhere."""
    try:
        found = model.model_validate(outputs)
    except ValidationError as error:
        problem = error.errors()[0]
        raise StoreError(f"{job.root}: the result's outputs are not usable ({'.'.join(map(str, problem['loc']))}: {problem['msg']}); "
                         "remove this job folder to have the work done again") from error
    for path in _paths(found.model_dump()):
        if not (root / path).resolve().is_relative_to(job.root.parent.resolve()):
            raise StoreError(f"{job.root}: names an output outside its own folders ({path}); remove this job folder to have the work done again")
    return found


def _paths(value: Any, key: str = "") -> list[str]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in _paths(v, "path" if key == "effective" else k)]
    if isinstance(value, list):
        return [p for v in value for p in _paths(v, key)]
    return [value] if key in ("policy", "path", "checkpoint", "folder") else []
