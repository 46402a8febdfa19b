"""Time limits, the warning before them, and what a preemption leaves of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evo_hpc.dispatch.slurm.asked import Asked
from evo_hpc.dispatch.slurm.check_rights import qos_record
from evo_hpc.dispatch.slurm.site import Partition, Site
from evo_hpc.store.checks import CheckResult

SIGNAL_EARLY_SECONDS = 60.0
"""Slurm may send a warning signal so much earlier than asked (man sbatch: --signal)."""
SHORT_CONTROLLER_MINUTES = 60.0
"""A controller that hands over more often than this spends its time on starting."""
Mode = Literal["requeue", "cancel", "suspend"]


@dataclass(frozen=True)
class Preemption:
    """How a job of a kind can be made to give way in a partition."""

    mode: Mode
    grace_seconds: float
    by: str
    """For whom, in words."""


def preemption_of(asked: Asked, site: Site, partition: Partition) -> Preemption | None:
    """Null where no job is ever ended for another (man slurm.conf: PreemptType, PreemptMode; sacctmgr: Preempt, PreemptMode)."""
    cluster_mode = site.config.get("PreemptMode", "OFF").upper()
    if "partition_prio" in site.config.get("PreemptType", ""):
        above = sorted(name for name, each in site.partitions.items()
                       if each.priority_tier > partition.priority_tier and set(each.nodes) & set(partition.nodes))
        mode = _mode(partition.preempt_mode)
        return Preemption(mode, partition.grace_seconds, f"jobs of {', '.join(above)}") if above and mode else None
    qos = qos_record(asked, site, partition)
    if "qos" in site.config.get("PreemptType", "") and qos is not None:
        above = sorted(name for name, each in (site.qos or {}).items() if qos.name in each.preempts)
        mode = _mode(cluster_mode if qos.preempt_mode.lower() == "cluster" else qos.preempt_mode)
        return Preemption(mode, qos.grace_seconds, f"jobs of QOS {', '.join(above)}") if above and mode else None
    return None


def _mode(words: str) -> Mode | None:
    words = words.lower()
    return "requeue" if "requeue" in words else "cancel" if "cancel" in words else "suspend" if "suspend" in words else None


def check_time(asked: Asked, partition: Partition) -> list[CheckResult]:
    """The time limit in a partition, and whether the warning fits into it."""
    minutes, where = asked.minutes(partition), asked.where("minutes")
    if minutes is None:
        return [asked.result("time limit", "ok", f"none in {partition.name}")]
    if partition.max_minutes is not None and minutes > partition.max_minutes:
        return [asked.result(
            "time limit", "error",
            f"{minutes:.0f} minutes are more than the {partition.max_minutes:.0f} that {partition.name} allows",
            f"{where}: {partition.max_minutes:.0f} at most",
        )]
    earliest = asked.warning_seconds + SIGNAL_EARLY_SECONDS
    if minutes * 60 <= earliest:
        return [asked.result(
            "time limit", "error",
            f"the warning may come {earliest:.0f} s before the end (Slurm sends it up to {SIGNAL_EARLY_SECONDS:.0f} s early), and the job has "
            f"{minutes:.0f} minutes: it would stop as soon as it starts",
            f"{where}: more, or {asked.where('warning_seconds')}: less",
        )]
    told = "" if asked.resources.minutes is not None else f" (no limit is set, so it is the default of {partition.name})"
    if asked.kind == "controller" and minutes < SHORT_CONTROLLER_MINUTES:
        longest = "" if partition.max_minutes is None else f", {partition.max_minutes:.0f} in {partition.name}"
        return [asked.result(
            "time limit", "warning",
            f"the controller hands over to its successor every {minutes:.0f} minutes{told}, and the campaign waits while that one queues",
            f"slurm.controller.minutes: as long as is allowed{longest}",
        )]
    return [asked.result("time limit", "ok", f"{minutes:.0f} minutes{told}; the warning comes {asked.warning_seconds} s before the end")]


def check_preemption(asked: Asked, site: Site, partition: Partition) -> list[CheckResult]:
    """What happens to a job that must make room, and how much time it has to save."""
    preemption = preemption_of(asked, site, partition)
    if preemption is None:
        return [asked.result("preemption", "ok", f"jobs in {partition.name} are not ended for others")]
    return [_what_becomes_of_it(asked, site, partition, preemption), *_time_to_save(asked, site, partition, preemption)]


def _what_becomes_of_it(asked: Asked, site: Site, partition: Partition, preemption: Preemption) -> CheckResult:
    may = f"in {partition.name} jobs give way to {preemption.by}"
    if preemption.mode == "suspend":
        return asked.result(
            "preemption", "warning",
            f"{may}: they are suspended, so that time passes without progress",
            f"{asked.where('partition')}: take another where that hurts",
        )
    if preemption.mode == "requeue" and asked.requeue:
        return asked.result("preemption", "ok", f"{may} and are requeued")
    why = "Slurm cancels them" if preemption.mode == "cancel" else "with `requeue: false` they are cancelled, not requeued"
    if asked.kind == "controller" and not site.warns_of_preemption:
        return asked.result(
            "preemption", "error",
            f"{may}: {why}, without a warning: a controller ends there for good",
            f"{asked.where('requeue')}: true" if preemption.mode == "requeue" else f"{asked.where('partition')}: take another for the controller",
        )
    return asked.result("preemption", "warning", f"{may}: {why}; the work goes on in a new job, which queues anew",
                        f"{asked.where('requeue')}: true" if preemption.mode == "requeue" else None)


def _time_to_save(asked: Asked, site: Site, partition: Partition, preemption: Preemption) -> list[CheckResult]:
    if preemption.mode == "suspend":
        return []
    if not site.warns_of_preemption:
        return [asked.result(
            "warning", "warning",
            f"jobs in {partition.name} get no warning signal before a preemption (preempt_send_user_signal is not set): all since the last "
            "checkpoint is lost",
            "save more often (recipe: checkpoint.every), or ask the cluster's staff for SlurmctldParameters=preempt_send_user_signal",
        )]
    grace = preemption.grace_seconds
    if grace < asked.warning_seconds:
        return [asked.result(
            "warning", "warning",
            f"a preemption leaves {grace:.0f} s to save (GraceTime), not the {asked.warning_seconds} s of the warning before a time limit",
            "have saves that are shorter than that, or save more often (recipe: checkpoint.every)",
        )]
    return [asked.result("warning", "ok", f"a preemption leaves {grace:.0f} s to save (GraceTime)")]
