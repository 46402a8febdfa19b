"""The plan is a pure function of the state: order, limits, retries, blockers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.controller.plan import Commit, Compare, CreateVersion, GiveUp, MakeTasks, Start, Submit, make_plan
from evo_hpc.controller.state import CampaignState, Settings, VersionState
from evo_hpc.dispatch.local import JobStatus, Phase
from evo_hpc.evaluation.scores import EvaluationRecord
from evo_hpc.controller.tasks import SplitManifest, TasksManifest
from evo_hpc.jobs.spec import Intent, Record, Result
from evo_hpc.lineage.comparison import Comparison
from evo_hpc.lineage.looks import Look
from evo_hpc.lineage.tree import Node
from evo_hpc.lineage.version import Version
from evo_hpc.paths import CampaignPaths, JobPaths

SETTINGS = Settings(
    Campaign(name="c", domain={"name": "arithmetic"}, base_model={"supervised": {}}),  # type: ignore[arg-type]
    Recipe(steps=5), Cluster(max_parallel_jobs=1, max_starts=2, max_attempts=2),
)


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    return CampaignPaths(tmp_path)


def record(suite: str, version: str) -> EvaluationRecord:
    return EvaluationRecord(version, suite, "e", {}, 0, 8, ["t"], 8, 0, 0.5, "p", f"{version}-{suite}")


def version(paths: CampaignPaths, name: str, parents: list[str], *, trained: bool, evaluated: bool = False, jobs: dict | None = None,
            compared: tuple[str, ...] = ()) -> VersionState:
    steps = 5 if parents else 0
    node = Node(paths.version(name), Version(id=name, parents=parents), Recipe(steps=steps), {})
    return VersionState(
        node=node, trained=trained, policy="p" if trained else None, policy_identity="p", init="base/policy", run="run", jobs=jobs or {},
        comparisons=tuple(comparison(name, parent) for parent in compared),
        evaluations={s: record(s, name) if evaluated else None for s in ("dev", "probe")},
    )


def comparison(name: str, parent: str) -> Comparison:
    look = Look(number=1, version=name, against=parent, suite="dev", evaluator_epoch="e", evaluations=(f"{parent}-dev", f"{name}-dev"),
                total_alpha=0.05, alpha=0.03, generation=1, declared_at=0.0)
    return Comparison.model_construct(version=name, against=parent, suite="dev", look=look)


TASKS = TasksManifest(domain={}, splits={s: SplitManifest(tasks=1, task_set=s) for s in ("train", "probe", "dev", "sealed")})


def state(paths: CampaignPaths, *versions: VersionState, tasks: bool = True, base: str | None = "base/policy", base_jobs: dict | None = None) -> CampaignState:
    return CampaignState(paths, SETTINGS, TASKS if tasks else None, base, base_jobs or {}, {v.id: v for v in versions})


INTENT = Intent(name="n", spec_sha256="", owner="v0001", work="run", root="", generation=1, written_at=0)


def job(paths: CampaignPaths, phase: Phase, kind: str = "train", attempt: int = 0, **fields) -> JobStatus:  # type: ignore[no-untyped-def]
    folder: JobPaths = paths.version("v0001").job(kind, attempt)
    return JobStatus(folder, phase, **{"intent": INTENT, **fields})


def failed(paths: CampaignPaths, blame: str, generation: int, attempt: int = 0) -> JobStatus:
    final = Record(state="failed", incarnation=None, blame=blame, error="why", generation=generation, started_by=generation, starts=1, seconds=0)  # type: ignore[arg-type]
    return job(paths, "recorded", attempt=attempt, record=final)


def test_the_beginning(paths: CampaignPaths) -> None:
    assert make_plan(state(paths, tasks=False, base=None), 1).actions == (MakeTasks(),)
    assert make_plan(state(paths, base=None), 1).actions == (CreateVersion("v0000", None, 0),)
    assert make_plan(state(paths, version(paths, "v0000", [], trained=True), base=None), 1).actions == (CreateVersion("v0001", "v0000", 5),)


def test_training_and_the_evaluation_of_the_root_are_independent(paths: CampaignPaths) -> None:
    plan = make_plan(state(paths, version(paths, "v0000", [], trained=True), version(paths, "v0001", ["v0000"], trained=False)), 1)
    assert [(a.owner, a.kind) for a in plan.actions if isinstance(a, Submit)] == [("v0000", "evaluate"), ("v0001", "train")]


def test_only_so_many_jobs_start(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, jobs={"evaluate": [job(paths, "dead", "evaluate")]})
    child = version(paths, "v0001", ["v0000"], trained=False, jobs={"train": [job(paths, "dead")]})
    assert len([a for a in make_plan(state(paths, root, child), 1).actions if isinstance(a, Start)]) == 1
    running = version(paths, "v0000", [], trained=True, jobs={"evaluate": [job(paths, "running", "evaluate")]})
    plan = make_plan(state(paths, running, child), 1)
    assert plan.actions == () and len(plan.running) == 1 and not plan.done


def one(paths: CampaignPaths, *jobs: JobStatus, generation: int = 1):  # type: ignore[no-untyped-def]
    """The plan for v0001's training with these attempts, everything else done."""
    root = version(paths, "v0000", [], trained=True, evaluated=True)
    return make_plan(state(paths, root, version(paths, "v0001", ["v0000"], trained=False, jobs={"train": list(jobs)})), generation)


