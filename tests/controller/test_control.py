"""What a person's wish makes of a plan, and how a cancelled version ends: at once, for good, without harm to the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.control import Control
from evo_hpc.config.recipe import Recipe
from evo_hpc.controller.actions import (
    Analyse, Blocker, Commit, Compare, CreateVersion, Decide, EndEarly, GiveUp, MakeTasks, Plan, Propose, Start, Stop, Submit, Watch,
)
from evo_hpc.controller.control import NEW, Cancel, apply, cancellation, decision_of, is_cancelled, wish_of
from evo_hpc.controller.state import VersionState, read_state
from evo_hpc.dispatch.status import JobStatus, Phase
from evo_hpc.evaluation.scores import EvaluationRecord
from evo_hpc.jobs.spec import Intent, Record, Result
from evo_hpc.lineage.decision import Decision, read_decision, write_decision
from evo_hpc.lineage.tree import Node
from evo_hpc.lineage.version import Version
from evo_hpc.paths import CampaignPaths
from tests.report.campaign_folder import new_campaign, publish_evaluation, publish_training

PATHS = CampaignPaths(Path("/c"))
INTENT = Intent(name="n", spec_sha256="", owner="v0001", work="run", root="/c", generation=1, written_at=0)


def job(phase: Phase, kind: str = "train", attempt: int = 0, **fields: Any) -> JobStatus:
    return JobStatus(PATHS.version("v0001").job(kind, attempt), phase, **{"intent": INTENT, **fields})


def version(*jobs: JobStatus, trained: bool = False, scored: bool = False, decision: Decision | None = None, futile: bool = False) -> VersionState:
    record = EvaluationRecord("v0001", "dev", "e", {}, 0, 8, ["t"], 8, 0, 0.5, "p", "v0001-dev") if scored else None
    look: Any = SimpleNamespace(step=2, futile=["score.collapse"] if futile else [], findings=[], parts=[])
    return VersionState(
        node=Node(PATHS.version("v0001"), Version(id="v0001", parents=["v0000"]), Recipe(steps=5), {}), trained=trained, policy="p" if trained else None,
        policy_identity="p" if trained else None, init="base/policy", run="run", evaluations={"dev": record},
        jobs={"train": list(jobs)}, comparisons=(), decision=decision, watches=(look,) if futile else (),
    )


RUNNING, QUEUED = job("running", pid=7), job("queued", "evaluate", slurm_id="12")
DONE = job("finished", attempt=1, result=Result(outcome="done"))
KEPT = (
    MakeTasks(), CreateVersion(Version(id="v0009"), Recipe()), Commit(DONE), GiveUp(DONE, "user", "why"), Watch("v0001", 2), Stop("v0001", RUNNING),
    EndEarly("v0001", DONE), Analyse("v0001"), Compare("v0001", "v0000"), Decide("v0001"),
)
HELD = (Submit("v0001", "train", 0, {}, "w"), Start((job("planned"),)), Propose(SimpleNamespace(number=1)))  # type: ignore[arg-type]


def plan(*actions: Any, running: tuple[JobStatus, ...] = (), blockers: tuple[Blocker, ...] = (), done: bool = False) -> Plan:
    return Plan(actions=actions, running=running, waiting=(), blockers=blockers, done=done)


def test_run_is_the_plan_itself() -> None:
    steered = apply(Control(), plan(*KEPT, *HELD, running=(RUNNING,)))
    assert (steered.actions, steered.stops, steered.ends, steered.waits) == ((*KEPT, *HELD), (), False, False)
    assert apply(Control(), plan(done=True)).ends


@pytest.mark.parametrize("state", ["pause", "drain"])
def test_nothing_new_is_submitted_and_what_runs_goes_on(state: Any) -> None:
    steered = apply(Control(state=state), plan(*HELD, *KEPT, running=(RUNNING, QUEUED)))
    assert (steered.actions, steered.stops, steered.ends) == (KEPT, (), False)


def test_a_paused_controller_stays_also_where_it_is_blocked() -> None:
    blocked = plan(blockers=(Blocker("v0001 train", "user", "why"),))
    for each in (plan(*HELD), blocked):
        steered = apply(Control(state="pause"), each)
        assert not steered.ends and steered.waits
    assert apply(Control(state="pause"), plan(done=True)).ends, "there is nothing left to pause"


def test_a_drained_controller_ends_when_nothing_runs_and_nothing_is_left_without_new_jobs() -> None:
    drain = Control(state="drain")
    assert not apply(drain, plan(*HELD, running=(RUNNING,))).ends
    assert not apply(drain, plan(*HELD, Commit(DONE))).ends, "what has ended is committed first"
    assert apply(drain, plan(*HELD)).ends and apply(drain, plan(blockers=(Blocker("v0001 train", "user", "why"),))).ends


def test_stop_ends_the_jobs_then_the_controller() -> None:
    steered = apply(Control(state="stop"), plan(*HELD, *KEPT, running=(RUNNING, QUEUED)))
    assert (steered.actions, steered.stops, steered.ends) == ((), (RUNNING, QUEUED), False)
    assert apply(Control(state="stop"), plan(*HELD, *KEPT)).ends


@given(st.sampled_from(["run", "pause", "drain", "stop"]), st.lists(st.sampled_from([*KEPT, *HELD]), max_size=6), st.booleans())
def test_a_wish_only_ever_takes_away(state: Any, actions: list[Any], alive: bool) -> None:
    made = plan(*actions, running=(RUNNING,) if alive else ())
    steered = apply(Control(state=state), made)
    assert [a for a in made.actions if a in steered.actions] == list(steered.actions), "no action that was not planned, none out of order"
    assert state == "run" or not any(isinstance(a, NEW) for a in steered.actions)
    assert not (steered.ends and alive), "jobs are never left behind"
    assert not (state != "stop" and steered.stops)


CANCEL = Control(cancel=["v0001"], reason="it diverges")


def test_cancelling_stops_what_runs_and_gives_up_what_has_ended() -> None:
    recorded = job("recorded", attempt=0, record=Record(state="failed", incarnation=None, blame="user", generation=1, started_by=1, starts=1, seconds=0))
    unknown, dead, planned = job("unknown", attempt=2), job("dead", attempt=3), job("planned", attempt=4, intent=None)
    made = version(recorded, DONE, unknown, dead, planned, RUNNING, QUEUED)
    assert is_cancelled(made, CANCEL)
    first, *rest = cancellation(made, CANCEL)
    assert isinstance(first, Cancel) and first.decision.by == "person", "what makes the wish durable comes first"
    why = "cancelled: it diverges"
    assert rest == [GiveUp(DONE, "user", why), GiveUp(dead, "user", why), Stop("v0001", RUNNING), Stop("v0001", QUEUED)]


def test_a_cancelled_version_stays_cancelled_when_the_wish_is_gone() -> None:
    decided = version(RUNNING, decision=decision_of(version(RUNNING), CANCEL))
    for control in (Control(), CANCEL):
        assert is_cancelled(decided, control) and cancellation(decided, control) == [Stop("v0001", RUNNING)]
    ended = version(decision=decided.decision)
    assert is_cancelled(ended, Control()) and cancellation(ended, Control()) == []


def test_who_is_not_cancelled() -> None:
    by_gate = Decision(version="v0001", decision="prune", because="no gain")
    kept = Decision(version="v0001", decision="keep", by="person", because="I like it")
    assert not is_cancelled(version(RUNNING), Control(cancel=["v0002"]))
    assert not is_cancelled(version(RUNNING, futile=True), CANCEL), "the rule declared beforehand ends it"
    for decision in (by_gate, kept):
        assert not is_cancelled(version(trained=True, scored=True, decision=decision), CANCEL), "its time is over"
    assert not is_cancelled(version(trained=True, decision=by_gate), Control()), "an evaluation that was removed is made again"
    assert not is_cancelled(version(trained=True, decision=by_gate), CANCEL), "what is decided stays decided"
    assert not is_cancelled(version(decision=kept), Control()), "a person's other decisions end no job"


@pytest.mark.parametrize("made, told", [
    (version(RUNNING), "before its training was over"), (version(trained=True), "after its training"), (version(trained=True, scored=True), "after it was scored"),
])
def test_the_decision_says_what_was_known(made: VersionState, told: str) -> None:
    decision = decision_of(made, CANCEL)
    assert told in decision.because and "it diverges" in decision.because and not decision.promoted
    assert decision_of(made, Control(cancel=["v0001"])).because.endswith("no reason is given in control.yaml.")


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignPaths:
    return new_campaign(tmp_path / "campaign")


@pytest.mark.parametrize("far", ["not trained", "trained", "scored"])
def test_the_decision_fits_the_campaigns_other_records(campaign: CampaignPaths, far: str) -> None:
    """read_state refuses decisions that contradict them."""
    if far != "not trained":
        publish_training(campaign, "v0001")
    if far == "scored":
        for name in ("v0000", "v0001"):
            for suite in ("dev", "probe"):
                publish_evaluation(campaign, name, suite, 0.5)
    control = Control(cancel=["v0001"])
    state = read_state(campaign)
    (cancel,) = cancellation(state.versions["v0001"], control)
    assert isinstance(cancel, Cancel)
    path = campaign.version(cancel.version).decision_yaml
    write_decision(path, cancel.decision)
    write_decision(path, cancel.decision)  # done twice after a crash
    again = read_state(campaign)
    assert read_decision(path) == again.versions["v0001"].decision == cancel.decision
    assert again.incumbent_before(None) == "v0000" and cancellation(again.versions["v0001"], control) == []


def test_a_wish_that_cannot_be_read_is_a_pause(campaign: CampaignPaths) -> None:
    state = read_state(campaign)
    assert wish_of(state) == (Control(), None)
    campaign.control_yaml.write_text("state: drain\ncancel: [v0001]\n")
    assert wish_of(state) == (Control(state="drain", cancel=["v0001"]), None)
    campaign.control_yaml.write_text("state: run\ncancel: [v0001, v0011]\n")
    control, problem = wish_of(state)
    assert control == Control(state="pause") and problem is not None
    assert f"{campaign.control_yaml}:2: `cancel`: no version v0011" in problem and "running jobs go on" in problem
    assert not is_cancelled(replace(state.versions["v0001"]), control), "nothing is cancelled by half a file"
