"""What of a profile will fail on a cluster, before anything is queued: pure, from what the cluster says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.asked import Asked
from evo_hpc.dispatch.slurm.check_nodes import check_names, check_nodes, check_reservation
from evo_hpc.dispatch.slurm.check_rights import check_account, check_limits, check_partition_rights
from evo_hpc.dispatch.slurm.check_time import check_preemption, check_time
from evo_hpc.dispatch.slurm.site import Partition, Site
from evo_hpc.store.checks import CheckResult, near_match, some_of

_RANK = {"ok": 0, "warning": 1, "error": 2}


def check(slurm: Slurm, site: Site) -> list[CheckResult]:
    """Findings for every kind of job and for the cluster as a whole; those that kinds share are given once."""
    found = [result for kind in slurm.kinds for result in check_kind(Asked(kind, slurm), site)]
    return [*_merged(found), *check_cluster(slurm, site)]


def check_kind(asked: Asked, site: Site) -> list[CheckResult]:
    """Findings for one kind of job."""
    try:
        asked.gres
    except ValueError as error:
        field = "gpus_per_node" if asked.resources.gpus_per_node is not None else "gres"
        return [asked.result("GPUs", "error", str(error), f"{asked.where(field)}: mend it")]
    found = [*check_names(asked, site), *check_reservation(asked, site), *check_account(asked, site)]
    names = asked.partition_names(site)
    if not names:
        return [*found, asked.result(
            "partition", "error",
            "none is set, and the cluster has no default",
            f"{asked.where('partition')}: one of {some_of(site.partitions)}",
        )]
    unknown = [name for name in names if name not in site.partitions]
    found += [
        asked.result(
            "partition", "error",
            f"there is no partition {name!r}{near_match(name, site.partitions)}",
            f"{asked.where('partition')}: one of {some_of(site.partitions)}",
        )
        for name in unknown
    ]
    each = [check_partition(asked, site, site.partitions[name]) for name in names if name not in unknown]
    return found + _any_will_do(each, site)


def check_partition(asked: Asked, site: Site, partition: Partition) -> list[CheckResult]:
    """Findings for one kind of job in one partition."""
    return [
        *check_partition_rights(asked, site, partition), *check_nodes(asked, site, partition), *check_time(asked, partition),
        *check_limits(asked, site, partition), *check_preemption(asked, site, partition),
    ]


def check_cluster(slurm: Slurm, site: Site) -> list[CheckResult]:
    """What does not depend on a kind of job: accounting, the memory of the queue, arrays."""
    found = []
    if site.associations is None:
        found.append(CheckResult(
            "accounting", "warning",
            "the cluster keeps none: GPU hours are estimated from heartbeats, and how a job ended is known only from its own files and the queue",
        ))
        kept = site.number("MinJobAge")
        if kept is not None and kept < 3 * slurm.poll_seconds:
            found.append(CheckResult(
                "queue", "warning",
                f"an ended job leaves the queue after {kept} s (MinJobAge), and it is looked at every {slurm.poll_seconds:.0f} s: some endings will "
                "be missed",
                f"slurm.poll_seconds: {max(kept / 3, 0.1):.1f} at most",
            ))
    else:
        found.append(CheckResult("accounting", "ok", "GPU hours and endings come from Slurm's own accounting"))
    largest, most_jobs = site.number("MaxArraySize"), site.number("MaxJobCount")
    if slurm.shards > 1 and largest is not None and slurm.shards > largest:
        found.append(CheckResult(
            "shards", "error",
            f"an array of {slurm.shards}: this cluster allows {largest} (MaxArraySize)",
            f"slurm.shards: {max(largest, 1)} at most",
        ))
    elif most_jobs is not None and slurm.shards >= most_jobs:
        found.append(CheckResult(
            "shards", "error",
            f"{slurm.shards} jobs and the controller: this cluster holds {most_jobs} jobs of all users (MaxJobCount)",
            f"slurm.shards: fewer than {most_jobs}",
        ))
    else:
        found.append(CheckResult("shards", "ok", f"{slurm.shards} for an evaluation"))
    return found


def worst(results: Iterable[CheckResult]) -> int:
    """0 where all is well, 1 with warnings, 2 with errors."""
    return max((_RANK[result.level] for result in results), default=0)


def _any_will_do(partitions: list[list[CheckResult]], site: Site) -> list[CheckResult]:
    """Of several partitions Slurm takes the one that can start first, so one without errors is enough, unless it is told to want all."""
    want_all = site.config.get("EnforcePartLimits", "").upper() == "ALL"
    enough = any(worst(results) < 2 for results in partitions) and not want_all
    return [
        replace(result, level="warning", text=f"{result.text}; another partition of the list will do")
        if enough and result.level == "error" else result
        for results in partitions for result in results
    ]


def _merged(results: list[CheckResult]) -> list[CheckResult]:
    """`train: nodes` and `evaluate: nodes` of one text as `train, evaluate: nodes`; the order is that of the first."""
    kinds: dict[tuple[str, str, str, str | None], list[str]] = {}
    for result in results:
        kind, _, what = result.check.partition(": ")
        mine = kinds.setdefault((what, result.level, result.text, result.remedy), [])
        if kind not in mine:
            mine.append(kind)
    return [CheckResult(f"{', '.join(who)}: {what}", level, text, remedy) for (what, level, text, remedy), who in kinds.items()]
