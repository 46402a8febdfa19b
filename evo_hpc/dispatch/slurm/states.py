"""What every state of Slurm means for a job: whether it lives, how it ended, whether it waits for a person.

Sources: man squeue and man sacct (JOB STATE CODES, JOB REASON CODES) of 22.05, and the lists of newer versions at
slurm.schedmd.com/job_state_codes.html and job_reason_codes.html. A job has a base state and flags; squeue and sacct show one word,
a flag before the base state where they know it.
"""

from __future__ import annotations

import re
from typing import Literal

from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.jobs.spec import Ending

Life = Literal["queued", "running", "ending", "terminal"]

LIVES: dict[str, Life] = {
    # Base states.
    "PENDING": "queued",
    "RUNNING": "running",
    "SUSPENDED": "running",  # keeps its nodes, and goes on by itself
    "COMPLETED": "terminal",
    "CANCELLED": "terminal",
    "FAILED": "terminal",
    "TIMEOUT": "terminal",
    "NODE_FAIL": "terminal",  # one that is requeued shows COMPLETING, then PENDING in squeue; accounting keeps this word for the run that died
    "PREEMPTED": "terminal",  # likewise
    "BOOT_FAIL": "terminal",
    "DEADLINE": "terminal",
    "OUT_OF_MEMORY": "terminal",
    # Flags. What a flag hides may be any base state, so none of them is an end.
    "CONFIGURING": "queued",  # has its nodes, but they boot: nothing of the job's own runs yet
    "POWER_UP_NODE": "queued",
    "POWERING_DOWN": "queued",
    "LAUNCH_FAILED": "queued",  # is put back, held or not, or shows a base state soon
    "RECONFIG_FAIL": "queued",
    "COMPLETING": "ending",
    "STAGE_OUT": "ending",
    "EXPEDITING": "ending",  # 25.11: has ended, and may be requeued at once
    "UPDATE_DB": "running",  # only says that accounting is to be told again
    "RESIZING": "running",
    "SIGNALING": "running",
    "STOPPED": "running",  # by SIGSTOP
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "REQUEUE_HOLD": "queued",
    "RESV_DEL_HOLD": "queued",
    "SPECIAL_EXIT": "queued",  # requeued, and held until a person looks
    "REVOKED": "queued",  # another cluster of the federation runs it
}
"""By the long name of the state."""

_ENDINGS: dict[str, Ending] = {
    "COMPLETED": "infrastructure",  # it said that all is well, and left no result
    "CANCELLED": "user_cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "PREEMPTED": "preempted",
    "OUT_OF_MEMORY": "oom",
}
OUR_EXIT_CODES = (1, 2, 3)
"""Those that the launcher leaves with of its own will. Slurm shows seven bits of a code (measured): a script that ends with 130, as a
shell does whose command died of SIGINT, is shown as 2, and one that ends with 137 as 9."""

_HELD_STATES = {
    "REQUEUE_HOLD": "was requeued and is held",
    "SPECIAL_EXIT": "was requeued in a special state and is held",
    "RESV_DEL_HOLD": "is held since its reservation was deleted",
}
_RELEASE = "`scontrol release {id}` lets it go on, `scancel {id}` ends it"
_CANCEL = "`scancel {id}` ends it; correct `slurm` in cluster.yaml before it is submitted again"
_ADMIN = "wait for the administrators; `scancel {id}` ends it"
_HELD_REASONS: tuple[tuple[str, str, str], ...] = (
    # A pattern of the whole reason, what it means, what to do.
    (r"JobHeldUser", "is held by its user", _RELEASE),
    (r"JobHeldAdmin", "is held by an administrator, or by Slurm after a fault", f"{_RELEASE} (ask the administrators where that is denied)"),
    (r"JobHoldMaxRequeue", "was requeued as often as the cluster allows, and is held", _RELEASE),
    (r".*\bheld\b.*", "is held", _RELEASE),  # launch failed requeued held, job requeued in held state, user env retrieval failed requeued held
    (r"JobLaunchFailure|SystemFailure|BurstBufferOperation.*", "could not be launched", _RELEASE),
    (r"DependencyNeverSatisfied", "waits for a job that will never end as it must", "`scancel {id}` ends it"),
    (r"BadConstraints|Constraints", "asks for nodes that there are none of", _CANCEL),
    (r"PartitionNodeLimit", "asks for more nodes than its partition gives, or those it needs are down", _CANCEL),
    (r"PartitionTimeLimit", "has a longer time limit than its partition", f"`scontrol update jobid={{id}} timelimit=…` shortens it, {_CANCEL}"),
    (r"PartitionConfig|MaxMemPerLimit|AccountingPolicy", "asks for what its partition or account does not give", _CANCEL),
    (r"PartitionDown|PartitionInactive", "waits for a partition that is closed", _ADMIN),
    (r"FrontEndDown|NodeDown", "waits for a node that is down", _ADMIN),
    (r"InvalidAccount|AccountNotAllowed", "has an account that may not run there", _CANCEL),
    (r"InvalidQOS|QOSNotAllowed|QOSUsageThreshold", "has a QOS that may not run there", _CANCEL),
    (r"ReservationDeleted|ReservationInvalid", "has a reservation that is gone", _CANCEL),
    (r"AssociationTimeLimit|QOSTimeLimit", "asks for more time than its account or QOS gives", _CANCEL),
    # Shares that are used up. Limits on what runs at once (AssocGrpCpuLimit, QOSGrpGRES, …RunMinutes, MaxJobs…, …PerUser) pass when others end.
    (r"(Assoc|QOS)Grp(?!.*Run).*(Minutes|Wall).*", "waits for hours of an account or QOS that are used up", _ADMIN),
    (r"(Assoc|QOS)Max.*(PerJob|PerNode|MinutesPerJob).*|QOSMin.*", "asks for more or less than its account or QOS gives one job", _CANCEL),
)
_HELD = tuple((re.compile(pattern, re.IGNORECASE | re.DOTALL), meaning, remedy) for pattern, meaning, remedy in _HELD_REASONS)


def life(state: str) -> Life:
    """Whether a job in this state waits, runs, is about to end, or has ended; a word that is not known waits: it is never an end."""
    return LIVES.get(state, "queued")


def ending(job: SlurmJob) -> Ending:
    """How a job that is over ended, where it left no result of its own. Raises ValueError for one that is not."""
    if life(job.state) != "terminal":
        raise ValueError(f"Slurm job {job.id} is {job.state}: that is no end")
    if job.state != "FAILED":
        return _ENDINGS[job.state]
    if _plain(job.reason) == "outofmemory" and (job.signal == 9 or job.exit_code in (None, 9, 137)):
        return "oom"
    return "code_error" if job.exit_code in OUR_EXIT_CODES and not job.signal else "infrastructure"


def held(job: SlurmJob) -> str | None:
    """Why a job that waits will not start by itself, and the command that changes that; None for one that may."""
    if life(job.state) != "queued":
        return None
    if job.state in _HELD_STATES:
        return f"{_HELD_STATES[job.state]}; {_RELEASE.format(id=job.id)}"
    if job.state != "PENDING":
        return None
    reason = job.reason.replace("_", " ")  # newer versions write launch_failed_requeued_held
    for pattern, meaning, remedy in _HELD:
        if pattern.fullmatch(reason):
            return f"{meaning}; {remedy.format(id=job.id)}"
    return None


def _plain(reason: str) -> str:
    return re.sub(r"[^a-z]", "", reason.lower())
