"""One incarnation of a job (`python -m evo_hpc.dispatch.launcher`): claims, starts the roles, watches, writes the result."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch.exchange import make_exchange, sweep_exchange
from evo_hpc.dispatch.roles import ROLES, Role
from evo_hpc.jobs.claims import Superseded, check_claim, claim
from evo_hpc.jobs.spec import Identity, JobSpec, Result, load_spec
from evo_hpc.paths import ExchangePaths, IncarnationPaths, JobPaths
from evo_hpc.store.atomic import read_json, write_json, write_json_once
from evo_hpc.store.processes import ProcessIdentity

_POLL_SECONDS = 0.1
_BEAT_SECONDS = 2.0
_SERVICE_GRACE_SECONDS = 5.0


@dataclass
class Launcher:
    """The processes of one incarnation and how they end: together."""

    job: JobPaths
    spec: JobSpec
    incarnation: IncarnationPaths
    exchange: ExchangePaths
    cluster: Cluster
    started: float = field(default_factory=time.time)
    stopping_since: float | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _last_beat: float = 0.0

    def run(self) -> Result | None:
        """Run to the end; None when a newer incarnation took over."""
        roles = ROLES[self.spec.kind]
        for role in roles:
            self.processes[role.name] = self._spawn(role)
        try:
            result = self._watch(roles)
        except Superseded as error:
            print(error, file=sys.stderr)
            result = None
        finally:
            self._end_all()
        return result

    def _spawn(self, role: Role) -> subprocess.Popen[bytes]:
        log = self.incarnation.log(role.name)
        log.parent.mkdir(exist_ok=True)
        threads = self.cluster.engine.threads if role.name in ("rollout", "evaluator") else self.cluster.trainer.threads
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **self.cluster.environment,
        }
        command = [
            sys.executable, "-m", "evo_hpc.jobs.role", "--job", str(self.job.root), "--incarnation", str(self.incarnation.number),
            "--role", role.name, "--entry", role.entry, "--exchange", str(self.exchange.root), "--parent", str(os.getpid()),
        ]
        with log.open("ab") as out:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def _watch(self, roles: tuple[Role, ...]) -> Result:
        primary = next(r for r in roles if r.primary)
        while True:
            for role in roles:
                code = self.processes[role.name].poll()
                if code is None:
                    continue
                if role is primary or not self._outcome(role.name, code).get("outcome") == "stopped":
                    return self._finish(role, code, primary)
            self._beat()
            if self.stopping_since is not None and time.time() - self.stopping_since > self.cluster.grace_seconds:
                return self._failed(f"did not stop within {self.cluster.grace_seconds:.0f} s of the signal", "infrastructure")
            if stalled := self._stalled_seconds():
                for process in self.processes.values():
                    process.send_signal(signal.SIGABRT)
                return self._failed(f"no progress for {stalled / 60:.1f} minutes; every thread's stack is in "
                                    f"{self.incarnation.log(primary.name).parent}", "infrastructure")
            time.sleep(_POLL_SECONDS)

    def _finish(self, role: Role, code: int, primary: Role) -> Result:
        outcome = self._outcome(role.name, code)
        if role is not primary and outcome["outcome"] == "done":
            outcome = {"outcome": "failed", "blame": "infrastructure", "error": f"{role.name} ended before {primary.name}"}
        if outcome["outcome"] == "failed":  # the reason may be in a peer that died first
            for peer, process in self.processes.items():
                if peer != role.name and process.poll() not in (None, 0):
                    told = self._outcome(peer, process.returncode)
                    if told["outcome"] == "failed" and told.get("blame") == "user":
                        outcome = told
        return Result(
            outcome=outcome["outcome"], blame=outcome.get("blame"), error=outcome.get("error"),
            outputs=outcome.get("outputs") or {}, seconds=time.time() - self.started, finished_at=time.time(),
        )

    def _outcome(self, role: str, code: int) -> dict[str, Any]:
        path = self.incarnation.role_outcome(role)
        if path.exists():
            return read_json(path)
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with {code}"
        return {"outcome": "failed", "blame": "infrastructure", "error": f"{role} {how}; end of its log: {self._log_tail(role)}"}

    def _log_tail(self, role: str, limit: int = 400) -> str:
        log = self.incarnation.log(role)
        text = log.read_text(errors="replace") if log.exists() else ""
        return " | ".join(line for line in text[-limit:].splitlines()[-4:] if line.strip()) or "(empty)"

    def _failed(self, error: str, blame: str) -> Result:
        return Result(outcome="failed", blame=blame, error=error, seconds=time.time() - self.started, finished_at=time.time())

    def _beat(self) -> None:
        now = time.time()
        if now - self._last_beat < _BEAT_SECONDS:
            return
        self._last_beat = now
        check_claim(self.job, self.incarnation)
        write_json(self.incarnation.heartbeat, {"time": now, "pid": os.getpid(), "host": os.uname().nodename}, durable=False)

    def _stalled_seconds(self) -> float | None:
        progress = self.incarnation.progress
        last = progress.stat().st_mtime if progress.exists() else self.started
        silent = time.time() - last
        return silent if silent > 60 * self.cluster.stall_minutes else None

    def request_stop(self) -> None:
        """Pass SIGTERM on; the roles save and end."""
        if self.stopping_since is None:
            self.stopping_since = time.time()
            for process in self.processes.values():
                if process.poll() is None:
                    process.terminate()

    def _end_all(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.time() + _SERVICE_GRACE_SECONDS
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 when a result was written (whatever it says), 3 when superseded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--job-name", required=True)
    for name in ("--start", "--generation"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args(arguments)
    job = JobPaths(Path(args.job))
    spec = load_spec(job)
    identity = Identity(
        job_name=args.job_name, generation=args.generation, start=args.start, process=ProcessIdentity.current(), claimed_at=time.time()
    )
    try:
        incarnation = claim(job, identity)
    except Superseded as error:
        print(error, file=sys.stderr)
        return 3
    cluster = Cluster.model_validate(spec.cluster)
    sweep_exchange(args.job_name)
    exchange = make_exchange(cluster, args.job_name, incarnation)
    launcher = Launcher(job, spec, incarnation, exchange, cluster)
    signal.signal(signal.SIGTERM, lambda signum, frame: launcher.request_stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = launcher.run()
    finally:
        shutil.rmtree(exchange.root, ignore_errors=True)
    if result is None:
        return 3
    check_claim(job, incarnation)
    write_json_once(incarnation.result, result.model_dump())
    return 0


if __name__ == "__main__":
    sys.exit(main())
