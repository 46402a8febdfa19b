"""Roles of a job as steps of its allocation: one srun each, and where their ranks meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from evo_hpc.config.slurm import Resources
from evo_hpc.store.lease import slurm_id, slurm_restart

_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class Allocation:
    """What Slurm says of the job that this process runs in."""

    job_id: str
    """Of this very task, where it is one of an array."""
    shown_id: str
    """How people and Slurm's commands name it: 123, or 123_4."""
    restart: int
    """How often it was requeued."""
    hosts: tuple[str, ...]

    @classmethod
    def current(cls, hosts: tuple[str, ...] = (), env: Mapping[str, str] = os.environ) -> Allocation | None:
        """This process's, from the environment; None outside a Slurm job."""
        job_id = env.get("SLURM_JOB_ID")
        if not job_id:
            return None
        return cls(job_id, slurm_id(env) or job_id, slurm_restart(env), hosts)


def rendezvous(allocation: Allocation) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT: the first host, and a port that follows from the job, so that two jobs on a node differ."""
    number = int("".join(c for c in allocation.job_id if c.isdigit()) or 0)
    host = allocation.hosts[0] if allocation.hosts else "localhost"
    return {"MASTER_ADDR": host, "MASTER_PORT": str(_PORTS[number % len(_PORTS)])}


def by_srun(resources: Resources) -> bool:
    """Whether roles are steps of their own: said so, or needed because there are several ranks."""
    ranks = (resources.nodes or 1) * (resources.tasks_per_node or 1)
    return resources.srun if resources.srun is not None else ranks > 1


def srun_words(resources: Resources, *, primary: bool, index: int = 0) -> list[str]:
    """What comes before a role's command. The primary role has all ranks, the others one task each, beside it on the same
    resources: of several workers the index-th on the index-th node, in turn. A rank that fails takes its step with it, so that no peer
    waits for ever."""
    nodes, tasks = (resources.nodes or 1, resources.tasks_per_node or 1) if primary else (1, 1)
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * tasks}", "--kill-on-bad-exit=1", "--overlap", "--export=ALL", "--unbuffered"]
    if primary and resources.tasks_per_node:
        words.append(f"--ntasks-per-node={tasks}")
    if relative := 0 if primary else index % (resources.nodes or 1):
        words.append(f"--relative={relative}")
    if resources.cpus_per_task:
        words.append(f"--cpus-per-task={resources.cpus_per_task}")
    return [*words, *(resources.srun_arguments or [])]
