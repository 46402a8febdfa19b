"""Which processes each kind of job consists of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evo_hpc.config.cluster import Cluster
from evo_hpc.jobs.spec import JobKind


@dataclass(frozen=True)
class Role:
    """One process of a job."""

    name: str
    entry: str
    """`module:function`, taking a RoleContext and returning the outputs."""
    primary: bool
    """The job is done when its primary role is; the others serve it until then."""
    worker: bool = False
    """There are as many of it as the profile says, and one that dies is started again: it keeps nothing that is not in the exchange."""
    index: int = 0
    """Which of them it is."""


ROLES: dict[JobKind, tuple[Role, ...]] = {
    "supervise": (Role("trainer", "evo_hpc.training.supervise_job:run", primary=True),),
    "train": (
        Role("trainer", "evo_hpc.training.train_job:run", primary=True),
        Role("rollout", "evo_hpc.rollout.worker:run", primary=False, worker=True),
    ),
    "evaluate": (Role("evaluator", "evo_hpc.evaluation.job:run", primary=True),),
    "analyse": (Role("analyst", "evo_hpc.harness.job:run", primary=True),),
}


def processes(roles: tuple[Role, ...], cluster: Cluster) -> list[Role]:
    """One entry a process: of several workers the first has the role's own name, the others `rollout-1`, `rollout-2`, ..."""
    found = []
    for role in roles:
        count = cluster.engine.workers if role.worker else 1
        found += [replace(role, name=f"{role.name}-{index}" if index else role.name, index=index) for index in range(count)]
    return found
