"""Runs Slurm's commands: argument lists, a time limit each, an environment of its own, errors by what may be concluded."""

from __future__ import annotations

import os
import re
import signal as signals
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.environment import environment_for_jobs, login
from evo_hpc.dispatch.slurm.errors import NoAccounting, SlurmBusy, SlurmError, SlurmMissing, SlurmRefused, SlurmUnavailable, clean, refusal
from evo_hpc.dispatch.slurm.parse import ACCOUNTING_FORMAT, QUEUE_FORMAT, Listing, parse_accounting, parse_queue

__all__ = [
    "Answer", "Commands", "NoAccounting", "SlurmBusy", "SlurmError", "SlurmMissing", "SlurmRefused", "SlurmUnavailable",
    "environment_for_jobs", "login", "refusal",
]

IDS_AT_ONCE = 500
"""Ids of one scancel: far below the longest command line."""
_JOB_ID = re.compile(r"[0-9]+(?:_[0-9]+)?")
_GONE = ("Invalid job id specified", "already completing or completed", "Job has already finished", "Job is not pending nor running")
"""What scancel says of jobs that are over, or that slurmctld has forgotten."""
_NOT_STARTED = ("Job is pending execution", "Job can not be altered now, try again later")
"""What it says of a signal to a job without processes: 22.05 the latter (measured), newer ones the former."""
_ABOUT_A_JOB = re.compile(r"^scancel: error: Kill job error on job id \S+: (.*)$")
_SIGNAL_SECONDS = 20.0
"""Longest time of a scancel that signals: for a job without processes it tries again for 95 s (measured, 22.05) before it says so."""
_AFTER_KILL_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """What a command answered."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Commands:
    """Slurm's commands as this user. Every method raises SlurmMissing, SlurmUnavailable and SlurmRefused, as errors.py says."""

    seconds: float
    """Longest time that one may take."""
    environment: Mapping[str, str]
    """All that they get."""

    @classmethod
    def of(cls, slurm: Slurm) -> Commands:
        """With the time limit of a profile and the allowed part of this process's environment. Raises UserError, as environment_for_jobs."""
        return cls(slurm.command_seconds, {**environment_for_jobs(slurm), "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"})

    def run(self, *argv: str, seconds: float | None = None) -> Answer:
        """Run one command to its end, whatever its exit code. One that takes too long is killed with all that it started.

        Raises SlurmMissing, and SlurmUnavailable where it did not end in time: it may have done what it was asked.
        """
        limit = self.seconds if seconds is None else seconds
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(self.environment), start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise SlurmMissing(
                f"{argv[0]}: no such program on this host's PATH ({self.environment.get('PATH', '')}); run where Slurm's commands are "
                "(a login node, `module load slurm`), or set `executor: local` in cluster.yaml"
            ) from error
        except OSError as error:  # no process or memory left for a moment
            raise SlurmUnavailable(f"{argv[0]}: could not be started ({error.strerror})") from error
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            said = clean(_killed(process))
            raise SlurmUnavailable(f"{' '.join(argv[:2])}: no end after {limit:g} s, killed{f'; it said: {said}' if said else ''}") from error
        except BaseException:
            _killed(process)
            raise
        return Answer(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    def queue(self) -> Listing:
        """All jobs of this user that slurmctld knows, ended ones for as long as it keeps them (MinJobAge): one question."""
        return parse_queue(self._ask("squeue", "--noheader", "--array", "--states=all", f"--user={login()}", f"--format={QUEUE_FORMAT}"))

    def accounting(self, since: float) -> Listing:
        """All runs of jobs of this user that were there after `since` (Unix seconds): one question. Raises NoAccounting."""
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
        return parse_accounting(self._ask(
            "sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", f"--user={login()}", f"--starttime={start}",
            f"--format={ACCOUNTING_FORMAT}",
        ))

    def cancel(self, ids: Iterable[str], signal: str | None = None, batch: bool = False) -> None:
        """Cancel jobs, or signal them (`batch`: their batch shells alone); jobs that are over are no error.

        A signal passes over a job that waits; one to a job that is just starting may reach nothing: SlurmBusy, or SlurmUnavailable
        where scancel goes on trying (it then is killed). Such an error is raised after all others were signalled.
        """
        named = list(dict.fromkeys(ids))
        # Without --state slurmctld answers a signal to a waiting job after a minute and a half of retries (measured).
        options = [*(["--batch"] if batch else []), *(["--state=RUNNING", f"--signal={signal}"] if signal is not None else [])]
        _check_ids(named)
        failed: list[SlurmError] = []
        for first in range(0, len(named), IDS_AT_ONCE):
            argv = ["scancel", *options, *named[first : first + IDS_AT_ONCE]]
            try:
                answer = self.run(*argv, seconds=self.seconds if signal is None else min(self.seconds, _SIGNAL_SECONDS))
            except SlurmUnavailable as error:
                failed.append(error)
                continue
            if (refused := _cancel_error(argv, answer)) is not None:
                failed.append(refused)
        if failed:
            raise failed[0]

    def requeue(self, job_id: str) -> None:
        """Put a running or ended job back into the queue. SlurmRefused for one that may not be requeued."""
        _check_ids([job_id])
        self._ask("scontrol", "requeue", job_id)

    def hostnames(self, node_list: str) -> list[str]:
        """The hosts that a list of nodes (`n[1-3],login`) stands for."""
        return self._ask("scontrol", "show", "hostnames", node_list).split() if node_list else []

    def version(self) -> tuple[int, ...]:
        """Slurm's: (22, 5, 8)."""
        out = self._ask("scontrol", "--version")
        found = re.search(r"(\d+(?:\.\d+)+)", out)
        if found is None:
            raise SlurmRefused(f"scontrol --version: {clean(out)!r} names no version")
        return tuple(int(part) for part in found[1].split("."))

    def _ask(self, *argv: str) -> str:
        answer = self.run(*argv)
        if answer.code != 0:
            raise refusal(argv, answer.code, answer.err or answer.out)
        if argv[0] == "squeue" and "Invalid user" in answer.err:  # which squeue reports with exit code 0, and an empty queue
            raise SlurmRefused(f"squeue: {clean(answer.err)}")
        return answer.out


def _killed(process: subprocess.Popen[bytes]) -> str:
    """End a command and all of its group; what it had written to stderr."""
    try:
        os.killpg(process.pid, signals.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    try:
        return process.communicate(timeout=_AFTER_KILL_SECONDS)[1].decode(errors="replace")
    except subprocess.TimeoutExpired:  # something that left the group holds the pipes open
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return ""


def _check_ids(ids: Sequence[str]) -> None:
    for each in ids:
        if not _JOB_ID.fullmatch(each):
            raise ValueError(f"{each!r} is no id of a Slurm job")


def _cancel_error(argv: Sequence[str], answer: Answer) -> SlurmError | None:
    if answer.code == 0:
        return None
    told = [(line, _ABOUT_A_JOB.match(line)) for line in answer.err.splitlines() if line.strip()]
    left = [line for line, about in told if about is None or not any(words in about[1] for words in _GONE)]
    if told and not left:
        return None
    signals_only = any(option.startswith("--signal") for option in argv)
    if left and signals_only and all(about is not None and any(words in about[1] for words in (*_GONE, *_NOT_STARTED)) for _, about in told):
        return SlurmBusy(f"scancel: {clean(chr(10).join(left))} (it waits or is starting: nothing is there to be signalled)")
    return refusal(argv, answer.code, "\n".join(left))
