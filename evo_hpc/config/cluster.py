"""cluster.yaml: where jobs run and with how much; never part of a recipe, never touched by an agent."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.config.slurm import Slurm

PositiveInt = Annotated[int, Gt(0)]


class Engine(Config):
    """vLLM."""

    dtype: Literal["float32"] = "float32"
    """Weights and activations of the engine; part of the evaluator epoch. The trainer's are `compute.precision` of the recipe."""
    threads: PositiveInt = 1
    """CPU threads of one engine."""
    workers: PositiveInt = 1
    """Engines that sample for one training job, each a process of its own."""
    batch_groups: Annotated[int, Ge(0)] = 0
    """Groups that a worker takes at a time; 0 = a step's groups divided by the number of workers. Small batches balance the load better."""
    tensor_parallel: PositiveInt = 1
    """GPUs that one engine is divided over; only CUDA can."""
    restarts: Annotated[int, Ge(0)] = 2
    """Times that each worker which dies, or is silent for stall_minutes, is started again while its trainer is well."""
    kv_cache_mib: PositiveInt = 128
    """Memory for the KV cache, in MiB."""


class Trainer(Config):
    """Megatron."""

    threads: PositiveInt = 1
    """CPU threads of one rank."""
    ranks: PositiveInt = 1
    """Processes of the trainer on this machine; under Slurm `slurm.train` says it: nodes x tasks_per_node."""


class Cluster(Config):
    """`cluster.yaml`."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    executor: Literal["local", "slurm"] = "local"
    """`local`: processes on this machine. `slurm`: jobs on a cluster, as `slurm` below says."""
    max_parallel_jobs: PositiveInt = 1
    """Jobs at a time."""
    python: str | None = None
    """Interpreter of the jobs; null = the one that runs the controller."""
    engine: Engine = Engine()
    """Sampling side."""
    trainer: Trainer = Trainer()
    """Training side."""
    exchange: str | None = None
    """Folder for the live traffic between trainer and workers; null = /dev/shm where there is room, else the job folder."""
    max_starts: PositiveInt = 4
    """Starts of one attempt before it counts as failed (a killed job is started again)."""
    max_attempts: PositiveInt = 2
    """Attempts in a row at one piece of work, none a step further than the one before, until the campaign stops."""
    stall_minutes: Annotated[float, Gt(0)] = 10.0
    """A job without progress for this long is stopped, its stacks in its log."""
    grace_seconds: Annotated[float, Ge(1)] = 30.0
    """Time that a stopped job has to save."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables of the jobs."""
    slurm: Slurm = Slurm()
    """What jobs ask of Slurm; read where `executor` is `slurm`."""
