"""What to do next, as a pure function of the campaign's state."""

from __future__ import annotations

from typing import Any

from evo_hpc.agent.proposal import Round
from evo_hpc.agent.propose import propose
from evo_hpc.controller.actions import (
    Action, Analyse, Blocker, Commit, Compare, CreateVersion, Decide, EndEarly, GiveUp, MakeHarness, MakeTasks, Plan, Propose, Start, Stop, Submit,
    Watch,
)
from evo_hpc.controller.judge import evidence_of
from evo_hpc.controller.readings import next_look
from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.controller.watching import Running
from evo_hpc.dispatch.local import JobStatus
from evo_hpc.jobs.spec import JobKind
from evo_hpc.lineage.identity import digest
from evo_hpc.lineage.version import Prediction, Version
from evo_hpc.paths import version_id

ROOT, FIRST = version_id(0), version_id(1)


def make_plan(state: CampaignState, generation: int, until: str | None = None) -> Plan:
    """The next actions, `until` a version is decided. Called again after they are done; the same state gives the same plan."""
    planner = Planner(state, generation, until)
    planner.plan()
    running = tuple(s for s in state.all_jobs() if s.phase == "running")
    actions = planner.limited(len(running))
    awaited = [s for s in running if s.job.owner.name not in state.versions or planner.wanted(s.job.owner.name)]
    if not planner.actions and not awaited and not planner.blockers:
        planner.block_what_stands_still()
    done = not planner.actions and not awaited and not planner.blockers
    return Plan(actions, running, tuple(planner.blockers), done)


