"""One incarnation of a job (`python -m evo_hpc.dispatch.launcher`): claims, starts the roles, watches, writes the result."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.attempt import read_attempt
from evo_hpc.dispatch.endings import outcome_of
from evo_hpc.dispatch.exchange import exchange_bytes, make_exchange
from evo_hpc.dispatch.memory import killed_for_memory
from evo_hpc.dispatch.roles import ROLES, Role, processes
from evo_hpc.dispatch.slurm.commands import Commands, SlurmError
from evo_hpc.dispatch.slurm.steps import Allocation, by_srun, rendezvous, srun_words
from evo_hpc.dispatch.workers import Pulses
from evo_hpc.errors import EvoError, UserError
from evo_hpc.jobs.claims import Superseded, check_claim, claim
from evo_hpc.jobs.spec import Blame, Identity, JobSpec, Result, load_spec
from evo_hpc.paths import ExchangePaths, IncarnationPaths, JobPaths
from evo_hpc.rollout.doorbell_hub import Hub
from evo_hpc.store.atomic import StoreError, write_json, write_json_once
from evo_hpc.store.processes import ProcessIdentity

_POLL_SECONDS = 0.1
_BEAT_SECONDS = 2.0
_SERVICE_GRACE_SECONDS = 5.0
_LONGEST_TICK_SECONDS = 1.0
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM)
"""Whichever of them the profile asks Slurm for."""
_REQUEUE_SECONDS = 120.0
"""How long a job that asked to be requeued waits to be ended."""
_NOT_REQUEUED = 75
"""Exit code (EX_TEMPFAIL) of a job that was stopped by a warning and that Slurm did not requeue: not 0, which would be COMPLETED."""
_STACKS_SECONDS = 3.0
"""What ranks behind srun have to write their stacks, before they are ended."""
_BEFORE_THE_END_SECONDS = 5.0
"""What is left of the warning time once a job that does not save in time is cut off, to write its result."""


@dataclass
class AwakeClock:
    """Seconds that this process was awake: a pause (SIGSTOP, a suspended job or machine) counts as one second at most."""

    now: Callable[[], float] = time.monotonic
    seconds: float = 0.0
    _last: float | None = None

    def tick(self) -> float:
        """Count the time since the last call; called at each poll."""
        now = self.now()
        if self._last is not None:
            self.seconds += min(now - self._last, _LONGEST_TICK_SECONDS)
        self._last = now
        return self.seconds


@dataclass
class Launcher:
    """The processes of one incarnation and how they end: together."""

    job: JobPaths
    spec: JobSpec
    incarnation: IncarnationPaths
    exchange: ExchangePaths
    cluster: Cluster
    allocation: Allocation | None = None
    """The Slurm job that this runs in; null on one machine."""
    clock: AwakeClock = field(default_factory=AwakeClock)
    started: float = field(default_factory=time.time)
    killed_before: int = field(default_factory=killed_for_memory)
    """Deaths for memory that this control group had counted before."""
    stopping_since: float | None = None
    """Reading of `clock` when the job was told to stop."""
    stopped_by: Literal["controller", "warning"] | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    """By the name of the process."""
    restarts: dict[str, int] = field(default_factory=dict)
    """How often each worker was started again."""
    _pulses: Pulses = field(default_factory=Pulses)
    _told_to_stop: bool = False
    _cut_off: bool = False
    _last_beat: float = float("-inf")
    _beat_failed: bool = False
    _progress: tuple[int, int] | None = None
    _progress_at: float = 0.0

    def run(self) -> Result:
        """Run to the end. Raises Superseded when a newer incarnation took over, OSError when a role cannot be started."""
        self.roles = {role.name: role for role in processes(ROLES[self.spec.kind], self.cluster)}
        try:
            for role in self.roles.values():
                if self.stopping_since is None:
                    self.processes[role.name] = self._spawn(role)
            return self._watch(next(role.name for role in self.roles.values() if role.primary))
        finally:
            self._end_all()

    def request_stop(self, by: Literal["controller", "warning"] = "controller") -> None:
        """Have the wish passed on; the roles save and end. Safe in a signal handler: it only notes the time."""
        if self.stopping_since is None:
            self.stopping_since = self.clock.seconds
            self.stopped_by = by

    def _time_to_save(self) -> float:
        """Seconds; after a warning of Slurm no more than it leaves."""
        if self.stopped_by != "warning":
            return self.cluster.grace_seconds
        warned = self.cluster.slurm.of(self.spec.kind).warning_seconds
        return max(1.0, (120 if warned is None else warned) - _BEFORE_THE_END_SECONDS)

    def _spawn(self, role: Role) -> subprocess.Popen[bytes]:
        log = self.incarnation.log(role.name)
        log.parent.mkdir(exist_ok=True)
        has_engine = role.name.split("-")[0] in ("rollout", "evaluator")
        threads = self.cluster.engine.threads if has_engine else self.cluster.trainer.threads
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait make two jobs on one machine ten times slower, and one no faster
            **os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **self.cluster.environment,
        }
        parent, words = os.getpid(), list[str]()
        if self.allocation is not None:
            resources = self.cluster.slurm.of(self.spec.kind)
            environment.update(rendezvous(self.allocation))
            if self._behind_srun():  # srun ends the step when this process dies; the role's parent is another, on another node perhaps
                # Shared memory, where the exchange is unless the profile names a folder, is the first node's alone.
                index = role.index if self.cluster.exchange is not None else 0
                parent, words = 0, [*srun_words(resources, primary=role.primary, index=index), *(resources.container or [])]
        command = [
            sys.executable, "-m", "evo_hpc.jobs.role", "--job", str(self.job.root), "--incarnation", str(self.incarnation.number),
            "--role", role.name, "--entry", role.entry, "--exchange", str(self.exchange.root),
        ]
        if self.allocation is None and self.spec.kind == "train" and role.primary and (ranks := self.cluster.trainer.ranks) > 1:
            command = [sys.executable, "-m", "evo_hpc.jobs.ranks", "--count", str(ranks), "--parent", str(parent), *command]
        else:
            command = [*words, *command, "--parent", str(parent)]
        with log.open("ab") as out:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def _watch(self, primary: str) -> Result:
        if primary not in self.processes:
            return self._result({"outcome": "stopped", "error": f"stopped before {primary} was started"})
        while True:
            awake = self.clock.tick()
            if self.processes[primary].poll() is not None:
                return self._finish(primary)
            self._beat()
            if self.stopping_since is None:
                if (result := self._ended_early(primary) or self._fallen_silent()) is not None:
                    return result
                if (still := self._stalled_seconds()) is not None:
                    self._dump_stacks()
                    return self._failed(f"no progress for {still / 60:.1f} minutes; every thread's stack is in "
                                        f"{self.incarnation.log(primary).parent}")
            else:  # whatever becomes of a service now, the primary is given its time to save
                self._pass_stop_on()
                if awake - self.stopping_since > self._time_to_save():
                    self._kill_all()
                    return self._finish(primary)
            time.sleep(_POLL_SECONDS)

    def _ended_early(self, primary: str) -> Result | None:
        """The result when a service has ended by itself; one that was told to stop takes the job with it."""
        for name, process in list(self.processes.items()):
            if name == primary or process.poll() is None:  # the primary's end is seen at the next look
                continue
            outcome = self._outcome(name)
            if outcome["outcome"] == "stopped":  # Slurm speaks to the steps of a job directly, too
                self.request_stop("controller" if self.allocation is None else "warning")
            elif outcome["outcome"] == "done":
                return self._failed(f"{name} ended before {primary}")
            elif not (_may_pass(outcome) and self.processes[primary].poll() is None and self._restart(name, str(outcome["error"]))):
                return self._result(outcome)
        return None

    def _fallen_silent(self) -> Result | None:
        """Start workers again that have work and do not go on with it, their stacks in their logs; the result when that was done too often."""
        for name in [name for name, role in self.roles.items() if role.worker]:
            silent = self._pulses.silent_seconds(name, self.incarnation.pulse(name), self.clock.seconds)
            if silent <= 60 * self.cluster.stall_minutes:
                continue
            why = f"{name} had work and gave no sign of life for {silent / 60:.1f} minutes; its stacks are in {self.incarnation.log(name)}"
            self._dump_stacks([name])
            self._end([self.processes[name]])
            if not self._restart(name, why):
                return self._failed(why)
        return None

    def _restart(self, name: str, why: str) -> bool:
        """Start a worker again that is dead; False when it is none, or has had its share of that."""
        done, limit = self.restarts.get(name, 0), self.cluster.engine.restarts
        if not self.roles[name].worker or done >= limit:
            return False
        self.restarts[name] = done + 1
        _say(f"{why}. Started again ({done + 1} of {limit} times)")
        for path in (*self.incarnation.role_outcomes(name), self.incarnation.pulse(name)):
            path.unlink(missing_ok=True)
        self._pulses.forget(name, self.clock.seconds)
        self.processes[name] = self._spawn(self.roles[name])
        return True

    def _finish(self, primary: str) -> Result:
        outcome = self._outcome(primary)
        saved = outcome["outcome"] == "stopped" and self.stopping_since is not None
        if outcome["outcome"] != "done" and not saved:  # the reason may be in a peer that died first
            for peer, process in self.processes.items():
                if peer != primary and process.poll() is not None:
                    told = self._outcome(peer)
                    if told["outcome"] == "failed" and (outcome["outcome"] == "stopped" or told.get("blame") == "user"):
                        outcome = told
        return self._result(outcome)

    def _outcome(self, role: str) -> dict[str, Any]:
        return outcome_of(
            role, self.processes[role].wait(), self.incarnation, asked_to_stop=self.stopping_since is not None,
            cut_off_after=self._time_to_save() if self._cut_off else None, killed_before=self.killed_before, behind_srun=self._behind_srun(),
        )

    def _result(self, outcome: dict[str, Any]) -> Result:
        return Result(
            outcome=outcome["outcome"], blame=outcome.get("blame"), error=outcome.get("error"),
            outputs=outcome.get("outputs") or {}, seconds=time.time() - self.started, finished_at=time.time(),
            ending=outcome.get("ending"), stopped_by=self._stopped_by() if outcome["outcome"] == "stopped" else None,
        )

    def _stopped_by(self) -> Literal["controller", "warning"]:
        """Nobody told this process: then Slurm told the role itself."""
        return self.stopped_by or ("controller" if self.allocation is None else "warning")

    def _failed(self, error: str) -> Result:
        return self._result({"outcome": "failed", "blame": "infrastructure", "error": error})

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat < _BEAT_SECONDS:
            return
        self._last_beat = now
        check_claim(self.job, self.incarnation)
        try:
            beat = {"time": time.time(), "pid": os.getpid(), "host": os.uname().nodename}
            write_json(self.incarnation.heartbeat, beat, durable=False)
        except StoreError as error:  # no reason to end the work: what must be on disk fails by itself
            if not self._beat_failed:
                _say(str(error))
            self._beat_failed = True

    def _stalled_seconds(self) -> float | None:
        """Seconds awake since the progress file last changed, and since a worker last sampled, when they are too many."""
        progress = self.incarnation.progress
        if progress.exists():
            found = progress.stat()
            if (seen := (found.st_ino, found.st_mtime_ns)) != self._progress:
                self._progress, self._progress_at = seen, self.clock.seconds
        silent = self.clock.seconds - max(self._progress_at, self._pulses.last)
        return silent if silent > 60 * self.cluster.stall_minutes else None

    def _behind_srun(self) -> bool:
        return self.allocation is not None and by_srun(self.cluster.slurm.of(self.spec.kind))

    def _dump_stacks(self, names: list[str] | None = None) -> None:
        """Have these roles, or all, write their threads' stacks. Those behind srun are asked through Slurm, and do not die of it: srun itself dies of
        SIGABRT without passing it on, and the first rank that ended would take the others with it before they have written theirs."""
        if not self._behind_srun():
            for name, process in self.processes.items():
                if names is None or name in names:
                    process.send_signal(signal.SIGABRT)
            return
        assert self.allocation is not None
        try:
            Commands.of(Slurm()).cancel([self.allocation.shown_id], signal="QUIT")
            time.sleep(_STACKS_SECONDS)
        except SlurmError as error:
            _say(f"no stacks: {error}")

    def _pass_stop_on(self) -> None:
        if not self._told_to_stop:
            self._told_to_stop = True
            self.incarnation.stop.touch()  # for roles behind srun, which would end them on SIGTERM rather than tell them
            if not self._behind_srun():
                for process in self.processes.values():
                    process.terminate()

    def _kill_all(self) -> None:
        self._cut_off = True
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _end_all(self) -> None:
        self._end(list(self.processes.values()))

    def _end(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _SERVICE_GRACE_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 when a result was written (whatever it says), 3 when superseded, 1 or 2 when there could be no result.

    Unless it is 0, one line in launch.log says why.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--job-name", required=True)
    for name in ("--start", "--generation"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    args = parser.parse_args(arguments)
    early: list[int] = []
    for signum in (signal.SIGTERM, *_WARNINGS):
        signal.signal(signum, lambda signum, frame: early.append(signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        allocation = _allocation() if args.executor == "slurm" else None
        result = _incarnation(JobPaths(Path(args.job)), args.job_name, args.generation, args.start, early, allocation)
        if allocation is not None and result.stopped_by == "warning":
            return _requeue(JobPaths(Path(args.job)), allocation)
    except Superseded as error:
        _say(str(error))
        return 3
    except EvoError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        _say(str(error))
        return 1
    return 0


def _allocation() -> Allocation:
    """The Slurm job that this process is in. Raises UserError outside one."""
    found = Allocation.current()
    if found is None:
        raise UserError("started with --executor slurm outside a Slurm job; submit the script with sbatch")
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    hosts = Commands.of(Slurm()).hostnames(listed) if "[" in listed or "," in listed else [listed]
    return Allocation.current(tuple(hosts)) or found


def _requeue(job: JobPaths, allocation: Allocation) -> int:
    """Ask Slurm to run this job again, and wait to be ended: an exit would be the job's end. The exit code when that does not come.

    One that was stopped time and again without a step further is left to the controller, which gives it up.
    """
    limit = Cluster.model_validate(load_spec(job).cluster).slurm.retries.without_progress
    if (stale := read_attempt(job).stale) >= limit:
        _say(f"saved; not requeued: no step further in {stale} runs")
        return _NOT_REQUEUED
    try:
        Commands.of(Slurm()).requeue(allocation.shown_id)
    except SlurmError as error:  # not to be requeued, or nobody answers: the controller submits it anew
        _say(f"saved; not requeued ({error})")
        return _NOT_REQUEUED
    deadline = time.monotonic() + _REQUEUE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(1)
    return _NOT_REQUEUED


def _incarnation(job: JobPaths, name: str, generation: int, start: int, early: list[int], allocation: Allocation | None) -> Result:
    """From claim to result. Raises Superseded, or StoreError or OSError when the result cannot be written."""
    process, started = ProcessIdentity.current(), time.time()
    incarnation = claim(job, Identity(
        job_name=name, generation=generation, start=start, process=process, claimed_at=started,
        restart=allocation.restart if allocation else 0, slurm_job_id=allocation.shown_id if allocation else None,
    ))
    try:
        result = _run(job, name, incarnation, early, allocation)
    except Superseded:
        raise
    except (EvoError, OSError, ValidationError) as error:
        blame: Blame = "infrastructure" if isinstance(error, OSError) or getattr(error, "exit_code", 2) != 2 else "user"
        result = Result(outcome="failed", blame=blame, error=str(error), seconds=time.time() - started, finished_at=time.time())
    check_claim(job, incarnation)
    try:
        write_json_once(incarnation.result, result.model_dump())
    except StoreError as error:
        raise StoreError(f"{error} (the result was: {result.outcome}, {result.error})") from error
    return result


def _run(job: JobPaths, name: str, incarnation: IncarnationPaths, early: list[int], allocation: Allocation | None) -> Result:
    spec = load_spec(job)
    cluster = Cluster.model_validate(spec.cluster)
    exchange = make_exchange(cluster, name, incarnation, need_bytes=exchange_bytes(job, spec))
    hub = _doorbell(exchange, spec, cluster, allocation)
    try:
        launcher = Launcher(job, spec, incarnation, exchange, cluster, allocation)
        signal.signal(signal.SIGTERM, lambda signum, frame: launcher.request_stop())
        for signum in _WARNINGS:
            signal.signal(signum, lambda signum, frame: launcher.request_stop("warning"))
        if early:  # told to stop before there was anything to stop
            launcher.request_stop("controller" if signal.SIGTERM in early else "warning")
        return launcher.run()
    finally:
        if hub is not None:
            hub.close()
        shutil.rmtree(exchange.root, ignore_errors=True)


def _doorbell(exchange: ExchangePaths, spec: JobSpec, cluster: Cluster, allocation: Allocation | None) -> Hub | None:
    """A doorbell where a job has several roles that wait for each other; on one host nobody else can reach it."""
    names = [role.name for role in processes(ROLES[spec.kind], cluster)]
    hosts = allocation.hosts if allocation is not None else ()
    hub = Hub(exchange, hosts[0] if len(hosts) > 1 else "127.0.0.1", names)
    return hub if len(names) > 1 and hub.start() else None


def _may_pass(outcome: dict[str, Any]) -> bool:
    """Whether a role's failure may have been a chance one: not the user's, and not of the kind that Slurm is asked about."""
    return outcome["outcome"] == "failed" and outcome.get("blame") != "user" and outcome.get("ending") is None


def _say(message: str) -> None:
    """One line in launch.log, or none where that disk is full too: the exit code then speaks alone."""
    try:
        print(" ".join(message.split()), file=sys.stderr, flush=True)
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
