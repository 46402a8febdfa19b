"""What to do next, as a pure function of the campaign's state."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from evo_hpc.agent.proposal import Round
from evo_hpc.agent.propose import propose
from evo_hpc.config.control import Control
from evo_hpc.controller.actions import (
    Action, Analyse, Blocker, Commit, Compare, CreateVersion, Decide, EndEarly, GiveUp, Kill, MakeHarness, MakeTasks, Plan, Propose, Publish, Start,
    Stop, Submit, Watch,
)
from evo_hpc.controller.budget import CAMPAIGN, Overrun, may_start, problems
from evo_hpc.controller.control import cancellation, is_cancelled
from evo_hpc.controller.judge import evidence_of
from evo_hpc.controller.pieces import Piece, divided, is_done
from evo_hpc.controller.readings import next_look
from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.controller.watching import Running
from evo_hpc.dispatch.retries import backoff, exhausted
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.spec import JobKind
from evo_hpc.lineage.identity import digest
from evo_hpc.lineage.version import Prediction, Version
from evo_hpc.paths import version_id

ROOT, FIRST = version_id(0), version_id(1)
GO_ON = Control()
SILENCE_SECONDS = 90.0
"""More than the launcher's own watchdog waits; also for a network filesystem that shows a heartbeat late."""
FAILURES_IN_A_ROW = 3
"""Attempts in a row, of whatever work, that failed by the machine's fault, after which the campaign pauses: the next would, too."""


def make_plan(
    state: CampaignState, generation: int, until: str | None = None, control: Control = GO_ON, over_budget: Sequence[Overrun] = (),
    since: int | None = None,
) -> Plan:
    """The next actions, `until` a version is decided, under a person's wish and with what the budget leaves. `since`: the generation
    from which failures count, where that is not this one: a controller that Slurm ran again is no new try.

    Called again after they are done; the same state gives the same plan.
    """
    planner = Planner(state, generation, until, control, over_budget, since)
    planner.plan()
    running = tuple(s for s in state.unrecorded if s.live)
    actions = planner.limited(len(running))
    awaited = [s for s in (*running, *planner.waiting) if s.job.owner.name not in state.versions or planner.wanted(s.job.owner.name)]
    if not planner.actions and not awaited and not planner.blockers:
        planner.block_what_stands_still()
    done = not planner.actions and not awaited and not planner.blockers
    return Plan(actions, running, tuple(planner.waiting), tuple(planner.blockers), done)