def test_the_life_of_an_attempt(paths: CampaignPaths) -> None:
    assert isinstance(one(paths, job(paths, "planned", intent=None)).actions[0], Submit), "a spec without an intent was never submitted"
    assert isinstance(one(paths, job(paths, "planned")).actions[0], Start)
    assert isinstance(one(paths, job(paths, "dead", starts=1)).actions[0], Start)
    assert isinstance(one(paths, job(paths, "dead", starts=2)).actions[0], GiveUp)
    assert isinstance(one(paths, job(paths, "finished", result=Result(outcome="done"))).actions[0], Commit)
    given_up = one(paths, job(paths, "finished", result=Result(outcome="failed", blame="user", error="why"))).actions[0]
    assert isinstance(given_up, GiveUp) and (given_up.blame, given_up.error) == ("user", "why")


def test_failures_of_this_controller_block_and_those_of_earlier_ones_are_tried_again(paths: CampaignPaths) -> None:
    again = one(paths, failed(paths, "infrastructure", 1)).actions[0]
    assert isinstance(again, Submit) and again.attempt == 1
    twice = one(paths, failed(paths, "infrastructure", 1), failed(paths, "infrastructure", 1, 1))
    assert twice.actions == () and twice.blockers[0].error == "why" and not twice.done
    user = one(paths, failed(paths, "user", 1))
    assert user.actions == () and user.blockers[0].blame == "user"
    mended = one(paths, failed(paths, "user", 1), generation=2).actions[0]
    assert isinstance(mended, Submit) and mended.attempt == 1


def test_an_attempt_at_other_work_is_given_up_and_one_that_runs_blocks(paths: CampaignPaths) -> None:
    other = INTENT.model_copy(update={"work": "what the recipe said yesterday"})
    stale = one(paths, job(paths, "dead", intent=other, starts=1)).actions[0]
    assert isinstance(stale, GiveUp) and stale.blame == "user"
    running = one(paths, job(paths, "running", intent=other, pid=7))
    assert running.actions == () and "kill 7" in running.blockers[0].error
    replaced = JobStatus(failed(paths, "user", 1).job, "recorded", record=failed(paths, "user", 1).record, intent=other)
    assert isinstance(one(paths, replaced).actions[0], Submit), "what failed as something else does not block"


def test_removed_outputs_are_published_again_or_made_again(paths: CampaignPaths) -> None:
    done = Record(state="done", incarnation=0, generation=1, started_by=1, starts=1, seconds=0)
    assert isinstance(one(paths, job(paths, "recorded", record=done)).actions[0], Commit)
    other = INTENT.model_copy(update={"work": "what the recipe said yesterday"})
    assert isinstance(one(paths, job(paths, "recorded", record=done, intent=other)).actions[0], Submit)
    evaluated = {"evaluate": [job(paths, "recorded", "evaluate", record=done)]}
    root = version(paths, "v0000", [], trained=True, evaluated=True)
    plan = make_plan(state(paths, root, version(paths, "v0001", ["v0000"], trained=True, jobs=evaluated)), 1)
    assert [type(a) for a in plan.actions] == [Submit], "whoever removes an evaluation wants it made again"


def test_the_end(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True)
    child = version(paths, "v0001", ["v0000"], trained=True, evaluated=True)
    assert make_plan(state(paths, root, child), 1).actions == (Compare("v0001", "v0000"),)
    done = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, compared=("v0000",))
    assert make_plan(state(paths, root, done), 1).done
    other = replace(done, comparisons=tuple(
        c.model_copy(update={"look": c.look.model_copy(update={"evaluations": ("v0000-dev", "an earlier one")})}) for c in done.comparisons
    ))
    assert make_plan(state(paths, root, other), 1).actions == (Compare("v0001", "v0000"),), "a new evaluation is a new look"


def test_a_result_without_a_record_is_recorded_even_if_its_outputs_are_there(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True)
    jobs = {"evaluate": [job(paths, "finished", "evaluate", result=Result(outcome="done"))]}
    child = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, compared=("v0000",), jobs=jobs)
    plan = make_plan(state(paths, root, child), 1)
    assert [type(a) for a in plan.actions] == [Commit] and not plan.done


def test_the_same_state_gives_the_same_plan(paths: CampaignPaths) -> None:
    made = state(paths, version(paths, "v0000", [], trained=True), version(paths, "v0001", ["v0000"], trained=False))
    assert make_plan(made, 1) == make_plan(made, 1)
