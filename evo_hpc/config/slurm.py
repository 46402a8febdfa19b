"""The Slurm part of cluster.yaml: what each kind of job asks for, in the words of sbatch."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt
from pydantic import Field, StringConstraints, field_validator, model_validator

from evo_hpc.config.base import Config

PositiveInt = Annotated[int, Gt(0)]
Word = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f]+$")]
"""One argument of sbatch: no blanks, no control characters."""
Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]*$")]
SlurmKind = Literal["controller", "supervise", "train", "evaluate", "analyse"]


class Resources(Config):
    """What one kind of job asks for. A field that is left out is taken from `defaults`; left out there too, Slurm decides."""

    partition: Word | None = None
    """Partition, or several with commas."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that nodes must have."""
    reservation: Word | None = None
    """Reservation to run in."""
    exclude: Word | None = None
    """Nodes not to run on."""
    nodes: PositiveInt | None = None
    """Nodes (Slurm's default: 1)."""
    tasks_per_node: PositiveInt | None = None
    """Ranks of the primary role on each node (Slurm's default: 1)."""
    gpus_per_node: Word | None = None
    """GPUs on each node: `4`, or with a type `h100:4`."""
    gres: Word | None = None
    """The same for clusters that want it so: `gpu:h100:4`."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of one task."""
    memory: Annotated[str, StringConstraints(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory on each node: `64G`; 0 = all of it."""
    minutes: PositiveInt | None = None
    """Time limit. Null = the partition's."""
    warning_signal: Literal["USR1", "USR2", "HUP", "ALRM"] | None = None
    """Signal of the warning before the limit and before a preemption (default USR2: USR1 is NCCL's)."""
    warning_seconds: Annotated[int, Ge(0), Field(le=65535)] | None = None
    """How long before the end it comes (default 120); saving must fit in it."""
    requeue: bool | None = None
    """Whether Slurm may requeue the job after a preemption or a node failure (default true)."""
    setup: list[Line] | None = None
    """Shell lines run first: `module load cuda`."""
    container: list[Word] | None = None
    """Words put before the commands of the job: `[apptainer, exec, --nv, image.sif]`."""
    environment: dict[str, str] | None = None
    """Extra environment variables; together with those of `defaults`."""
    srun: bool | None = None
    """Whether each role is a step of its own by srun (default: true where there is more than one task, false else)."""
    srun_arguments: list[Word] | None = None
    """More options for srun."""
    sbatch_arguments: list[Word] | None = None
    """More options for sbatch, one a word: `--mail-type=FAIL`."""

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name in value or {}:
            if any(word in name.upper() for word in ("API_KEY", "TOKEN", "SECRET", "PASSWORD")) and name != "TOKENIZERS_PARALLELISM":
                raise ValueError(f"{name}: a secret does not belong in cluster.yaml, which every job's script repeats; put it into a file that you alone can read")
        return value

    @model_validator(mode="after")
    def _one_way_to_ask_for_gpus(self) -> Resources:
        if self.gpus_per_node is not None and self.gres is not None and self.gres.startswith("gpu"):
            raise ValueError("gpus_per_node and gres both ask for GPUs; keep one")
        return self


class Retries(Config):
    """Endings of a job that has no result of its own, and how many of each one attempt may have before it counts as failed."""

    preempted: Annotated[int, Ge(0)] = 1000
    """Ended for a job of higher priority."""
    timeout: Annotated[int, Ge(0)] = 1000
    """Reached its time limit (a run longer than the limit goes on where it saved)."""
    node_fail: Annotated[int, Ge(0)] = 5
    """Its node died."""
    oom: Annotated[int, Ge(0)] = 1
    """Killed for memory."""
    infrastructure: Annotated[int, Ge(0)] = 3
    """Lost, could not be submitted, or died in a way that Slurm does not explain."""
    without_progress: PositiveInt = 10
    """Incarnations in a row that came no step further than those before them."""


class Slurm(Config):
    """How jobs run on a Slurm cluster."""

    defaults: Resources = Resources()
    """For all kinds of jobs."""
    controller: Resources = Resources()
    """The controller itself (`evo-hpc launch`): one small task, its time limit as long as the partition allows."""
    supervise: Resources = Resources()
    """Making a base policy."""
    train: Resources = Resources()
    """Training."""
    evaluate: Resources = Resources()
    """Evaluation; each shard asks for this much."""
    analyse: Resources | None = None
    """Analysis of a finished version. Null: it runs beside the controller, which spares it the queue."""
    shards: PositiveInt = 1
    """Jobs that one evaluation is divided into, as an array."""
    retries: Retries = Retries()
    """What is tried again, and how often."""
    backoff_seconds: Annotated[float, Ge(0)] = 15.0
    """Wait before a job is started again after the machine's failure; doubled each time, ten minutes at most."""
    settle_seconds: Annotated[float, Ge(1)] = 60.0
    """How long a submission with an uncertain end (sbatch timed out, the controller was killed) may take to show up in squeue."""
    poll_seconds: Annotated[float, Ge(0.1)] = 10.0
    """Seconds between two questions to Slurm."""
    submit_seconds: Annotated[float, Ge(1)] = 150.0
    """Longest time that sbatch may take: it asks again for two minutes by itself where the cluster has as many jobs as it may."""
    command_seconds: Annotated[float, Ge(1)] = 60.0
    """Longest time that any other command of Slurm may take."""
    pass_environment: list[Word] = Field(default_factory=list)
    """Variables of the controller's environment that jobs get too; the others stay behind, but for PATH, HOME and the like."""

    @property
    def kinds(self) -> list[SlurmKind]:
        """The kinds of jobs that there will be."""
        return [kind for kind in get_args(SlurmKind) if getattr(self, kind) is not None]

    def of(self, kind: SlurmKind) -> Resources:
        """What a kind of job asks for: its own fields over the defaults', environments together."""
        base, own = self.defaults.model_dump(exclude_none=True), (getattr(self, kind) or Resources()).model_dump(exclude_none=True)
        merged = {**base, **own, "environment": {**base.get("environment", {}), **own.get("environment", {})}}
        if "gpus_per_node" in own and "gres" not in own:
            merged.pop("gres", None)
        if "gres" in own and "gpus_per_node" not in own:
            merged.pop("gpus_per_node", None)
        return Resources.model_validate(merged)
