"""What an attempt cost: hours of GPUs, nodes and jobs, and whether Slurm's accounting says so or the job's own files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from evo_hpc.config.base import Config

Hours = Annotated[float, Ge(0)]
Source = Literal["none", "accounted", "estimated", "mixed"]
"""`accounted`: elapsed x allocated, by Slurm; `estimated`: by claims, heartbeats, results and the cluster profile; `none`: of nothing."""


class Cost(Config):
    """What one attempt cost, or several together."""

    gpu_hours: Hours = 0.0
    """GPUs x hours that they were allocated, busy or not."""
    node_hours: Hours = 0.0
    """The same for nodes."""
    wall_hours: Hours = 0.0
    """Hours that jobs ran: two side by side for an hour are two."""
    source: Source = "none"
    """Who says so; `mixed` where the parts differ."""
    starts: Annotated[int, Ge(0)] = 0
    """Starts that it took."""


def total(costs: Iterable[Cost]) -> Cost:
    """The sum, the same in whatever order it is taken."""
    each = list(costs)
    return Cost(
        gpu_hours=math.fsum(c.gpu_hours for c in each), node_hours=math.fsum(c.node_hours for c in each),
        wall_hours=math.fsum(c.wall_hours for c in each), source=joined(c.source for c in each), starts=sum(c.starts for c in each),
    )


def joined(sources: Iterable[Source]) -> Source:
    """Who says so, of a sum."""
    different = set(sources) - {"none"}
    return "none" if not different else different.pop() if len(different) == 1 else "mixed"


class AccountedRun(Config):
    """One run of a Slurm job as accounting has it; each requeue is a run of its own."""

    job_id: str
    array_index: int | None = None
    """Null where there is no array."""
    state: str
    """Slurm's word."""
    started: float
    """Unix time."""
    elapsed: float
    """Seconds."""
    gpus: float
    nodes: float


class CostRecord(Config):
    """`cost.json`, write-once, beside `record.json`: accounting is purged after a while, so what it said is kept."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    cost: Cost
    """Of all starts of the attempt."""
    runs: list[AccountedRun] = Field(default_factory=list)
    """What accounting said; empty where there is none, or where it had nothing to say in time."""
    generation: int
    """Of the controller that wrote this."""
    written_at: float
    """Unix time."""
