"""The plan is a pure function of the state: order, limits, retries, blockers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evo_hpc.agent.proposal import Round
from evo_hpc.config import campaign as config
from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.controller.actions import (
    Analyse, Commit, Compare, CreateVersion, Decide, EndEarly, GiveUp, MakeHarness, MakeTasks, Propose, Start, Stop, Submit, Watch,
)
from evo_hpc.controller.plan import make_plan
from evo_hpc.controller.settings import Settings
from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.dispatch.status import JobStatus, Phase
from evo_hpc.evaluation.scores import EvaluationRecord
from evo_hpc.controller.tasks import SplitManifest, TasksManifest
from evo_hpc.controller.watching import Running
from evo_hpc.jobs.outputs import Part
from evo_hpc.jobs.spec import Intent, Record, Result
from evo_hpc.lineage.comparison import Comparison
from evo_hpc.lineage.decision import Decision
from evo_hpc.lineage.looks import Look
from evo_hpc.lineage.tree import Node
from evo_hpc.lineage.version import Version
from evo_hpc.paths import CampaignPaths, JobPaths

SETTINGS = Settings(
    Campaign(name="c", domain={"name": "arithmetic"}, base_model={"supervised": {}}, search={"agent": "none"}),  # type: ignore[arg-type]
    Recipe(steps=5), Cluster(max_parallel_jobs=1, max_starts=2, max_attempts=2),
)


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    return CampaignPaths(tmp_path)


def record(suite: str, version: str) -> EvaluationRecord:
    return EvaluationRecord(version, suite, "e", {}, 0, 8, ["t"], 8, 0, 0.5, "p", f"{version}-{suite}")


def version(paths: CampaignPaths, name: str, parents: list[str], *, trained: bool, evaluated: bool = False, jobs: dict | None = None,
            compared: tuple[str, ...] = (), analysed: bool = False, decided: bool = False, **more: Any) -> VersionState:
    steps = 5 if parents else 0
    node = Node(paths.version(name), Version(id=name, parents=parents), Recipe(steps=steps), {})
    return VersionState(
        node=node, trained=trained, policy="p" if trained else None, policy_identity="p", init="base/policy", run="run", jobs=jobs or {},
        comparisons=tuple(comparison(name, parent) for parent in compared),
        evaluations={s: record(s, name) if evaluated else None for s in ("dev", "probe")}, analysis=ANALYSIS if analysed else None,
        decision=Decision(version=name, decision="prune", because="no gain") if decided else None, **more,
    )


def comparison(name: str, parent: str) -> Comparison:
    look = Look(number=1, version=name, against=parent, suite="dev", evaluator_epoch="e", evaluations=(f"{parent}-dev", f"{name}-dev"),
                total_alpha=0.05, alpha=0.03, generation=1, declared_at=0.0)
    reading = SimpleNamespace(excludes_zero=False, difference=0.0)
    return Comparison.model_construct(version=name, against=parent, suite="dev", look=look, at_look_alpha=reading)


ANALYSIS: Any = SimpleNamespace(measures={}, findings=[], citations=lambda root: [], harness="h0001")
FOUND: Any = SimpleNamespace(digest="now")
HARNESS: Any = SimpleNamespace(digest="now", number=1, id="h0001")


TASKS = TasksManifest(domain={}, splits={s: SplitManifest(tasks=1, task_set=s) for s in ("train", "probe", "dev", "sealed")})


def state(paths: CampaignPaths, *versions: VersionState, tasks: bool = True, base: str | None = "base/policy", base_jobs: dict | None = None) -> CampaignState:
    return CampaignState(
        paths, SETTINGS, TASKS if tasks else None, base, base_jobs or {}, {v.id: v for v in versions}, FOUND, HARNESS, (), now=1e9,
    )


INTENT = Intent(name="n", spec_sha256="", owner="v0001", work="run", root="", generation=1, written_at=0)


def job(paths: CampaignPaths, phase: Phase, kind: str = "train", attempt: int = 0, **fields) -> JobStatus:  # type: ignore[no-untyped-def]
    folder: JobPaths = paths.version("v0001").job(kind, attempt)
    return JobStatus(folder, phase, **{"intent": INTENT, **fields})


def failed(paths: CampaignPaths, blame: str, generation: int, attempt: int = 0) -> JobStatus:
    final = Record(state="failed", incarnation=None, blame=blame, error="why", generation=generation, started_by=generation, starts=1, seconds=0)  # type: ignore[arg-type]
    return job(paths, "recorded", attempt=attempt, record=final)


def test_the_beginning(paths: CampaignPaths) -> None:
    assert make_plan(state(paths, tasks=False, base=None), 1).actions == (MakeTasks(),)
    assert make_plan(replace(state(paths), harness=None), 1).actions == (MakeHarness(1),)
    assert make_plan(replace(state(paths), found=SimpleNamespace(digest="edited")), 1).actions == (MakeHarness(2),)  # type: ignore[arg-type]
    (root,) = make_plan(state(paths, base=None), 1).actions
    assert isinstance(root, CreateVersion) and (root.id, root.version.parents, root.recipe.steps) == ("v0000", [], 0)
    (first,) = make_plan(state(paths, version(paths, "v0000", [], trained=True), base=None), 1).actions
    assert isinstance(first, CreateVersion) and (first.id, first.version.parents, first.recipe.steps) == ("v0001", ["v0000"], 5)


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
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    return make_plan(state(paths, root, version(paths, "v0001", ["v0000"], trained=False, jobs={"train": list(jobs)})), generation)


def in_a_row(paths: CampaignPaths, *advanced: bool, age: float = 1e9, cluster: Cluster | None = None):  # type: ignore[no-untyped-def]
    """The plan after failures by the machine's fault, some of them a step further than all before."""
    attempts = []
    for number, each in enumerate(advanced):
        status = failed(paths, "infrastructure", 1, number)
        assert status.record is not None
        attempts.append(replace(status, record=status.record.model_copy(update={"advanced": each, "written_at": 1e9 - age + number})))
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    whole = state(paths, root, version(paths, "v0001", ["v0000"], trained=False, jobs={"train": attempts}))
    if cluster is not None:
        whole = replace(whole, settings=replace(SETTINGS, cluster=cluster))
    return make_plan(whole, 1)


