"""Whether an attempt that has died is started once more, or has failed: by how its starts ended, and how often."""

from __future__ import annotations

from collections import Counter

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.spec import Blame, Ending

LONGEST_BACKOFF_SECONDS = 600.0
_WORDS: dict[Ending, str] = {
    "preempted": "was preempted", "timeout": "reached its time limit", "oom": "was killed for memory", "node_fail": "lost its node",
    "user_cancelled": "was cancelled by hand", "code_error": "ended with an error of its own", "infrastructure": "died",
}
_ADVICE: dict[Ending, str] = {
    "oom": "; ask for more `memory` in cluster.yaml", "user_cancelled": "; run the controller again for a new attempt",
    "timeout": "; raise `minutes` in cluster.yaml, or `checkpoint.every` saves too seldom",
}


def backoff(slurm: Slurm, failures: int) -> float:
    """Seconds to wait before the next start after so many failures in a row: twice as long after each."""
    return min(slurm.backoff_seconds * 2 ** min(failures - 1, 16), LONGEST_BACKOFF_SECONDS)


def exhausted(status: JobStatus, cluster: Cluster) -> tuple[Blame, str] | None:
    """Whose failure it is and what to say, when a dead attempt is not to be started again; None when it is. Pure."""
    where = f"see the logs below {status.job.root}"
    if status.refused:
        return "user", f"Slurm refuses the job: {status.said}. Mend `slurm` in cluster.yaml (`evo-hpc doctor --cluster` checks it)"
    if status.intent is None or status.intent.executor == "local":
        died = f"died {status.starts} times without a result; {where}"
        return ("infrastructure", died) if status.starts >= cluster.max_starts else None
    retries = cluster.slurm.retries
    if status.stale >= retries.without_progress:
        return "infrastructure", f"was started {status.stale} times in a row without a step further, last: {status.said}; {where}"
    caps: dict[Ending, int] = {
        "preempted": retries.preempted, "timeout": retries.timeout, "oom": retries.oom, "node_fail": retries.node_fail,
        "infrastructure": retries.infrastructure, "code_error": retries.infrastructure, "user_cancelled": 0,
    }
    for ending, times in Counter(status.endings).items():
        if times > caps[ending]:
            often = "" if times == 1 else f" {times} times"
            blame: Blame = "user" if ending == "user_cancelled" else "infrastructure"
            return blame, f"{_WORDS[ending]}{often}, last: {status.said}; {where}{_ADVICE.get(ending, '')}"
    return None
