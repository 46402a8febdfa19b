"""How a role of a job ended: what it says of itself, else what its exit code, its log and the kernel say."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from evo_hpc.dispatch.memory import killed_for_memory
from evo_hpc.paths import IncarnationPaths
from evo_hpc.store.atomic import read_json

_AFTERMATH = re.compile(r"slurmstepd-\S+: error: \*\*\*|srun: (?!error: .*: Exited with exit code)")
"""Lines of Slurm's in a role's log that say no more than that a step was ended; which rank had failed, and how, is another."""
_NODE_FAILURE = re.compile(r"^srun: error: (Node failure on \S+)|^slurmstepd-\S+: error: .*(DUE TO NODE FAILURE)", re.MULTILINE)
"""What srun says when a node of a step was lost."""


def outcome_of(
    role: str, code: int, incarnation: IncarnationPaths, *, asked_to_stop: bool, cut_off_after: float | None, killed_before: int, behind_srun: bool,
) -> dict[str, Any]:
    """Fields of a Result for a role that ended with exit `code` (negative: by a signal).

    `cut_off_after`: seconds after which the launcher killed what did not save; null where it killed nothing. `killed_before`: deaths for
    memory that this control group had counted when the job began.
    """
    told = [read_json(path) for path in incarnation.role_outcomes(role)]
    failed = [each for each in told if each["outcome"] == "failed"]
    if sure := [each for each in failed if each.get("blame") == "user" or each.get("ending")]:
        return sure[0]
    log = incarnation.log(role)
    lost = lost_node(log) if behind_srun else None
    # Of several ranks the one that failed says more than the first, which was ended with it; but ranks that lose a peer fail, too, and
    # what became of that one the kernel or srun knows.
    if failed and killed_for_memory() == killed_before and lost is None:
        return failed[0]
    # Ranks that were ended because another one left without a word say that they were stopped, which nobody asked for; and that
    # the others are done says nothing of the first one's outputs.
    if not failed and told and told[0]["outcome"] == "stopped" and (code == 0 or asked_to_stop):
        return told[0]
    if not failed and told and told[0]["outcome"] == "done" and incarnation.role_outcome(role).exists():
        return told[0]
    if code == -signal.SIGTERM and asked_to_stop:
        return {"outcome": "stopped", "error": f"{role} ended on the stop signal without saving: it was just starting"}
    if code == -signal.SIGKILL and cut_off_after is not None:
        return {"outcome": "stopped", "error": f"{role} was killed after {cut_off_after:.0f} s without saving"}
    if killed_for_memory() > killed_before:
        error = (f"{role} died after the kernel had killed a process of this job for memory; ask for more `memory` in cluster.yaml. "
                 f"End of its log: {log_tail(log)}")
        return {"outcome": "failed", "blame": "infrastructure", "ending": "oom", "error": error}
    if lost is not None:
        return {"outcome": "failed", "blame": "infrastructure", "ending": "node_fail", "error": f"{role} lost a node: {lost}"}
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with {code}"
    return {"outcome": "failed", "blame": "infrastructure", "error": f"{role} {how}; end of its log: {log_tail(log)}"}


def lost_node(log: Path) -> str | None:
    """What srun said of a node that failed under a role; null where it said nothing."""
    found = _NODE_FAILURE.search(log.read_text(errors="replace")) if log.exists() else None
    return next(filter(None, found.groups())) if found else None


def log_tail(log: Path, limit: int = 400) -> str:
    """The last lines of a role's log, `limit` characters at most, in one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text[-10 * limit :].splitlines() if line.strip()]
    # Behind srun one rank's last words are followed by what became of all others.
    told = [line for line in lines if not _AFTERMATH.match(line)] or lines
    return " | ".join(told[-4:])[-limit:] or "(empty)"
