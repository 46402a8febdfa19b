"""srun inside a job: the command, once for every task, ended together."""

from __future__ import annotations

import os
import _signal as signal  # without its enums
import sys
import time

KNOWN = ("nodes", "ntasks", "ntasks-per-node", "overlap", "exact", "exclusive", "kill-on-bad-exit", "label", "unbuffered", "cpus-per-task", "gpus-per-node",
         "gres", "mem", "export", "cpu-bind", "mpi", "wait", "chdir")


def main(arguments: list[str]) -> None:
    """Never returns: exits as srun does, with the highest exit code of the tasks, or 128 and more for a signal."""
    given, left = {}, list(arguments)
    while left and left[0].startswith("--"):
        name, _, value = left.pop(0)[2:].partition("=")
        if name not in KNOWN:
            sys.stderr.write(f"the simulator does not know srun --{name}\n")
            sys.exit(64)
        given[name] = value
    if "SLURM_JOB_ID" not in os.environ or not left:
        sys.stderr.write("the simulator knows srun only inside a job, with options as --name=value\n")
        sys.exit(64)
    ranks = int(given.get("ntasks", "1"))
    running: dict[int, int] = {}

    def forward(number: int, frame: object) -> None:
        for pid in running:
            os.kill(pid, number)

    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCONT"):
        signal.signal(getattr(signal, name), forward)
    for rank in range(ranks):
        environment = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(ranks), "SLURM_NPROCS": str(ranks),
                       "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_NODEID": "0"}
        child = os.fork()
        if child == 0:
            try:
                for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCONT", "SIGPIPE"):
                    signal.signal(getattr(signal, name), signal.SIG_DFL)
                os.execvpe(left[0], left, environment)
            except OSError as error:
                os.write(2, f"slurmstepd: error: execve(): {left[0]}: {error.strerror}\n".encode())
            finally:
                os._exit(2)
        running[child] = rank
    worst, bad, kill_at = 0, False, 0.0
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if bad and time.monotonic() > kill_at:
                forward(signal.SIGKILL, None)
            time.sleep(0.01)
            continue
        running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        worst = max(worst, code if code >= 0 else 128 - code)
        if code and given.get("kill-on-bad-exit", "0") != "0" and not bad:
            bad, kill_at = True, time.monotonic() + 2
            forward(signal.SIGTERM, None)
    os._exit(worst)
