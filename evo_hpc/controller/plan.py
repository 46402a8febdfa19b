"""What to do next, as a pure function of the campaign's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.dispatch.local import JobStatus
from evo_hpc.jobs.spec import Blame, JobKind
from evo_hpc.lineage.identity import digest
from evo_hpc.paths import JobPaths, version_id

ROOT, FIRST = version_id(0), version_id(1)


@dataclass(frozen=True)
class MakeTasks:
    """Write the splits."""


@dataclass(frozen=True)
class CreateVersion:
    """Make a version's folder from the campaign's own recipe."""

    id: str
    parent: str | None
    steps: int


@dataclass(frozen=True)
class Submit:
    """Commit the intent of a new attempt."""

    owner: str
    kind: JobKind
    attempt: int
    params: dict[str, Any]
    work: str
    """Identity of what the attempt is for."""


@dataclass(frozen=True)
class Start:
    """Start an attempt (again)."""

    job: JobPaths


@dataclass(frozen=True)
class Commit:
    """Publish what a finished attempt made and write its record."""

    status: JobStatus


@dataclass(frozen=True)
class GiveUp:
    """Write down that an attempt failed."""

    status: JobStatus
    blame: Blame
    error: str


@dataclass(frozen=True)
class Compare:
    """Look at dev: a version against a parent."""

    version: str
    against: str


Action = MakeTasks | CreateVersion | Submit | Start | Commit | GiveUp | Compare


@dataclass(frozen=True)
class Blocker:
    """Work that cannot go on."""

    what: str
    blame: Blame
    error: str


@dataclass(frozen=True)
class Plan:
    """What to do now, what is awaited, and what stands in the way."""

    actions: tuple[Action, ...]
    running: tuple[JobStatus, ...]
    blockers: tuple[Blocker, ...]
    done: bool


def make_plan(state: CampaignState, generation: int) -> Plan:
    """The next actions. Called again after they are done; the same state gives the same plan."""
    planner = _Planner(state, generation)
    planner.plan()
    running = tuple(s for s in state.all_jobs() if s.phase == "running")
    actions = planner.limited(len(running))
    done = not planner.actions and not running and not planner.blockers
    return Plan(actions, running, tuple(planner.blockers), done)


class _Planner:
    def __init__(self, state: CampaignState, generation: int) -> None:
        self.state, self.generation = state, generation
        self.actions: list[Action] = []
        self.blockers: list[Blocker] = []

    def plan(self) -> None:
        state = self.state
        if state.tasks is None:
            self.actions.append(MakeTasks())
            return
        if ROOT not in state.versions:
            self.actions.append(CreateVersion(ROOT, None, 0))
            return
        if FIRST not in state.versions:
            self.actions.append(CreateVersion(FIRST, ROOT, state.settings.recipe.steps))
            return
        for status in state.all_jobs():
            if status.phase == "finished":  # also one whose outputs are there: a kill can fall between them and the record
                self._end(status)
        if state.base_policy is None:
            campaign = state.settings.campaign
            work = digest([campaign.base_model.model_dump(mode="json"), campaign.domain.model_dump(mode="json")])
            self._work("base", "supervise", state.base_jobs, {}, work)
        for version in state.versions.values():
            self._version(version)

    def _version(self, version: VersionState) -> None:
        if not version.trained and version.init is not None and version.run is not None:
            params = {"recipe": version.node.recipe.model_dump(mode="json"), "run": version.run, "init": version.init}
            self._work(version.id, "train", version.jobs, params, version.run)
        missing = [suite for suite, record in version.evaluations.items() if record is None]
        if version.policy is not None and missing:
            prompt = version.node.recipe.tool_use.system_prompt
            params = {"evaluations": [
                {"version": version.id, "policy": version.policy, "policy_step": version.node.policy_step, "suite": suite,
                 "system_prompt": prompt}
                for suite in missing
            ]}
            self._work(version.id, "evaluate", version.jobs, params, self._evaluation_work(version, params))
        for name in version.node.version.parents:
            parent = self.state.versions[name]
            if parent.evaluations["dev"] and version.evaluations["dev"] and not version.compared_with(parent):
                self.actions.append(Compare(version.id, name))

    def _evaluation_work(self, version: VersionState, params: dict[str, Any]) -> str:
        campaign, tasks = self.state.settings.campaign, self.state.tasks
        assert tasks is not None
        how = campaign.evaluation.model_dump(mode="json", exclude={"suites"})
        sets = {e["suite"]: tasks.splits[e["suite"]].task_set for e in params["evaluations"]}
        return digest([params, how, campaign.seed, version.policy_identity, sets])

    def _work(self, owner: str, kind: JobKind, jobs: dict[JobKind, list[JobStatus]], params: dict[str, Any], work: str) -> None:
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

    def _end(self, status: JobStatus) -> None:
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
