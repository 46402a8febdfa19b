"""A Slurm cluster of small programs: what tests do to it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

PROGRAMS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun", "sinfo")
_RUN = Path(__file__).resolve().parent / "run.py"


class Simulator:
    """One cluster, all of it in a folder; jobs are named by id, by array id, or by name (all of that name)."""

    def __init__(self, folder: Path, **settings: float) -> None:
        """`settings`: see DEFAULTS in state.py, without `SIM_` and in small letters: slots=2, kill_wait=0.3."""
        self.folder = folder.absolute()
        self.bin = self.folder / "bin"
        for each in (self.bin, self.folder / "runs", self.folder / "scripts"):
            each.mkdir(parents=True, exist_ok=True)
        for name in (*PROGRAMS, "sim"):
            # The folder is written into the programs: jobs and controllers are started with environments that know nothing of it.
            words = " ".join(shlex.quote(w) for w in (os.path.realpath(sys.executable), "-S", "-E", str(_RUN), name))
            program = self.bin / name
            temporary = program.with_suffix(".new")
            temporary.write_text(f"#!/bin/sh\nSIM_STATE=${{SIM_STATE:-{shlex.quote(str(self.folder))}}} exec {words} \"$@\"\n")
            temporary.chmod(0o755)
            temporary.replace(program)
        if settings:
            self._do("settings", **{f"SIM_{name.upper()}": value for name, value in settings.items()})

    def environment(self, base: dict[str, str] | None = None) -> dict[str, str]:
        """An environment (this process's by default) in which the programs are found, and no other cluster."""
        taken = dict(os.environ if base is None else base)
        kept = {k: v for k, v in taken.items() if not k.startswith(("SLURM", "SIM_"))}
        return {**kept, "PATH": f"{self.bin}:{kept.get('PATH', os.defpath)}", "SIM_STATE": str(self.folder)}

    def advance(self) -> None:
        """Let the cluster go on to the present; every command does so first."""
        self._do("look")

    def jobs(self) -> list[dict[str, Any]]:
        """All records, also of lost jobs and of those that no command shows any more, oldest first."""
        return self._do("look")

    def job(self, job: str | int) -> dict[str, Any]:
        """The newest record of a job."""
        return self._do("look", job)[-1]

    def preempt(self, job: str | int) -> None:
        """The warning that its script asked for (B:), after the grace TERM and then KILL, and back into the queue where it may."""
        self._do("preempt", job)

    def node_fail(self, job: str | int, *, step_lives: bool = False) -> None:
        """Its node dies, all its processes with it, or (`step_lives`) only as far as slurmctld can see; requeued where it may be, else NODE_FAIL."""
        self._do("node_fail", job, step_lives=step_lives)

    def time_out(self, job: str | int) -> None:
        """The warning, after the grace TERM and then KILL: TIMEOUT."""
        self._do("time_out", job)

    def oom(self, job: str | int) -> None:
        """Killed for memory."""
        self._do("oom", job)

    def hold(self, job: str | int, reason: Literal["JobHeldUser", "JobHeldAdmin"] = "JobHeldUser") -> None:
        """A waiting job does not start by itself any more."""
        self._do("hold", job, reason=reason)

    def release(self, job: str | int) -> None:
        """Take a hold back."""
        self._do("release", job)

    def lose(self, job: str | int, *, goes_on: bool = True) -> None:
        """slurmctld forgets a job that it acknowledged; its processes go on, or die."""
        self._do("lose", job, goes_on=goes_on)

    def reuse_ids(self) -> None:
        """The next submissions get ids that were used before."""
        self._do("reuse_ids")

    def down(self, seconds: float) -> None:
        """slurmctld does not answer: every command but sacct fails, and nothing starts or ends as far as records tell. 0 ends it."""
        self._do("down", seconds=seconds)

    def accounting(self, mode: Literal["absent", "down", "ok"]) -> None:
        """Whether there is a slurmdbd, and whether it answers."""
        self._do("accounting", mode=mode)

    def plan(self, command: str, kind: str, *, times: int = 1, skip: int = 0, seconds: float = 0.0) -> None:
        """A fault for the next calls of a command, after `skip` of them.

        sbatch: timeout_before, hang_before (nothing is submitted), timeout_after, hang_after (it is), late (acknowledged, shown after `seconds`; with
        timeout_after and hang_after, too), refuse_partition, refuse_qos, refuse_busy. squeue, sacct, scancel, scontrol: fail, hang.
        """
        if command == "sim" or (command == "sbatch") == (kind in ("fail", "hang")) or command not in PROGRAMS:
            raise ValueError(f"{command} has no fault {kind}")
        with open(self.folder / "plan", "a") as file:
            file.write(json.dumps({"command": command, "kind": kind, "times": times, "skip": skip, "seconds": seconds}) + "\n")

    def wait(self, job: str | int, *states: str, seconds: float = 20) -> dict[str, Any]:
        """Let it go on until a job is in one of these states; the record. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while (record := self.job(job))["state"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(f"job {job} is {record['state']} ({record['reason']}), not {' or '.join(states)}")
            time.sleep(0.03)
        return record

    def kill_all(self) -> None:
        """No process of any job, and no hanging command, outlives this."""
        self._do("settings", SIM_SLOTS=0)
        mark = f"SIM_JOB={self.folder}|".encode()
        state = f"SIM_STATE={self.folder}".encode()
        hanging = (self.folder / "hanging").read_text().split() if (self.folder / "hanging").exists() else []
        for _ in range(100):
            doomed = []
            for entry in Path("/proc").iterdir():
                if not entry.name.isdigit() or int(entry.name) == os.getpid():
                    continue
                try:
                    words = (entry / "environ").read_bytes().split(b"\0")
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                ours = any(w.startswith(mark) for w in words)
                step = state in words and b"stepd" in command
                if ours or step or (entry.name in hanging and state in words):
                    doomed.append(int(entry.name))
            for pid in doomed:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not doomed:
                return
            time.sleep(0.02)
        raise TimeoutError(f"{self.folder}: processes do not die: {doomed}")

    def _do(self, verb: str, job: str | int = "", **options: Any) -> list[dict[str, Any]]:
        command = [str(self.bin / "sim"), verb, str(job), json.dumps(options)]
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise LookupError(done.stderr.strip())
        answer: list[dict[str, Any]] = json.loads(done.stdout)
        return answer
