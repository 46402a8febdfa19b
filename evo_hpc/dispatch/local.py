"""Jobs as detached processes of this machine, under the same contract as on a cluster.

submitit's LocalExecutor is not used here: it knows a job only by the Popen object in the memory of the process that
submitted it (a reloaded job reports "NO PROCESS AND NO RESULT"), its job id is a bare pid, its time limit is kept by
that same process, and results come back as pickles. A controller that was killed could neither find its jobs again
nor tell whether they run. Here a job is found by its name on the command line and by its claim.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch.attempt import campaign_root, last_beat, load, load_intent, load_record
from evo_hpc.dispatch.intent import check_spec
from evo_hpc.dispatch.status import FRESH_BEAT_SECONDS, JobStatus, Phase
from evo_hpc.jobs.claims import current_claim
from evo_hpc.jobs.spec import Ending, Intent, Result, Start
from evo_hpc.paths import JobPaths
from evo_hpc.store.atomic import write_json_once
from evo_hpc.store.lease import Lease
from evo_hpc.store.processes import find_by_argument


def observe(job: JobPaths) -> JobStatus:
    """The status of one attempt; of one on another host as far as its files tell. Raises StoreError on damaged records."""
    intent, record = load_intent(job), load_record(job)
    if record is not None:
        return JobStatus(job, "recorded", incarnation=record.incarnation, record=record, intent=intent)
    copied = intent is not None and intent.root != campaign_root(job)
    while True:
        status = _observe(job, intent, copied)
        # A job that claimed or ended between the look at its claim and the one at the processes would seem dead.
        if status.phase != "dead" or (current_claim(job), job.incarnations()) == status.seen:
            return status


def _observe(job: JobPaths, intent: Intent | None, copied: bool) -> JobStatus:
    seen = (current_claim(job), job.incarnations())
    claim = seen[0]
    status = JobStatus(job, "dead" if job.starts() else "planned", starts=len(job.starts()), intent=intent, seen=seen)
    if claim is not None:
        number, identity = claim
        here = identity.process.here()
        # Before the result is looked for: a job that ends in between has one by now.
        alive = here and not copied and identity.process.alive()
        results = _results(job)
        status = replace(status, starts=_counted_starts(job, results), result=results.get(number))
        if number in results and results[number].outcome != "stopped":
            return replace(status, phase="finished", incarnation=number)
        if not here and not copied and number not in results:  # one that has saved may go on anywhere
            silent = time.time() - last_beat(job, number, identity.claimed_at)
            phase: Phase = "running" if silent < FRESH_BEAT_SECONDS else "unknown"
            return replace(status, phase=phase, incarnation=number, host=identity.process.host, generation=identity.generation,
                           said=f"on {identity.process.host}, no sign of life for {silent:.0f} s")
        if alive:
            return replace(status, phase="running", pid=identity.process.pid, incarnation=number)
    if intent is not None and not copied:
        command = ("--job-name", intent.name, "--job", str(job.root.absolute()), "evo_hpc.dispatch.launcher")
        if unclaimed := find_by_argument(*command):
            return replace(status, phase="running", pid=unclaimed[0])
    return status


def _results(job: JobPaths) -> dict[int, Result]:
    return {i.number: load(Result, i.result) for i in job.incarnations() if i.result.exists()}


def _counted_starts(job: JobPaths, results: dict[int, Result]) -> int:
    return len(job.starts()) - sum(result.outcome == "stopped" for result in results.values())


@dataclass
class LocalExecutor:
    """Starts and stops attempts."""

    cluster: Cluster
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _starting: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    _asked: set[tuple[Path, int]] = field(default_factory=set)

    def start(self, statuses: Sequence[JobStatus], lease: Lease) -> str:
        """Start attempts once more; in words, what they are now."""
        return "process " + ", ".join(str(self._start(status.job, lease)) for status in statuses)

    def _start(self, job: JobPaths, lease: Lease) -> int:
        """Start an attempt once more; returns the launcher's pid. The start is on disk before the process exists.

        A start of this executor's that has not claimed yet is not doubled: between fork and exec nobody can see its name.
        """
        lease.check()
        if (earlier := self.starting(job)) is not None:
            return earlier
        intent = load(Intent, job.intent)
        check_spec(job, intent)
        starts = job.starts()
        number = starts[-1][0] + 1 if starts else 0
        write_json_once(job.start(number), Start(number=number, generation=lease.generation, written_at=time.time()).model_dump())
        command = [
            self.cluster.python or sys.executable, "-m", "evo_hpc.dispatch.launcher", "--job", str(job.root.absolute()),
            "--job-name", intent.name, "--start", str(number), "--generation", str(lease.generation),
        ]
        with job.launch_log.open("ab") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                     env={**os.environ, **self.cluster.environment})
        self._children.append(child)
        self._starting[job.root] = child
        return child.pid

    def starting(self, job: JobPaths) -> int | None:
        """Pid of a start of this executor's that lives, whether it can be seen yet or not: while a process turns into another by exec its
        command line is empty."""
        child = self._starting.get(job.root)
        return child.pid if child is not None and child.poll() is None else None

    def end(self, status: JobStatus, ending: Ending | None, why: str) -> bool:
        """Kill an attempt that did not end by itself: nothing more is saved. Whether there was one."""
        if status.pid is None:
            return False
        try:
            os.kill(status.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return True

    def reap(self) -> None:
        """Collect ended children, so that they do not linger as zombies."""
        self._children = [child for child in self._children if child.poll() is None]

    def stop(self, status: JobStatus) -> bool:
        """Ask a running attempt to save and end; whether it had not been asked before."""
        if status.pid is None or (status.job.root, status.pid) in self._asked:
            return False
        self._asked.add((status.job.root, status.pid))
        try:
            os.kill(status.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        return True
