"""The controller's loop: read the folders, plan, act, look again; until all is done, blocked, or told to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from evo_hpc.controller.act import Event, carry_out
from evo_hpc.controller.names import check_names
from evo_hpc.controller.ownership import Interrupted, Ownership, owned
from evo_hpc.controller.actions import Blocker, Plan
from evo_hpc.controller.plan import make_plan
from evo_hpc.controller.preflight import check_machine
from evo_hpc.controller.state import CampaignState, read_state
from evo_hpc.dispatch.local import LocalExecutor
from evo_hpc.errors import Failure, UserError
from evo_hpc.paths import CampaignPaths

POLL_SECONDS = 0.25

Watcher = Callable[[CampaignState, Plan, list[Event]], None]
"""Called after each look with what was done in it; shows progress."""


@dataclass
class Controller:
    """One run of the controller."""

    paths: CampaignPaths
    watch: Watcher
    take_over: bool = False
    until: str | None = None
    """Stop when this version is decided (or evaluated, for the root); later ones are left alone."""

    def run(self) -> CampaignState:
        """Bring the campaign as far as it goes. Raises UserError or Failure when something stands in the way, Interrupted on a signal."""
        state = read_state(self.paths, hashes=True)  # refuse a damaged campaign before owning it
        check_names(state)
        if not make_plan(state, 0, self.until).done:
            check_machine(state.settings.cluster, self.paths.root)
        with owned(self.paths, take_over=self.take_over) as ownership:
            return self._loop(ownership, LocalExecutor(state.settings.cluster))

    def _loop(self, ownership: Ownership, executor: LocalExecutor) -> CampaignState:
        lease = ownership.lease
        while True:
            state = read_state(self.paths)
            executor.cluster = state.settings.cluster
            plan = make_plan(state, lease.generation, self.until)
            if ownership.stop is not None:
                return self._stop_jobs(ownership.stop, state, plan, executor)
            events = []
            for action in plan.actions:
                if ownership.stop is None and (event := carry_out(action, state, executor, lease, ownership.beat)) is not None:
                    events.append(event)
            self.watch(state, plan, events)
            if plan.done:
                return state
            if plan.blockers and not plan.running and not plan.actions:
                raise blocked(plan.blockers)
            ownership.beat()
            executor.reap()
            if not events:
                time.sleep(POLL_SECONDS)

    def _stop_jobs(self, signum: int, state: CampaignState, plan: Plan, executor: LocalExecutor) -> CampaignState:
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
        raise Interrupted(f"stopped by {signal.Signals(signum).name}; {words}. Run the same command to go on.")


def blocked(blockers: tuple[Blocker, ...]) -> UserError | Failure:
    """The error that a blocked campaign ends with: the user's when any of it is theirs to mend."""
    text = "\n".join(f"{b.what}: {b.error}" for b in blockers)
    if any(b.blame == "user" for b in blockers):
        return UserError(f"{text}\nMend it and run again: a new attempt is made.")
    return Failure(f"{text}\nThe campaign stops here; what was committed stays. Run again for a new attempt.")