@pytest.mark.parametrize("advanced, goes_on", [
    ((True,), True), ((True, False), False), ((False, True), True), ((False, True, False), False), ((True, True, True, True), True),
    ((False, True, True, False), False),
])
def test_failures_after_which_it_came_further_are_not_in_a_row(paths: CampaignPaths, advanced: tuple[bool, ...], goes_on: bool) -> None:
    plan = in_a_row(paths, *advanced)
    if goes_on:
        (again,) = plan.actions
        assert isinstance(again, Submit) and again.attempt == len(advanced) and not plan.blockers
    else:
        assert not plan.actions and plan.blockers


@pytest.mark.parametrize("attempts, stops", [
    # (attempt, came further than those before it) of versions one after another.
    ([(0, True)] * 3, True), ([(0, False)] * 3, True), ([(0, True), (1, False), (0, True)], True), ([(0, True), (1, True), (2, True)], False),
])
def test_what_fails_in_every_version_is_the_clusters_fault(paths: CampaignPaths, attempts: list[tuple[int, bool]], stops: bool) -> None:
    versions = [version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)]
    for number, (attempt, advanced) in enumerate(attempts, start=1):
        final = failed(paths, "infrastructure", 1).record
        assert final is not None
        done = final.model_copy(update={"advanced": advanced, "written_at": float(number)})
        name = f"v{number:04d}"
        status = JobStatus(paths.version(name).job("train", attempt), "recorded", intent=INTENT, record=done)
        versions.append(version(paths, name, ["v0000"], trained=False, jobs={"train": [status]}))
    plan = make_plan(state(paths, *versions), 1)
    assert any("3 attempts in a row failed by the machine's fault" in each.error for each in plan.blockers) == stops


