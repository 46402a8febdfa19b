"""What to do next, as a pure function of the campaign's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.dispatch.local import JobStatus
from evo_hpc.jobs.spec import Blame, JobKind
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
        if not state.tasks_ready:
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
            self._work("base", "supervise", state.base_jobs, {})
        for version in state.versions.values():
            self._version(version)

    def _version(self, version: VersionState) -> None:
        if not version.trained and version.init is not None:
            params = {
                "recipe": version.node.recipe.model_dump(mode="json"), "recipe_hash": version.node.recipe_hash, "init": version.init,
            }
            self._work(version.id, "train", version.jobs, params)
        missing = [suite for suite, record in version.evaluations.items() if record is None]
        if version.policy is not None and missing:
            prompt = version.node.recipe.tool_use.system_prompt
            self._work(version.id, "evaluate", version.jobs, {"evaluations": [
                {"version": version.id, "policy": version.policy, "policy_step": version.node.policy_step, "suite": suite,
                 "system_prompt": prompt}
                for suite in missing
            ]})
        for parent in version.node.version.parents:
            both = (version.evaluations.get("dev"), self.state.versions[parent].evaluations.get("dev"))
            if all(both) and parent not in version.compared:
                self.actions.append(Compare(version.id, parent))

    def _work(self, owner: str, kind: JobKind, jobs: dict[JobKind, list[JobStatus]], params: dict[str, Any]) -> None:
        """Bring one piece of work forward: its outputs are not there yet."""
        attempts = jobs.get(kind, [])
        if not attempts:
            self.actions.append(Submit(owner, kind, 0, params))
            return
        last = attempts[-1]
        limits = self.state.settings.cluster
        if last.phase in ("planned", "dead"):
            if not last.job.intent.exists():  # killed between the spec and the intent
                self.actions.append(Submit(owner, kind, last.job.attempt, params))
            elif last.starts < limits.max_starts:
                self.actions.append(Start(last.job))
            else:
                self.actions.append(GiveUp(last, "infrastructure", f"died {last.starts} times without a result; see the logs below {last.job.root}"))
        elif last.phase == "recorded":
            self._after_record(owner, kind, attempts, params)

    def _end(self, status: JobStatus) -> None:
        assert status.result is not None
        if status.result.outcome == "done":
            self.actions.append(Commit(status))
        else:
            self.actions.append(GiveUp(status, status.result.blame or "infrastructure", status.result.error or "unknown"))

    def _after_record(self, owner: str, kind: JobKind, attempts: list[JobStatus], params: dict[str, Any]) -> None:
        last = attempts[-1]
        assert last.record is not None
        if last.record.state == "done":
            if kind == "evaluate" and not self._made(last, params):
                self.actions.append(Submit(owner, kind, last.job.attempt + 1, params))
            else:  # what it published was removed by hand; the job's own copy is still there
                self.actions.append(Commit(last))
            return
        ours = [a for a in attempts if a.record and a.record.state == "failed" and a.record.generation == self.generation]
        if not ours:  # it failed under an earlier controller: whoever runs again has mended the cause, or wants a new try
            self.actions.append(Submit(owner, kind, last.job.attempt + 1, params))
        elif last.record.blame == "user" or len(ours) >= self.state.settings.cluster.max_attempts:
            self.blockers.append(Blocker(f"{owner} {kind}", last.record.blame or "infrastructure", last.record.error or "unknown"))
        else:
            self.actions.append(Submit(owner, kind, last.job.attempt + 1, params))

    def _made(self, status: JobStatus, params: dict[str, Any]) -> bool:
        """Whether that evaluation job made every suite that is missing now."""
        incarnation = status.job.incarnation(status.incarnation or 0)
        return all(incarnation.evaluation(e["version"], e["suite"]).exists() for e in params["evaluations"])

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
