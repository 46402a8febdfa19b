"""The controller's loop: read the folders, plan, act, look again; until all is done, blocked, or told to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from evo_hpc.controller.act import Event, carry_out
from evo_hpc.controller.plan import Blocker, Plan, make_plan
from evo_hpc.controller.preflight import check_machine
from evo_hpc.controller.state import CampaignState, read_state
from evo_hpc.dispatch.local import LocalExecutor
from evo_hpc.errors import Failure, UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import sweep_temps
from evo_hpc.store.lease import Lease, acquire

POLL_SECONDS = 0.25
_BEAT_SECONDS = 5.0

Watcher = Callable[[CampaignState, Plan, list[Event]], None]
"""Called after each look with what was done in it; shows progress."""


class Interrupted(Failure):
    """The controller was told to stop; its jobs have saved, and running again goes on."""

    exit_code = 130


@dataclass
class Controller:
    """One run of the controller."""

    paths: CampaignPaths
    watch: Watcher
    take_over: bool = False
    _stop: int | None = None
    _beaten: float = field(default=0.0)

    def run(self) -> CampaignState:
        """Bring the campaign as far as it goes. Raises UserError or Failure when something stands in the way, Interrupted on a signal."""
        state = read_state(self.paths, hashes=True)  # refuse a damaged campaign before owning it
        if not make_plan(state, 0).done:
            check_machine(state.settings.cluster, self.paths.root)
        lease = acquire(self.paths, take_over=self.take_over)
        with self._signals():
            try:
                sweep_temps(self.paths.root)
                return self._loop(lease)
            finally:
                lease.release()

    def _loop(self, lease: Lease) -> CampaignState:
        executor: LocalExecutor | None = None
        while True:
            state = read_state(self.paths)
            if executor is None:
                executor = LocalExecutor(state.settings.cluster)
            executor.cluster = state.settings.cluster
            plan = make_plan(state, lease.generation)
            if self._stop is not None:
                return self._stop_jobs(state, plan, executor)
            events = [carry_out(action, state, executor, lease) for action in plan.actions]
            self.watch(state, plan, events)
            if plan.done:
                return state
            if plan.blockers and not plan.running and not plan.actions:
                raise blocked(plan.blockers)
            self._beat(lease)
            executor.reap()
            if not plan.actions:
                time.sleep(POLL_SECONDS)

    def _beat(self, lease: Lease) -> None:
        if time.time() - self._beaten > _BEAT_SECONDS:
            lease.beat()
            self._beaten = time.time()

    def _stop_jobs(self, state: CampaignState, plan: Plan, executor: LocalExecutor) -> CampaignState:
        stopped = {status.job.root for status in plan.running}
        for status in plan.running:
            executor.stop(status)
        deadline = time.time() + state.settings.cluster.grace_seconds + 10
        while plan.running and time.time() < deadline:
            time.sleep(POLL_SECONDS)
            state = read_state(self.paths)
            plan = make_plan(state, -1)
            self.watch(state, plan, [])
        unsaved = [f"{s.job.root}: {s.result.error}" for s in state.all_jobs() if s.job.root in stopped and s.result and s.result.error]
        left = [f"{s.job.root} still runs (process {s.pid})" for s in plan.running]
        words = "; ".join([*unsaved, *left]) or "the jobs have saved"
        raise Interrupted(f"stopped by {signal.Signals(self._stop or 0).name}; {words}. Run the same command to go on.")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def remember(signum: int, frame: Any) -> None:
            self._stop = signum

        previous = {s: signal.signal(s, remember) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def blocked(blockers: tuple[Blocker, ...]) -> UserError | Failure:
    """The error that a blocked campaign ends with: the user's when any of it is theirs to mend."""
    text = "\n".join(f"{b.what}: {b.error}" for b in blockers)
    if any(b.blame == "user" for b in blockers):
        return UserError(f"{text}\nMend it and run again: a new attempt is made.")
    return Failure(f"{text}\nThe campaign stops here; what was committed stays. Run again for a new attempt.")