def test_on_a_cluster_another_attempt_waits_its_back_off(paths: CampaignPaths) -> None:
    slurm = Cluster(executor="slurm", max_attempts=9, slurm={"backoff_seconds": 100})  # type: ignore[arg-type]
    waits = in_a_row(paths, False, age=99, cluster=slurm)
    assert not waits.actions and not waits.blockers and len(waits.waiting) == 1 and not waits.done
    assert in_a_row(paths, False, age=101, cluster=slurm).actions
    assert in_a_row(paths, False, False, age=200, cluster=slurm).waiting, "twice as long after the second"
    assert in_a_row(paths, False, True, age=102, cluster=slurm).actions, "which came further: it is the first again"
    assert in_a_row(paths, False, age=0, cluster=SETTINGS.cluster).actions, "not on one machine"


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
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    plan = make_plan(state(paths, root, version(paths, "v0001", ["v0000"], trained=True, jobs=evaluated)), 1)
    assert [type(a) for a in plan.actions] == [Submit], "whoever removes an evaluation wants it made again"


def test_the_end(paths: CampaignPaths) -> None:
    bare = version(paths, "v0000", [], trained=True, evaluated=True)
    child = version(paths, "v0001", ["v0000"], trained=True, evaluated=True)
    assert make_plan(state(paths, bare, child), 1).actions == (Analyse("v0000"), Analyse("v0001"))
    root, child = replace(bare, analysis=ANALYSIS), replace(child, analysis=ANALYSIS)
    assert make_plan(state(paths, root, child), 1).actions == (Compare("v0001", "v0000"),)
    done = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, compared=("v0000",), analysed=True)
    assert make_plan(state(paths, root, done), 1).actions == (Decide("v0001"),)
    assert make_plan(state(paths, root, version(paths, "v0001", ["v0000"], trained=True, evaluated=True, analysed=True, decided=True)), 1).done
    other = replace(done, comparisons=tuple(
        c.model_copy(update={"look": c.look.model_copy(update={"evaluations": ("v0000-dev", "an earlier one")})}) for c in done.comparisons
    ))
    assert make_plan(state(paths, root, other), 1).actions == (Compare("v0001", "v0000"),), "a new evaluation is a new look"


def test_a_result_without_a_record_is_recorded_even_if_its_outputs_are_there(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    jobs = {"evaluate": [job(paths, "finished", "evaluate", result=Result(outcome="done"))]}
    child = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, analysed=True, decided=True, jobs=jobs)
    plan = make_plan(state(paths, root, child), 1)
    assert [type(a) for a in plan.actions] == [Commit] and not plan.done


def test_the_same_state_gives_the_same_plan(paths: CampaignPaths) -> None:
    made = state(paths, version(paths, "v0000", [], trained=True), version(paths, "v0001", ["v0000"], trained=False))
    assert make_plan(made, 1) == make_plan(made, 1)


def part(last: int) -> Part:
    return Part(table="steps", path=f"versions/v0001/jobs/train-000/inc-0/steps/{last}", first_step=last, last_step=last, bytes=1, sha256="s")


def running(*last: int, finished: bool = False) -> Running:
    return Running(tuple(part(step) for step in last), config.Watch(every=2), finished)


def look(step: int, *futile: str) -> Any:
    return SimpleNamespace(step=step, futile=list(futile), findings=[], parts=[])


def training(paths: CampaignPaths, status: JobStatus, **more: Any) -> CampaignState:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    return state(paths, root, version(paths, "v0001", ["v0000"], trained=False, jobs={"train": [status]}, **more))


def test_the_watch_looks_at_every_step_that_it_declared_before_the_run_may_end(paths: CampaignPaths) -> None:
    alive = job(paths, "running", pid=7)
    assert make_plan(training(paths, alive, running=running(1)), 1).actions == ()
    assert make_plan(training(paths, alive, running=running(1, 2)), 1).actions == (Watch("v0001", 2),)
    assert make_plan(training(paths, alive, running=running(1, 2), watches=(look(2),)), 1).actions == ()
    finished = job(paths, "finished", result=Result(outcome="done"))
    whole = running(2, 4, 5, finished=True)
    assert make_plan(training(paths, finished, running=whole, watches=(look(2),)), 1).actions == (Watch("v0001", 4),), "before its end counts"
    (last,) = make_plan(training(paths, finished, running=whole, watches=(look(2), look(4))), 1).actions
    assert isinstance(last, Commit)
    dead = job(paths, "dead", starts=1)
    assert make_plan(training(paths, dead, running=running(2)), 1).actions == (Watch("v0001", 2),), "before it is started again"