class Planner:
    """Collects actions and blockers; `work` and `end` bring any one piece of work forward."""

    def __init__(
        self, state: CampaignState, generation: int, until: str | None, control: Control = GO_ON, over_budget: Sequence[Overrun] = (),
        since: int | None = None,
    ) -> None:
        self.state, self.generation, self.until, self.control, self.over_budget = state, generation, until, control, over_budget
        self.since = generation if since is None else since
        """The generation since which a person has not run the campaign anew: failures since then count."""
        self.actions: list[Action] = []
        self.blockers: list[Blocker] = []
        self.waiting: list[JobStatus] = []
        self._wanted = _needed(state, until)

    def plan(self) -> None:
        state = self.state
        if state.tasks is None:
            self.actions.append(MakeTasks())
            return
        if state.harness is None or state.harness.digest != state.found.digest:
            self.actions.append(MakeHarness(1 + (state.harness.number if state.harness else 0)))
            return
        if missing := self._missing_version():
            self.actions.append(missing)
            return
        wanted = [version for version in state.open if self.wanted(version.id)]  # nothing is left to do for the others
        cancelled = {version.id: version for version in state.open if is_cancelled(version, self.control)}
        held = {s.job.root for v in state.open if v.jobs.get("train") and self._held(v) for s in v.jobs["train"]}
        held |= {s.job.root for v in cancelled.values() for attempts in v.jobs.values() for s in attempts}
        # Parts are recorded when the whole is published.
        held |= {s.job.root for v in state.open if not v.evaluated for s in v.jobs.get("evaluate", []) if s.job.shard is not None and is_done(s)}
        for status in state.unrecorded:
            # Also one whose outputs are there: a kill can fall between them and the record.
            if status.phase == "finished" and status.job.root not in held:
                self.end(status)
        if state.base_policy is None:
            campaign = state.settings.campaign
            work = digest([campaign.base_model.model_dump(mode="json"), campaign.domain.model_dump(mode="json")])
            self.work("base", "supervise", state.base_jobs.get("supervise", []), {}, work)
        for version in cancelled.values():
            self.actions += cancellation(version, self.control)
        for version in wanted:
            if version.id not in cancelled:
                self._version(version)
        undecided = [v for v in wanted if v.node.version.parents and v.decision is None and v.id not in cancelled]
        if undecided:
            self._decide(undecided[0])
        elif not self.actions and (self.until is None or all(map(self.wanted, state.versions))):
            self._propose()

    def wanted(self, version: str) -> bool:
        """Whether this run is to bring a version forward."""
        return self.until is None or _number(version) <= _number(self.until) or version in self._wanted

    def _missing_version(self) -> CreateVersion | None:
        """The first version that the campaign or a round calls for and that has no folder yet."""
        state, recipe = self.state, self.state.settings.recipe
        if ROOT not in state.versions:
            root = Version(id=ROOT, author="campaign", hypothesis="The base policy as it is, without RL.")
            return CreateVersion(root, recipe.model_copy(update={"steps": 0}))
        if FIRST not in state.versions and self.wanted(FIRST):
            return CreateVersion(_first_version(), recipe)
        for each in state.rounds:
            for proposal in each.proposals:
                if proposal.version.id not in state.versions and self.wanted(proposal.version.id):
                    return CreateVersion(proposal.version, proposal.recipe)
        return None

    def _held(self, version: VersionState) -> bool:
        """Whether a training run must wait for the watch, or was ended by it: its job's end is not the run's end then. So it is
        while nobody can tell which run the job was for, because its init or the tasks are gone."""
        if not version.trained and version.run is None:
            return True
        return version.stopped_early is not None or (version.running is not None and self._next_watch(version, version.running) is not None)

    def _next_watch(self, version: VersionState, running: Running) -> int | None:
        looked = version.watches[-1].step if version.watches else 0
        return running.next_look(looked, version.node.recipe.steps)

    def _training(self, version: VersionState) -> None:
        """Bring a training run forward: work, looks of the watch, or its early end."""
        attempts = version.jobs.get("train", [])
        if version.run is None:
            source = self.state.versions.get(version.node.init.partition("@")[0])
            if source is not None and source.stopped_early is not None:
                self.blockers.append(Blocker(f"{version.id} train", "user", f"{version.node.paths.version_yaml}: init {version.node.init}: that run was "
                                             "stopped early and has no policy; name another init"))
            elif source is not None and source.cancelled:
                self.blockers.append(Blocker(f"{version.id} train", "user", f"{version.node.paths.version_yaml}: init {version.node.init}: that version was "
                                             "cancelled and has no policy; name another init, or cancel this one too"))
        elif version.stopped_early is not None:
            last = attempts[-1] if attempts else None
            if last is None:
                self.blockers.append(Blocker(f"{version.id} train", "user", f"{version.node.paths.root}: its watch/ says that the run was stopped "
                                             "early, but its jobs/ are gone; remove watch/ too, to train it again"))
            else:
                self.actions.append(Stop(version.id, last) if last.live else EndEarly(version.id, last))
        elif version.running is not None and (step := self._next_watch(version, version.running)) is not None:
            self.actions.append(Watch(version.id, step))
        else:
            assert version.init is not None
            self.work(version.id, "train", attempts, version.training, version.run)

    def _version(self, version: VersionState) -> None:
        if not version.trained:
            self._training(version)
        elif version.stopped_early is not None and (last := version.jobs.get("train", [])[-1:]) and last[0].record is None:
            # Killed between the publishing and the record.
            self.actions.append(Stop(version.id, last[0]) if last[0].live else EndEarly(version.id, last[0]))
        missing = [suite for suite, record in version.evaluations.items() if record is None]
        if version.policy is not None and missing:
            self._evaluate(version, missing)
        if version.over and version.analysis is None:
            self._analyse(version)

    def _analyse(self, version: VersionState) -> None:
        """Beside the controller, or in a job where the profile says what that is to ask for."""
        cluster, harness = self.state.settings.cluster, self.state.harness
        assert harness is not None
        if cluster.executor != "slurm" or cluster.slurm.analyse is None:
            self.actions.append(Analyse(version.id))
            return
        params = {"harness": harness.id, "digest": harness.digest}
        scored = {suite: record and record.id for suite, record in version.evaluations.items()}
        self.work(version.id, "analyse", version.jobs.get("analyse", []), params, digest([params, version.run, scored]))

    def _evaluate(self, version: VersionState, missing: list[str]) -> None:
        """Score a version in one job, or in parts that are put together, and recorded, once all are there."""
        pieces = self._pieces(version, list(version.evaluations))
        if not any(piece.last is not None and piece.last.record is None and piece.is_of_last for piece in pieces):
            pieces = self._pieces(version, missing)  # else: what a kill cut off while it was being published
        ready = [piece.last for piece in pieces if piece.last is not None and piece.ready]
        if pieces[0].shard is not None and len(ready) == len(pieces) and any(last.record is None for last in ready):
            self.actions.append(Publish(version.id, tuple(ready)))
            return
        for piece in pieces:
            if piece.shard is None or not piece.ready or len(ready) == len(pieces):
                self.work(version.id, "evaluate", piece.attempts, piece.params, piece.work, piece.shard)

    def _pieces(self, version: VersionState, suites: list[str]) -> list[Piece]:
        """The parts of an evaluation on these suites."""
        attempts, tools = version.jobs.get("evaluate", []), version.node.recipe.tool_use
        params: dict[str, Any] = {"evaluations": [
            {"version": version.id, "policy": version.policy, "policy_step": version.node.policy_step, "suite": suite, **tools.of_evaluation()}
            for suite in suites
        ]}
        shards = self._shards(params)
        found = []
        for shard in [None] if shards == 1 else range(shards):
            of_it = params if shard is None else {**params, "shard": shard, "shards": shards}
            found.append(Piece(shard, of_it, self._evaluation_work(version, of_it), [a for a in attempts if a.job.shard == shard]))
        return found

    def _shards(self, params: dict[str, Any]) -> int:
        """Parts that an evaluation is divided into: as many as the profile says, but none without a task."""
        cluster, tasks = self.state.settings.cluster, self.state.tasks
        assert tasks is not None
        fewest = min(tasks.splits[each["suite"]].tasks for each in params["evaluations"])
        return min(cluster.slurm.shards, fewest) if cluster.executor == "slurm" else 1

    def _decide(self, version: VersionState) -> None:
        """Take the next look at dev for the first undecided version, or decide: strictly in the order of ids, so that the looks
        and their alpha do not depend on which job was faster."""
        known = [version, *(self.state.versions[parent] for parent in version.node.version.parents)]
        if not all(each.known for each in known):
            return  # a prediction may speak of what was found in a parent
        against = next_look(self.state, version)
        if against is None:
            self.actions.append(Decide(version.id))
        elif self.state.versions[against].evaluations["dev"] is not None:
            self.actions.append(Compare(version.id, against))
        elif self.state.versions[against].stopped_early is not None:
            self.blockers.append(Blocker(version.id, "user", f"{version.node.paths.version_yaml}: {against}, which it is to be compared with, was stopped "
                                         "early and has no score"))

    def _propose(self) -> None:
        """Ask the agent once for each state of knowledge; an empty round is its last word on it."""
        state, search = self.state, self.state.settings.campaign.search
        left = search.proposals - sum(len(each.proposals) for each in state.rounds)
        if search.agent == "none" or left <= 0 or not all(v.known for v in state.open):
            return
        assert state.harness is not None
        decided = list(state.versions)
        made = all(proposal.version.id in state.versions for each in state.rounds for proposal in each.proposals)
        if not made or not self.wanted(version_id(1 + max(map(_number, decided)))):
            return  # a later run asks
        last = state.rounds[-1] if state.rounds else None
        if last is not None and (last.decided, last.harness) == (decided, state.harness.id):
            return
        proposals, considered = propose(evidence_of(state), state.rules(), width=search.width, left=left)
        self.actions.append(Propose(Round(
            number=len(state.rounds) + 1, harness=state.harness.id, incumbent=state.incumbent_before(None), decided=decided,
            proposals=proposals, considered=considered, generation=self.generation,
        )))

    def _evaluation_work(self, version: VersionState, params: dict[str, Any]) -> str:
        campaign, tasks = self.state.settings.campaign, self.state.tasks
        assert tasks is not None
        how = campaign.evaluation.model_dump(mode="json", exclude={"suites"})
        sets = {e["suite"]: tasks.splits[e["suite"]].task_set for e in params["evaluations"]}
        return digest([params, how, campaign.seed, version.policy_identity, sets])

    def work(self, owner: str, kind: JobKind, attempts: list[JobStatus], params: dict[str, Any], work: str, shard: int | None = None) -> None:
        """Bring one piece of work forward, at which there were `attempts`: its outputs are not there yet."""
        if not attempts:
            if may_start(self.over_budget, owner):
                self.actions.append(Submit(owner, kind, 0, params, work, shard))
            else:
                self._blocked_by_budget(owner)
            return
        last, limits = attempts[-1], self.state.settings.cluster
        if last.intent is None:  # killed between the spec and the intent
            self.actions.append(Submit(owner, kind, last.job.attempt, params, work, shard))
        elif last.phase == "recorded":
            self._after_record(owner, kind, attempts, params, work, shard)
        elif last.intent.work != work and (last.phase in ("planned", "dead") or (last.phase == "finished" and shard is not None)):
            self.actions.append(GiveUp(last, "user", "what it was for has changed since (recipe, init, seed, tasks or evaluation)"))
        elif last.intent.work != work and last.live:
            how = f"kill {last.pid}" if last.pid is not None else f"scancel {last.slurm_id}" if last.slurm_id is not None else last.said
            self.blockers.append(Blocker(f"{owner} {kind}", "user", f"{last.job.root}: runs with an earlier recipe, init, seed, tasks or evaluation "
                                         f"than the files say now. Restore them, or stop it ({how}) and run again"))
        elif last.phase == "running" and last.silent > 60 * limits.stall_minutes + SILENCE_SECONDS:
            self.actions.append(Kill(last, f"no heartbeat for {last.silent / 60:.0f} minutes: its node or its launcher hangs"))
        elif last.phase in ("planned", "dead"):
            if (over := exhausted(last, limits)) is not None:
                self.actions.append(GiveUp(last, *over))
            elif not may_start(self.over_budget, owner):
                self._blocked_by_budget(owner)
            elif last.not_before > self.state.now:
                self.waiting.append(last)
            else:
                self.actions.append(Start((last,)))

    def _blocked_by_budget(self, owner: str) -> None:
        """Say once which caps stand in the way."""
        caps = [each for each in self.over_budget if each.scope in (CAMPAIGN, owner)]
        for blocker in (Blocker(each.scope, "user", text) for each, text in zip(caps, problems(self.state.paths, caps), strict=True)):
            if blocker not in self.blockers:
                self.blockers.append(blocker)

    def end(self, status: JobStatus) -> None:
        """A job has its result: commit it, or give the attempt up."""
        assert status.result is not None
        if status.result.outcome == "done":
            self.actions.append(Commit(status))
        else:
            self.actions.append(GiveUp(status, status.result.blame or "infrastructure", status.result.error or "unknown"))

    def _after_record(self, owner: str, kind: JobKind, attempts: list[JobStatus], params: dict[str, Any], work: str, shard: int | None) -> None:
        last = attempts[-1]
        assert last.record is not None and last.intent is not None
        if last.record.state != "done" and not may_start(self.over_budget, owner):
            self._blocked_by_budget(owner)
            return
        again = Submit(owner, kind, last.job.attempt + 1, params, work, shard)
        if last.record.state == "done":
            # What it published was removed by hand. Days of training are published again from the job's own copy; whoever
            # removes an evaluation or an analysis wants it made again, under today's evaluator and harness.
            self.actions.append(Commit(last) if kind not in ("evaluate", "analyse") and last.intent.work == work else again)
            return
        ours = [a for a in attempts if a.record and a.record.state == "failed" and a.record.started_by >= self.since]
        if not ours or last.intent.work != work:  # it failed under an earlier controller, or as something else: a new try
            self.actions.append(again)
        elif last.record.blame == "user" or _in_a_row(ours) >= self.state.settings.cluster.max_attempts:
            self.blockers.append(Blocker(f"{owner} {kind}", last.record.blame or "infrastructure", last.record.error or "unknown"))
        elif self.state.now < last.record.written_at + self._back_off(_in_a_row(ours)):
            self.waiting.append(last)
        else:
            self.actions.append(again)

    def _back_off(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row: what a cluster suffers from often lasts a while."""
        cluster = self.state.settings.cluster
        return backoff(cluster.slurm, failures) if cluster.executor == "slurm" else 0.0

    def block_what_stands_still(self) -> None:
        """Nothing is to be done, yet a version that this run is to bring forward is not decided: say so rather than call it done."""
        for version in self.state.open:
            if self.wanted(version.id) and version.decision is None and version.node.version.parents:
                self.blockers.append(Blocker(version.id, "user", f"{version.node.paths.root}: nothing brings it forward; look at its parents and its init "
                                             f"in {version.node.paths.version_yaml.name}, or remove the folder"))

    def _failing(self) -> Blocker | None:
        """Why nothing more is started: the last attempts that ended, whosever they were, all failed by the machine's fault."""
        by_attempt = {  # the parts of one piece of work fail together, and count as one
            (s.job.owner, s.job.kind, s.job.attempt): s.record
            for s in self.state.all_jobs() if s.record is not None and s.record.generation >= self.since
        }
        last = heapq.nlargest(FAILURES_IN_A_ROW, by_attempt.items(), key=lambda item: item[1].written_at)[::-1]
        by_the_machine = all(record.state == "failed" and record.blame == "infrastructure" for _, record in last)
        # A first attempt comes further than none before it, which says little.
        further = any(record.advanced and attempt > 0 for (_, _, attempt), record in last[1:])
        if len(last) < FAILURES_IN_A_ROW or not by_the_machine or further:
            return None
        return Blocker("campaign", "infrastructure", f"{len(last)} attempts in a row failed by the machine's fault, so nothing more is started; the last: "
                       f"{last[-1][1].error}")

    def limited(self, running: int) -> tuple[Action, ...]:
        """The actions, starts only as far as there is room; those of the parts of one piece of work together."""
        room = self.state.settings.cluster.max_parallel_jobs - running
        allowed: list[Action] = []
        failing = self._failing() if any(isinstance(action, Submit | Start) for action in self.actions) else None
        if failing is not None:
            self.blockers.append(failing)
        for action in self.actions:
            if failing is not None and isinstance(action, Submit | Start):
                continue
            if not isinstance(action, Start):
                allowed.append(action)
                continue
            if room <= 0:
                continue
            room -= 1
            last = allowed[-1] if allowed else None
            if isinstance(last, Start) and divided(last.statuses[0]) and divided(last.statuses[0]) == divided(action.statuses[0]):
                allowed[-1] = Start((*last.statuses, *action.statuses))
            else:
                allowed.append(action)
        return tuple(allowed)


def _in_a_row(failed: Sequence[JobStatus]) -> int:
    """Failures of one piece of work, the last ones, of which none but the first came a step further than those before it."""
    count = 0
    for status in reversed(failed):
        count += 1
        if status.record is not None and status.record.advanced:
            break
    return count


def _needed(state: CampaignState, until: str | None) -> set[str]:
    """What the versions up to `until` need: their parents and where they start, and so on, whatever their ids."""
    found: set[str] = set()
    waiting = [version for version in state.versions if until is not None and _number(version) <= _number(until)]
    while waiting:
        node = state.versions[waiting.pop()].node
        for each in (*node.version.parents, node.init.partition("@")[0]):
            if each in state.versions and each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _number(version: str) -> int:
    return int(version[1:])


def _first_version() -> Version:
    return Version(
        id=FIRST, parents=[ROOT], author="campaign", hypothesis="GRPO with the campaign's recipe raises the score on dev over the base policy.",
        prediction=Prediction(metric="dev/avg_at_k", direction="up", by=0.0), rollback=f"Go on from {ROOT}.",
    )