class Planner:
    """Collects actions and blockers; `work` and `end` bring any one piece of work forward."""

    def __init__(self, state: CampaignState, generation: int, until: str | None) -> None:
        self.state, self.generation, self.until = state, generation, until
        self.actions: list[Action] = []
        self.blockers: list[Blocker] = []
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
        wanted = [version for version in state.versions.values() if self.wanted(version.id)]
        held = {s.job.root for v in state.versions.values() for s in v.jobs.get("train", []) if self._held(v)}
        for status in state.all_jobs():
            # Also one whose outputs are there: a kill can fall between them and the record.
            if status.phase == "finished" and status.job.root not in held:
                self.end(status)
        if state.base_policy is None:
            campaign = state.settings.campaign
            work = digest([campaign.base_model.model_dump(mode="json"), campaign.domain.model_dump(mode="json")])
            self.work("base", "supervise", state.base_jobs, {}, work)
        for version in wanted:
            self._version(version)
        undecided = [version for version in wanted if version.node.version.parents and version.decision is None]
        if undecided:
            self._decide(undecided[0])
        elif not self.actions and len(wanted) == len(state.versions):
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
        elif version.stopped_early is not None:
            last = attempts[-1] if attempts else None
            if last is None:
                self.blockers.append(Blocker(f"{version.id} train", "user", f"{version.node.paths.root}: its watch/ says that the run was stopped "
                                             "early, but its jobs/ are gone; remove watch/ too, to train it again"))
            else:
                self.actions.append(Stop(version.id, last) if last.phase == "running" else EndEarly(version.id, last))
        elif version.running is not None and (step := self._next_watch(version, version.running)) is not None:
            self.actions.append(Watch(version.id, step))
        else:
            assert version.init is not None
            params = {"recipe": version.node.recipe.model_dump(mode="json"), "run": version.run, "init": version.init}
            self.work(version.id, "train", version.jobs, params, version.run)

    def _version(self, version: VersionState) -> None:
        if not version.trained:
            self._training(version)
        elif version.stopped_early is not None and (last := version.jobs.get("train", [])[-1:]) and last[0].record is None:
            # Killed between the publishing and the record.
            self.actions.append(Stop(version.id, last[0]) if last[0].phase == "running" else EndEarly(version.id, last[0]))
        missing = [suite for suite, record in version.evaluations.items() if record is None]
        if version.policy is not None and missing:
            prompt = version.node.recipe.tool_use.system_prompt
            params = {"evaluations": [
                {"version": version.id, "policy": version.policy, "policy_step": version.node.policy_step, "suite": suite,
                 "system_prompt": prompt}
                for suite in missing
            ]}
            self.work(version.id, "evaluate", version.jobs, params, self._evaluation_work(version, params))
        if version.over and version.analysis is None:
            self.actions.append(Analyse(version.id))

    def _decide(self, version: VersionState) -> None:
        """Take the next look at dev for the first undecided version, or decide: strictly in the order of ids, so that the looks
        and their alpha do not depend on which job was faster."""
        known = [version, *(self.state.versions[parent] for parent in version.node.version.parents)]
        if not all(each.over and each.analysis is not None for each in known):
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
        if search.agent == "none" or left <= 0 or not all(v.over and v.analysis for v in state.versions.values()):
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

    def work(self, owner: str, kind: JobKind, jobs: dict[JobKind, list[JobStatus]], params: dict[str, Any], work: str) -> None:
        """Bring one piece of work forward: its outputs are not there yet."""
        attempts = jobs.get(kind, [])
        if not attempts:
            self.actions.append(Submit(owner, kind, 0, params, work))
            return
        last, limits = attempts[-1], self.state.settings.cluster
        if last.intent is None:  # killed between the spec and the intent
            self.actions.append(Submit(owner, kind, last.job.attempt, params, work))
        elif last.phase == "recorded":
            self._after_record(owner, kind, attempts, params, work)
        elif last.intent.work != work and last.phase in ("planned", "dead"):
            self.actions.append(GiveUp(last, "user", "what it was for has changed since (recipe, init, seed, tasks or evaluation)"))
        elif last.intent.work != work and last.phase == "running":
            self.blockers.append(Blocker(f"{owner} {kind}", "user", f"{last.job.root}: runs with an earlier recipe, init, seed, tasks or evaluation "
                                         f"than the files say now. Restore them, or stop it (kill {last.pid}) and run again"))
        elif last.phase in ("planned", "dead"):
            if last.starts < limits.max_starts:
                self.actions.append(Start(last.job))
            else:
                died = f"died {last.starts} times without a result; see the logs below {last.job.root}"
                self.actions.append(GiveUp(last, "infrastructure", died))

    def end(self, status: JobStatus) -> None:
        """A job has its result: commit it, or give the attempt up."""
        assert status.result is not None
        if status.result.outcome == "done":
            self.actions.append(Commit(status))
        else:
            self.actions.append(GiveUp(status, status.result.blame or "infrastructure", status.result.error or "unknown"))

    def _after_record(self, owner: str, kind: JobKind, attempts: list[JobStatus], params: dict[str, Any], work: str) -> None:
        last = attempts[-1]
        assert last.record is not None and last.intent is not None
        again = Submit(owner, kind, last.job.attempt + 1, params, work)
        if last.record.state == "done":
            # What it published was removed by hand. Days of training are published again from the job's own copy; whoever
            # removes an evaluation wants it made again, under today's evaluator.
            self.actions.append(Commit(last) if kind != "evaluate" and last.intent.work == work else again)
            return
        ours = [a for a in attempts if a.record and a.record.state == "failed" and a.record.started_by == self.generation]
        if not ours or last.intent.work != work:  # it failed under an earlier controller, or as something else: a new try
            self.actions.append(again)
        elif last.record.blame == "user" or len(ours) >= self.state.settings.cluster.max_attempts:
            self.blockers.append(Blocker(f"{owner} {kind}", last.record.blame or "infrastructure", last.record.error or "unknown"))
        else:
            self.actions.append(again)

    def block_what_stands_still(self) -> None:
        """Nothing is to be done, yet a version that this run is to bring forward is not decided: say so rather than call it done."""
        for version in self.state.versions.values():
            if self.wanted(version.id) and version.decision is None and version.node.version.parents:
                self.blockers.append(Blocker(version.id, "user", f"{version.node.paths.root}: nothing brings it forward; look at its parents and its init "
                                             f"in {version.node.paths.version_yaml.name}, or remove the folder"))

    def limited(self, running: int) -> tuple[Action, ...]:
        """The actions, starts only as far as there is room."""
        room = self.state.settings.cluster.max_parallel_jobs - running
        allowed: list[Action] = []
        for action in self.actions:
            if isinstance(action, Start):
                if room <= 0:
                    continue
                room -= 1
            allowed.append(action)
        return tuple(allowed)


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