def test_a_futile_run_is_stopped_then_published_and_never_started_or_evaluated(paths: CampaignPaths) -> None:
    stop = {"running": running(2, 4), "watches": (look(2), look(4, "score.collapse"))}
    alive = job(paths, "running", pid=7)
    assert make_plan(training(paths, alive, **stop), 1).actions == (Stop("v0001", alive),)
    for status in (job(paths, "dead", starts=1), job(paths, "finished", result=Result(outcome="done")), job(paths, "planned")):
        assert make_plan(training(paths, status, **stop), 1).actions == (EndEarly("v0001", status),), "however the job ended"
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    over = replace(version(paths, "v0001", ["v0000"], trained=True, analysed=True, watches=stop["watches"]), policy=None)
    assert make_plan(state(paths, root, over), 1).actions == (Decide("v0001"),), "without a look at dev"


def test_decisions_come_in_the_order_of_ids(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    slow = version(paths, "v0001", ["v0000"], trained=False, jobs={"train": [job(paths, "running", pid=7)]})
    quick = version(paths, "v0002", ["v0000"], trained=True, evaluated=True, analysed=True)
    assert make_plan(state(paths, root, slow, quick), 1).actions == (), "the alpha of a look must not depend on which job was faster"


def test_until(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    done = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, analysed=True, decided=True)
    waiting = version(paths, "v0002", ["v0001"], trained=False)
    assert make_plan(state(paths, root, done, waiting), 1, until="v0001").done
    assert not make_plan(state(paths, root, done, waiting), 1, until="v0002").done
    assert make_plan(state(paths, version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)), 1, until="v0000").done, "no v0001"


def test_a_round_is_asked_once_and_its_versions_are_made(paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    done = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, analysed=True, decided=True)
    search = SETTINGS.campaign.model_copy(update={"search": config.Search(agent="rules", proposals=2)})
    asking = replace(state(paths, root, done), settings=replace(SETTINGS, campaign=search))
    monkeypatch.setattr(CampaignState, "rules", lambda self: None)
    monkeypatch.setattr("evo_hpc.controller.plan.propose", lambda evidence, rules, width, left: ([], []))
    (asked,) = make_plan(asking, 1).actions
    assert isinstance(asked, Propose) and asked.round.decided == ["v0000", "v0001"]
    assert make_plan(replace(asking, rounds=(asked.round,)), 1).done, "nothing more to propose: the search is over"
    assert not make_plan(replace(asking, rounds=(asked.round.model_copy(update={"harness": "h0000"}),)), 1).done, "another harness may know better"
    wanted = {"version": Version(id="v0002", parents=["v0001"]), "recipe": Recipe(steps=5)}
    full = Round.model_validate({**asked.round.model_dump(), "proposals": [{k: v.model_dump() for k, v in wanted.items()}]})
    assert make_plan(replace(asking, rounds=(full,)), 1).actions == (CreateVersion(**wanted),)  # type: ignore[arg-type]
    assert make_plan(replace(asking, rounds=(full,)), 1, until="v0001").done


def test_until_brings_forward_what_a_version_needs_whatever_its_id(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    first = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, analysed=True, decided=True)
    child = version(paths, "v0002", ["v0005"], trained=True, evaluated=True, analysed=True)
    parent = version(paths, "v0005", ["v0000"], trained=False)
    plan = make_plan(state(paths, root, first, child, parent), 1, until="v0002")
    assert [(a.owner, a.kind) for a in plan.actions if isinstance(a, Submit)] == [("v0005", "train")]


