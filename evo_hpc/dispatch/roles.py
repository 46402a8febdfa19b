"""Which processes each kind of job consists of."""

from __future__ import annotations

from dataclasses import dataclass

from evo_hpc.jobs.spec import JobKind


@dataclass(frozen=True)
class Role:
    """One process of a job."""

    name: str
    entry: str
    """`module:function`, taking a RoleContext and returning the outputs."""
    primary: bool
    """The job is done when its primary role is; the others serve it until then."""


ROLES: dict[JobKind, tuple[Role, ...]] = {
    "supervise": (Role("trainer", "evo_hpc.training.supervise_job:run", primary=True),),
    "train": (
        Role("trainer", "evo_hpc.training.train_job:run", primary=True),
        Role("rollout", "evo_hpc.rollout.worker:run", primary=False),
    ),
    "evaluate": (Role("evaluator", "evo_hpc.evaluation.job:run", primary=True),),
}
