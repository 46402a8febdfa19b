"""What one kind of job asks of Slurm, with the defaults filled in that Slurm would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from evo_hpc.config.slurm import Resources, Slurm, SlurmKind
from evo_hpc.dispatch.slurm.script import warning_of
from evo_hpc.dispatch.slurm.site import Partition, Site
from evo_hpc.dispatch.slurm.words import Gres, parse_gres, parse_mib, split_list
from evo_hpc.store.checks import CheckResult, Level


@dataclass(frozen=True)
class Asked:
    """The needs of one kind of job."""

    kind: SlurmKind
    slurm: Slurm

    @cached_property
    def resources(self) -> Resources:
        """Merged with the defaults."""
        return self.slurm.of(self.kind)

    def where(self, name: str) -> str:
        """The place in cluster.yaml that a field comes from; where nothing sets it, the one that serves all kinds."""
        own = getattr(getattr(self.slurm, self.kind), name) is not None
        return f"slurm.{self.kind if own else 'defaults'}.{name}"

    def result(self, check: str, level: Level, text: str, remedy: str | None = None) -> CheckResult:
        """A finding about this kind of job."""
        return CheckResult(f"{self.kind}: {check}", level, text, remedy)

    @property
    def nodes(self) -> int:
        return self.resources.nodes or 1

    @property
    def cpus_per_node(self) -> int:
        return (self.resources.tasks_per_node or 1) * (self.resources.cpus_per_task or 1)

    @property
    def warning_seconds(self) -> int:
        return warning_of(self.resources)[1]

    @property
    def requeue(self) -> bool:
        return self.resources.requeue is not False

    @cached_property
    def gres(self) -> tuple[Gres, ...]:
        """Generic resources of each node. Raises ValueError on words that are none."""
        words = [f"gpu:{each}" for each in split_list(self.resources.gpus_per_node or "")]
        return parse_gres(",".join([*words, *split_list(self.resources.gres or "")]))

    @property
    def gpus_per_node(self) -> int:
        return sum(each.count for each in self.gres if each.name == "gpu")

    @property
    def memory_mib(self) -> float | None:
        """Of each node; null where nothing is said, or where all of a node's is wanted."""
        amount = parse_mib(self.resources.memory) if self.resources.memory is not None else 0
        return amount or None

    @property
    def jobs_at_once(self) -> int:
        """Jobs of the user that must be allowed in the queue for this kind to be submitted: the controller is one of them."""
        return {"controller": 1, "evaluate": 1 + self.slurm.shards}.get(self.kind, 2)

    def tres(self) -> Mapping[str, float]:
        """What one job takes, in the names of TRES limits; memory in MiB."""
        each = {"node": 1.0, "cpu": float(self.cpus_per_node), "mem": self.memory_mib or 0.0, "gres/gpu": float(self.gpus_per_node)}
        each.update({f"gres/{gres.name}:{gres.kind}": float(gres.count) for gres in self.gres if gres.kind})
        return {name: value * self.nodes for name, value in each.items() if value}

    def minutes(self, partition: Partition) -> float | None:
        """Time limit that the job gets there; null = none."""
        if self.resources.minutes is not None:
            return float(self.resources.minutes)
        return partition.default_minutes if partition.default_minutes is not None else partition.max_minutes

    def partition_names(self, site: Site) -> tuple[str, ...]:
        """Those named, else the cluster's default; empty where it has none."""
        if self.resources.partition is not None:
            return split_list(self.resources.partition)
        return tuple(name for name, each in site.partitions.items() if each.default)
