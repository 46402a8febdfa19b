"""The controller's loop: read the folders, plan, act, look again; until all is done, blocked, or told to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from evo_hpc.config.control import Control
from evo_hpc.controller.act import Event, carry_out, short_name
from evo_hpc.controller.actions import Action, Plan
from evo_hpc.controller.blockers import blocked, refuse_what_runs_elsewhere
from evo_hpc.controller.books import Books
from evo_hpc.controller.budget import to_stop
from evo_hpc.controller.cache import StateCache
from evo_hpc.controller.control import apply, wish_of
from evo_hpc.controller.hand_over import HandOver, Standby, cancel_successors, hand_over, submit_successor
from evo_hpc.controller.launch import controller_name
from evo_hpc.controller.names import check_names
from evo_hpc.controller.ownership import Interrupted, Ownership, owned
from evo_hpc.controller.plan import make_plan
from evo_hpc.controller.preflight import check_machine, check_model
from evo_hpc.controller.state import CampaignState, read_state
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm.commands import Commands, SlurmError
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.lease import LeaseHeld, slurm_id

POLL_SECONDS = 0.25
_SLURM_POLL_SECONDS = 2.0
"""The longest wait between two looks at the folders of jobs that run elsewhere; Slurm is asked more seldom, as the profile says."""
_LOOK_AGAIN_SECONDS = 2.0
_PREDECESSOR_SECONDS = 90.0
"""How long a controller that Slurm has started waits for its predecessor to be gone."""
_MEND_SECONDS = 600.0
"""How long a running controller waits for a person to finish an edit that cannot be read."""
_TO_BE_ENDED_SECONDS = 180.0
"""How long a controller that Slurm is to run again waits to be ended."""

Watcher = Callable[[CampaignState, Plan, list[Event]], None]
"""Called after each look with what was done in it; shows progress."""


class HandedOver(Interrupted):
    """Slurm will run the controller again; its jobs go on meanwhile."""

    exit_code = 0


class NotEnded(Interrupted):
    """Slurm took the wish to be run again, and did nothing about it."""

    exit_code = 75


@dataclass
class Controller:
    """One run of the controller."""

    paths: CampaignPaths
    watch: Watcher
    take_over: bool = False
    until: str | None = None
    """Stop when this version is decided (or evaluated, for the root); later ones are left alone."""
    _told: str | None = field(default=None, init=False)
    """What was last said to be wrong."""
    _seen: CampaignState | None = field(default=None, init=False)
    """The last state that could be read."""

    def run(self) -> CampaignState:
        """Bring the campaign as far as it goes. Raises UserError or Failure when something stands in the way, Interrupted on a signal."""
        state = read_state(self.paths, hashes=True)  # refuse a damaged campaign before owning it
        check_names(state)
        if not make_plan(state, 0, self.until).done:
            check_machine(state.settings.cluster, self.paths.root)
            if state.base_policy is not None:
                check_model(self.paths.root / state.base_policy)
        own = slurm_id(os.environ)
        dispatch = Dispatch(state.settings.cluster)
        with self._own(own is not None, _warned_seconds(state)) as ownership:
            if own is None:
                return self._loop(ownership, dispatch)
            _cancel_successors(self.paths, state, own)
            standby = self._standby(state, own, ownership)
            standby.start()
            try:
                found = self._loop(ownership, dispatch)
            except BaseException:  # stopped, blocked, displaced: nobody is to go on
                if standby.end() is not None:
                    _cancel_successors(self.paths, state, own)
                raise
            submitted = standby.end()
        if ownership.warned and ownership.stop is None:
            self._hand_over(found, own, submitted)  # once the campaign is let go: who comes next must find it free
        return found

    def _standby(self, state: CampaignState, own: str, ownership: Ownership) -> Standby:
        slurm, name = state.settings.cluster.slurm, controller_name(self.paths, state.settings.campaign.name)
        third = _warned_seconds(state) / 3
        return Standby(
            lambda: ownership.warned and ownership.stop is None,
            lambda: submit_successor(self.paths, slurm, Commands.of(slurm), name=name, own_id=own, seconds=third), third,
        )

    @contextmanager
    def _own(self, waits: bool, warned_seconds: float) -> Iterator[Ownership]:
        """Own the campaign. One that Slurm started waits for an owner that is just ending: Slurm starts a successor while that
        is still completing. Raises LeaseHeld."""
        deadline = time.monotonic() + (_PREDECESSOR_SECONDS if waits else 0.0)
        while True:
            try:
                with owned(self.paths, take_over=self.take_over, warned_seconds=warned_seconds) as ownership:
                    yield ownership
                return
            except LeaseHeld:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_AGAIN_SECONDS)

    def _look(self, dispatch: Dispatch, cache: StateCache, ownership: Ownership) -> CampaignState:
        """The state. A controller that is a job of its own waits for what a person is just editing, half saved as it may be, while
        its jobs go on; one that somebody watches ends with the message. Raises UserError, also when it is not mended in time."""
        deadline = time.monotonic() + _MEND_SECONDS
        while True:
            try:
                return read_state(self.paths, dispatch=dispatch, cache=cache)
            except UserError as error:
                watched = slurm_id(os.environ) is None
                if watched or self._seen is None or ownership.stop is not None or time.monotonic() >= deadline:
                    raise
                if ownership.warned:  # who comes next goes on waiting
                    return self._seen
                words = f"{error}\nNothing is done until that is mended; jobs go on. Waiting {_MEND_SECONDS / 60:.0f} minutes for it."
                self.watch(self._seen, Plan((), (), (), (), False), self._say(words))
                ownership.beat()
                time.sleep(_LOOK_AGAIN_SECONDS)

    def _loop(self, ownership: Ownership, dispatch: Dispatch) -> CampaignState:
        lease, books, cache = ownership.lease, Books(), StateCache()
        while True:
            state = self._seen = self._look(dispatch, cache, ownership)
            refuse_what_runs_elsewhere(state.unrecorded)
            control, problem = wish_of(state)
            over_budget = books.keep(state, lease)
            plan = make_plan(state, lease.generation, self.until, control, over_budget, lease.owner.since)
            steered = apply(control, plan)
            if ownership.stop is not None or ownership.warned:
                return self._leave(ownership, state, plan, dispatch)
            events = self._say(problem)
            for status in (*steered.stops, *to_stop(over_budget, plan.running)):
                events += self._stop(status, dispatch)
            for action in steered.actions:
                if ownership.stop is None and not ownership.warned:
                    events += self._carry_out(action, state, dispatch, ownership)
            self.watch(state, plan, events)
            if steered.ends:
                books.close(state, lease)
                lease.check()  # one that was displaced meanwhile has not done this
                return state
            if plan.blockers and not plan.running and not plan.waiting and not steered.actions and not steered.waits:
                raise blocked(plan.blockers)
            ownership.beat()
            dispatch.reap()
            events += self._cancel_strays(state, dispatch)
            if not events:
                time.sleep(_pause(state, control))

    def _carry_out(self, action: Action, state: CampaignState, dispatch: Dispatch, ownership: Ownership) -> list[Event]:
        """What came of one action; that Slurm is away for a moment ends nothing: the plan of the next look has it again."""
        try:
            event = carry_out(action, state, dispatch, ownership.lease, ownership.beat)
        except SlurmError as error:
            return self._say(str(error))
        return [] if event is None else [event]

    def _stop(self, status: JobStatus, dispatch: Dispatch) -> list[Event]:
        try:
            asked = dispatch.stop(status)
        except SlurmError as error:
            return self._say(str(error))
        return [{"event": "Stop", "version": status.job.owner.name, "job": short_name(status.job), "why": asked}] if asked else []

    def _cancel_strays(self, state: CampaignState, dispatch: Dispatch) -> list[Event]:
        campaign = state.settings.campaign.name
        own = controller_name(self.paths, campaign)
        try:
            strays = dispatch.cancel_strays(f"{own.removesuffix('controller')}v", state.unrecorded)
            strays += dispatch.cancel_strays(f"{own.removesuffix('controller')}base-", state.unrecorded)
        except SlurmError as error:
            return self._say(str(error))
        return [{"event": "Trouble", "error": f"Slurm job {each} was left over in the queue: cancelled"} for each in strays]

    def _say(self, problem: str | None) -> list[Event]:
        """Tell of a trouble that may pass, once."""
        if problem is None or problem == self._told:
            return []
        self._told = problem
        return [{"event": "Trouble", "error": problem}]

    def _leave(self, ownership: Ownership, state: CampaignState, plan: Plan, dispatch: Dispatch) -> CampaignState:
        """Let go of the campaign: jobs of this machine are stopped, those of Slurm go on. Raises Interrupted on a signal."""
        here = [s for s in plan.running if s.intent is None or s.intent.executor == "local"]
        there = len(plan.running) - len(here)
        stopped = {status.job.root for status in here}
        deadline = time.time() + state.settings.cluster.grace_seconds + 10
        while here and time.time() < deadline:
            for status in here:
                dispatch.stop(status)
            time.sleep(POLL_SECONDS)
            state = read_state(self.paths, dispatch=dispatch)
            plan = make_plan(state, -1)
            here = [s for s in plan.running if s.job.root in stopped]
            self.watch(state, plan, [])
        if ownership.stop is None:
            return state
        unsaved = [f"{s.job.root}: {s.result.error}" for s in state.all_jobs() if s.job.root in stopped and s.result and s.result.error]
        left = [f"{s.job.root} still runs (process {s.pid})" for s in here]
        on = [f"{there} {'job goes' if there == 1 else 'jobs go'} on in Slurm (`evo-hpc stop {self.paths.root}` would end them)"] if there else []
        words = "; ".join([*unsaved, *left, *on]) or "the jobs have saved"
        raise Interrupted(f"stopped by {signal.Signals(ownership.stop).name}; {words}. Run the same command to go on.")

    def _hand_over(self, state: CampaignState, own: str, submitted: HandOver | None) -> None:
        """Have Slurm run the controller again, where that was not seen to already. Raises HandedOver, or Failure when Slurm will not."""
        slurm = state.settings.cluster.slurm
        name = controller_name(self.paths, state.settings.campaign.name)
        seconds = max(5.0, _warned_seconds(state) / 2)
        done = submitted or hand_over(self.paths, slurm, Commands.of(slurm), name=name, own_id=own, seconds=seconds)
        if done.how == "requeued":
            time.sleep(_TO_BE_ENDED_SECONDS)  # an exit would be the job's end: Slurm ends this process
            raise NotEnded(f"{self.paths.root}: Slurm said that job {own} is requeued, but did not end it; launch the controller again")
        raise HandedOver(f"{self.paths.root}: this job is about to reach its limit; Slurm job {done.job_id} goes on")


def _pause(state: CampaignState, control: Control) -> float:
    """Seconds until the next look."""
    cluster = state.settings.cluster
    return POLL_SECONDS if cluster.executor == "local" else min(cluster.slurm.poll_seconds, _SLURM_POLL_SECONDS)


def _warned_seconds(state: CampaignState) -> float:
    """How long before its end the controller's job is warned."""
    warned = state.settings.cluster.slurm.of("controller").warning_seconds
    return 120.0 if warned is None else float(warned)


def _cancel_successors(paths: CampaignPaths, state: CampaignState, own: str) -> None:
    """Never two controllers: one that was requeued needs no successor any more."""
    try:
        cancel_successors(Commands.of(state.settings.cluster.slurm), name=controller_name(paths, state.settings.campaign.name), own_id=own)
    except SlurmError:
        pass  # should it start, it finds the campaign owned
