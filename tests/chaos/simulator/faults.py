"""Faults that tests have planned: one JSON object a line, each consumed by the calls that it is for."""

from __future__ import annotations

import os
import time

import quick

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest
if TYPE_CHECKING:
    from typing import Any

TIMED_OUT = "Socket timed out on send/recv operation"
UNREACHABLE = "Unable to contact slurm controller (connect failure)"
WORDS = {
    "refuse_partition": "sbatch: error: invalid partition specified: {partition}\nsbatch: error: Batch job submission failed: Invalid partition name specified",
    "refuse_qos": "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
                  "(job submit limit, user's size and/or time limits)",
    "refuse_busy": "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
}
KINDS = {
    "sbatch": ("timeout_before", "timeout_after", "hang_before", "hang_after", "late", *WORDS),
    "squeue": ("fail", "hang"), "sacct": ("fail", "hang"), "scancel": ("fail", "hang"), "scontrol": ("fail", "hang"),
}


def take(folder: str, program: str) -> dict[str, Any] | None:
    """The first planned fault for a program, used up by one; hold the lock."""
    path = os.environ.get("SIM_PLAN") or f"{folder}/plan"
    try:
        with open(path) as file:
            planned = [quick.loads(line) for line in file if line.strip()]
    except FileNotFoundError:
        return None
    for position, fault in enumerate(planned):
        if fault["command"] != program:
            continue
        if fault.get("skip", 0):
            fault["skip"] -= 1
            taken = None
        else:
            fault["times"] = fault.get("times", 1) - 1
            if not fault["times"]:
                del planned[position]
            taken = fault
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w") as file:
            file.write("".join(quick.dumps(each) + "\n" for each in planned))
        os.replace(temporary, path)
        return taken
    return None


def unavailable(program: str, what: str, words: str = TIMED_OUT) -> str:
    """How a program says that slurmctld did not answer."""
    return {
        "sbatch": f"sbatch: error: Batch job submission failed: {words}",
        "squeue": f"slurm_load_jobs error: {words}",
        "sacct": f"sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:127.0.0.1:6819: Connection refused\n"
                 "sacct: error: Sending PersistInit msg: Connection refused\nsacct: error: Problem talking to the database: Connection refused",
        "scancel": f"scancel: error: Kill job error on job id {what}: {words}",
        "scontrol": f"Unexpected message received for job {what}" if words == UNREACHABLE else f"{words} for job {what}",
        "sinfo": f"slurm_load_partitions: {words}",
        "srun": f"srun: error: Unable to confirm allocation for job {what}: {words}",
    }[program]


def hang(folder: str) -> None:
    """Answer nothing until somebody kills this process; ten minutes at most, or until the simulator's folder is gone."""
    end = time.monotonic() + 600
    with open(f"{folder}/hanging", "a") as file:
        file.write(f"{os.getpid()}\n")
    while time.monotonic() < end and os.path.exists(f"{folder}/state.json"):
        time.sleep(0.2)
    os._exit(1)
