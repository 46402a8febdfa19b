"""The one file that holds the whole cluster, under a lock; settings; and what is done once it is written."""

from __future__ import annotations

import fcntl
import os
import time

import quick

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Job = dict[str, Any]

DEFAULTS = {
    "SIM_SLOTS": 4, "SIM_MIN_JOB_AGE": 300, "SIM_SACCT_LAG": 0.2, "SIM_KILL_WAIT": 1.0, "SIM_GRACE": 0.5, "SIM_PREEMPT_LAG": 0.3,
    "SIM_REQUEUE_DELAY": 0.2, "SIM_DOWN_DELAY": 0.05, "SIM_MINUTE": 60.0, "SIM_MAX_ARRAY_SIZE": 5001,
}
"""Seconds but for the slots and the size; on a real cluster: MinJobAge 300, KillWait 30, GraceTime 0 or more, a requeue about 7."""


class State:
    """The cluster for as long as the lock is held. What must follow the write (signals, starts) waits in `after`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.after: list[Callable[[], None]] = []
        self.lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        try:
            with open(f"{folder}/state.json") as file:
                self.data = quick.loads(file.read())
        except FileNotFoundError:
            self.data = {"next_id": 101, "reuse": [], "jobs": {}, "down_until": 0.0, "accounting": "ok", "settings": {}, "order": 0}
        self.now = time.time()
        self.before = quick.dumps(self.data)

    @property
    def jobs(self) -> dict[str, Job]:
        """By a key of their own: ids may be used twice."""
        jobs: dict[str, Job] = self.data["jobs"]
        return jobs

    def setting(self, name: str) -> float:
        """Of the environment, else of the simulator, else the default."""
        return float(os.environ.get(name) or self.data["settings"].get(name, DEFAULTS[name]))

    @property
    def down(self) -> bool:
        """Whether slurmctld does not answer."""
        return bool(self.data["down_until"] > self.now)

    def commit(self) -> None:
        """Write, then do what waited for that; a process killed in between leaves a cluster that can be gone on with."""
        text = quick.dumps(self.data)
        if text != self.before:
            temporary = f"{self.folder}/state.{os.getpid()}"
            with open(temporary, "w") as file:
                file.write(text)
            os.replace(temporary, f"{self.folder}/state.json")
            self.before = text
            self._note_due()
        after, self.after = self.after, []
        for action in after:
            action()

    def _note_due(self) -> None:
        """Leave the time at which something is next to happen by itself as the age of a file, for the step daemons to look at."""
        times = [job[name] for job in self.jobs.values() if not job["lost"] and job["state"] in ("PENDING", "RUNNING", "COMPLETING")
                 for name in ("preempt_at", "limit_at", "warn_at", "kill_at", "eligible_at", "visible_at") if job[name] is not None]
        due = max(min((t for t in times if t > self.now), default=self.now + 1e6), self.data["down_until"])
        path = f"{self.folder}/due"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        os.utime(path, (due, due))

    def __enter__(self) -> State:
        return self

    def __exit__(self, *failure: object) -> None:
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        os.close(self.lock)


def new_id(state: State) -> int:
    """The next job id, or one that was used before when that was asked for."""
    if state.data["reuse"]:
        return int(state.data["reuse"].pop(0))
    state.data["next_id"] += 1
    return int(state.data["next_id"]) - 1