def test_what_can_never_go_on_blocks_and_is_not_called_done(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    stopped = replace(version(paths, "v0001", ["v0000"], trained=True, analysed=True, decided=True, watches=(look(2, "score.collapse"),)), policy=None)
    orphan = replace(version(paths, "v0002", ["v0001"], trained=False), init=None, run=None)
    orphan = replace(orphan, node=replace(orphan.node, init="v0001@5"))
    plan = make_plan(state(paths, root, stopped, orphan), 1)
    assert not plan.done and "v0001@5: that run was stopped early and has no policy" in plan.blockers[0].error
    waiting = replace(version(paths, "v0002", ["v0000"], trained=False), init=None, run=None)
    plan = make_plan(state(paths, root, stopped, waiting), 1)
    assert not plan.done and "nothing brings it forward" in plan.blockers[0].error


def test_no_training_ends_while_nobody_can_tell_which_run_it_was(paths: CampaignPaths) -> None:
    """The base policy was removed, to be published again: the watch over a finished job comes first, once it is back."""
    finished = job(paths, "finished", result=Result(outcome="done"))
    unknown = training(paths, finished)
    unknown = replace(unknown, versions={**unknown.versions, "v0001": replace(unknown.versions["v0001"], init=None, run=None)})
    assert not [a for a in make_plan(unknown, 1).actions if isinstance(a, Commit)]


def test_a_stopped_run_that_was_published_still_gets_its_record(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    left = job(paths, "finished", result=Result(outcome="done"))
    over = replace(version(paths, "v0001", ["v0000"], trained=True, analysed=True, watches=(look(2, "score.collapse"),), jobs={"train": [left]}), policy=None)
    assert EndEarly("v0001", left) in make_plan(state(paths, root, over), 1).actions


def test_a_decision_waits_for_what_was_found_in_its_parents(paths: CampaignPaths) -> None:
    root = version(paths, "v0000", [], trained=True, jobs={"evaluate": [job(paths, "running", "evaluate")]})
    over = replace(version(paths, "v0001", ["v0000"], trained=True, analysed=True, watches=(look(2, "score.collapse"),)), policy=None)
    assert not [a for a in make_plan(state(paths, root, over), 1).actions if isinstance(a, Decide)]


def analysing(paths: CampaignPaths, slurm: dict[str, Any], jobs: list[JobStatus], harness: Any = HARNESS) -> Any:
    """The plan for a scored v0001 that is not analysed, under Slurm."""
    root = version(paths, "v0000", [], trained=True, evaluated=True, analysed=True)
    child = version(paths, "v0001", ["v0000"], trained=True, evaluated=True, jobs={"analyse": jobs})
    cluster = Cluster(executor="slurm", slurm=slurm)  # type: ignore[arg-type]
    whole = replace(state(paths, root, child), settings=replace(SETTINGS, cluster=cluster), harness=harness)
    return make_plan(whole, 1).actions


def test_an_analysis_is_a_job_where_the_profile_says_what_it_asks_for(paths: CampaignPaths) -> None:
    assert analysing(paths, {}, []) == (Analyse("v0001"),)
    (submit,) = analysing(paths, {"analyse": {"memory": "8G"}}, [])
    assert (submit.kind, submit.attempt, submit.params) == ("analyse", 0, {"harness": "h0001", "digest": "now"})
    intent = INTENT.model_copy(update={"work": submit.work})
    done = Record(state="done", incarnation=0, generation=1, started_by=1, starts=1, seconds=0)
    removed = job(paths, "recorded", "analyse", record=done, intent=intent)
    (again,) = analysing(paths, {"analyse": {}}, [removed])
    assert isinstance(again, Submit) and again.attempt == 1, "who removes an analysis wants it made again"
    finished = job(paths, "finished", "analyse", intent=intent, result=Result(outcome="done", seconds=1))
    assert [type(a) for a in analysing(paths, {"analyse": {}}, [finished])] == [Commit]
    other: Any = SimpleNamespace(digest="now", number=2, id="h0002")
    (of_other,) = analysing(paths, {"analyse": {}}, [removed], other)
    assert of_other.work != submit.work and of_other.attempt == 1
