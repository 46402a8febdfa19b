"""Records what squeue and sacct of a live cluster print: `python -m tests.dispatch.slurm.record_queue`, with SLURM_CONF set.

It submits jobs of every kind of end that a cluster of four idle nodes gives within a minute, waits for them, writes `recorded/`,
and cancels what it submitted. Jobs of others of the same user are left out of what is recorded.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.environment import login
from evo_hpc.dispatch.slurm.parse import ACCOUNTING_FORMAT, QUEUE_FORMAT

FOLDER = Path(__file__).parent / "recorded"
SLEEP = "sleep 300"
JOBS: dict[str, tuple[list[str], str]] = {
    # Name: options of sbatch, script.
    "ok": ([], "true"),
    "pipe|name": ([], "exit 3"),
    "code": ([], "exit 2"),
    "code-130": ([], "exit 130"),
    "code-137": ([], "exit 137"),
    "signal": ([], "kill -9 $$"),
    "log": (["--output=/nonexistent/folder/log"], "true"),
    "held": (["--hold"], "true"),
    "array": (["--array=0-5%2"], SLEEP),
    "nodes": (["--nodes=3", "--exclusive"], SLEEP),
    "gpu": (["--partition=train", "--gres=gpu:2", "--mem=1500M"], SLEEP),
    "requeue": ([], SLEEP),
    "timeout": ([], SLEEP),
    "cancel": ([], SLEEP),
}


def main() -> None:
    """Write squeue.txt and sacct.txt."""
    commands, mark = Commands.of(Slurm()), f"rec{os.getpid()}-"
    begin = time.time()
    ids = {name: _submit(commands, mark + name, *job) for name, job in JOBS.items()}
    try:
        ids["dependency"] = _submit(commands, mark + "dependency", [f"--dependency=afterok:{ids['code']}"], "true")
        time.sleep(3)
        commands.requeue(ids["requeue"])
        commands.cancel([ids["cancel"], f"{ids['array']}_1"])
        commands.run("scontrol", "update", f"jobid={ids['timeout']}", "EndTime=now+1")
        deadline = time.monotonic() + 60  # limits are checked every half minute
        while time.monotonic() < deadline and "TIMEOUT" not in {job.state for job in commands.accounting(begin - 60) if job.job_id == ids["timeout"]}:
            time.sleep(1)
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin - 60))
        user = f"--user={login()}"
        questions = {
            "squeue.txt": ("squeue", "--noheader", "--array", "--states=all", user, f"--format={QUEUE_FORMAT}"),
            "sacct.txt": ("sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", user, f"--starttime={since}",
                f"--format={ACCOUNTING_FORMAT}"),
        }
        FOLDER.mkdir(exist_ok=True)
        for name, argv in questions.items():
            lines = [line.replace(mark, "rec-") for line in commands.run(*argv).out.splitlines() if f"|{mark}" in line]
            (FOLDER / name).write_text("\n".join(lines) + "\n")
    finally:
        commands.cancel(ids.values())


def _submit(commands: Commands, name: str, options: list[str], script: str) -> str:
    log = [] if any(option.startswith("--output") for option in options) else ["--output=/dev/null"]
    return commands.run("sbatch", "--parsable", f"--job-name={name}", *log, *options, f"--wrap={script}").out.strip()


if __name__ == "__main__":
    main()
