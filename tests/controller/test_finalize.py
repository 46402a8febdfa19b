"""The final claim: declared first, scored once for its candidates alone, shown with every other read, whatever is killed when."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.config.yaml_io import load_tree, plain
from evo_hpc.controller.finalize import FinalRefused, choose, describe, final_claim, finalize
from evo_hpc.controller.ownership import Interrupted
from evo_hpc.errors import UserError
from evo_hpc.evaluation.scores import scores_in_folder
from evo_hpc.jobs.spec import load_spec
from evo_hpc.lineage.reads import Candidate, Read
from evo_hpc.lineage.sealed import BadSealedLedger, Entry, read_ledger, sealed_problems
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.lease import LeaseHeld, acquire
from tests.controller.test_bad_campaigns import edit
from tests.crash.campaign import HERE, controller, evo, finish, make_campaign
from tests.lineage.test_sealed import draft, result_of

DRIVER = str(HERE / "killing_finalize.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CampaignPaths:
    """A finished campaign with two candidates, v0001 and v0002, in a workspace of its own."""
    paths = make_campaign(tmp_path_factory.mktemp("made") / "campaigns" / "crash")
    finish(paths)
    add_version(paths, "v0002", "0.0002")
    finish(paths)
    return paths


def add_version(paths: CampaignPaths, name: str, lr: str) -> None:
    """A version by hand, to be trained."""
    version = paths.version(name)
    version.root.mkdir()
    version.version_yaml.write_text(f"id: {name}\nparents: [v0000]\n")
    shutil.copy(paths.version("v0001").recipe_yaml, version.recipe_yaml)
    edit(version.recipe_yaml, "lr: 0.0001", f"lr: {lr}")


@pytest.fixture
def campaign(made: CampaignPaths, tmp_path: Path) -> CampaignPaths:
    return fresh(made, tmp_path / "workspace")


def fresh(made: CampaignPaths, workspace: Path) -> CampaignPaths:
    """The finished campaign in another workspace."""
    shutil.copytree(made.workspace.root, workspace)
    return CampaignPaths(workspace / "campaigns" / made.root.name)


def task_set(paths: CampaignPaths) -> str:
    return read_json(paths.tasks_manifest)["splits"]["sealed"]["task_set"]


def ledger(paths: CampaignPaths) -> list[Entry]:
    return read_ledger(paths.workspace, task_set(paths))


def settle(paths: CampaignPaths, **environment: str) -> None:
    """Set the jobs' environment."""
    settings = plain(load_tree(paths.cluster_yaml))
    settings["environment"].update(environment)
    paths.cluster_yaml.write_text(str(settings).replace("True", "true"))


def outcome(paths: CampaignPaths) -> dict[str, Any]:
    """The claim, without what differs from one history to another."""
    (entry,) = ledger(paths)
    assert entry.result is not None
    changing = {"digest", "read_digest", "generation", "finished_at", "declared_at", "folder"}
    return {
        "read": entry.read.model_dump(exclude=changing), "result": entry.result.model_dump(exclude=changing),
        "scores": {v: scores_in_folder(paths.final.evaluation(1, v)) for v in ("v0000", "v0001")},
    }


def check_scored_once(paths: CampaignPaths) -> None:
    """Whatever happened: one read, and sealed was scored in one attempt, for its two candidates."""
    assert len(ledger(paths)) == 1
    for job in paths.final.jobs():
        assert [e["version"] for e in load_spec(job).params["evaluations"]] == ["v0000", "v0001"]
    assert [read_json(job.record)["state"] for job in paths.final.jobs()] == ["done"]
    assert sealed_problems(paths, task_set(paths)) == []


def test_the_claim_is_declared_first_and_says_how_sure_it_is(campaign: CampaignPaths) -> None:
    final = finalize(campaign, "v0001")
    read, result = final.read, final.result
    assert final.fresh and (read.number, read.campaign, read.place) == (1, "crash", "campaigns/crash")
    assert (read.baseline.version, read.candidate.version, read.alpha, read.method) == ("v0000", "v0001", 0.05, "studentized")
    assert read.declared_at < read_json(campaign.final.job("evaluate", 0).intent)["written_at"]
    assert (result.n_tasks, result.k, result.baseline.missing, result.candidate.missing) == (8, 2, 0, 0)
    means = [sum(map(sum, scores_in_folder(campaign.final.evaluation(1, v)).values())) / 16 for v in ("v0000", "v0001")]
    assert (result.baseline.mean, result.candidate.mean) == pytest.approx(tuple(means))
    c = result.comparison
    assert c.difference == pytest.approx(means[1] - means[0]) and c.alpha == 0.05 and c.ci_low < c.difference < c.ci_high
    assert result.verdict == ("better" if c.ci_low > 0 else "worse" if c.ci_high < 0 else "not shown")
    assert result.earlier == [] and final_claim(campaign, task_set(campaign)) == final.model_copy(update={"fresh": False})
    text = describe(final)
    assert f"{100 * c.difference:+.1f} points" in text and "n = 8 tasks x 2 rollouts" in text and re.search(r"p [=<] 0\.\d", text)
    assert "Nobody had read these tasks before" in text
    check_scored_once(campaign)


def test_again_for_the_same_policy_reads_nothing(campaign: CampaignPaths) -> None:
    first = finalize(campaign, "v0001")
    before = sorted(p for p in campaign.workspace.root.rglob("*") if "controller" not in p.parts)
    second = finalize(campaign, "v0001", again="curiosity")
    assert not second.fresh and (second.read, second.result) == (first.read, first.result) and "not needed" in second.notes[0]
    assert sorted(p for p in campaign.workspace.root.rglob("*") if "controller" not in p.parts) == before


def test_another_candidate_needs_a_reason_that_is_kept_and_shown(campaign: CampaignPaths) -> None:
    finalize(campaign, "v0001")
    with pytest.raises(FinalRefused, match="has its claim already: read 1, v0001 against v0000.*--again REASON"):
        finalize(campaign, "v0002")
    with pytest.raises(FinalRefused, match="a reason in words"):
        finalize(campaign, "v0002", again=" ")
    assert len(ledger(campaign)) == 1
    final = finalize(campaign, "v0002", again="v0001 had a faulty reward")
    assert final.read.number == 2 and final.read.why == "v0001 had a faulty reward"
    assert [(r.number, r.candidate) for r in final.result.earlier] == [(1, "v0001")]
    text = describe(final)
    assert "had been read before" in text and "read 1 by campaign crash" in text and "v0001 had a faulty reward" in text
    assert [r.number for r in finalize(campaign, "v0001").later] == [2], "the first claim shows it, too"
    assert sealed_problems(campaign, task_set(campaign)) == []


def test_two_campaigns_with_the_same_tasks_share_the_ledger(campaign: CampaignPaths) -> None:
    other = CampaignPaths(campaign.root.with_name("other"))
    shutil.copytree(campaign.root, other.root)
    edit(other.campaign_yaml, "name: crash", "name: other")
    first, second = finalize(campaign, "v0001"), finalize(other, "v0001")
    assert (first.read.number, second.read.number) == (1, 2) and first.result.comparison == second.result.comparison
    assert [(r.number, r.campaign, r.place) for r in second.result.earlier] == [(1, "crash", "campaigns/crash")]
    assert "read 1 by campaign crash (campaigns/crash), v0001 against v0000" in describe(second)
    again = finalize(campaign, "v0001")
    assert not again.fresh and [r.campaign for r in again.later] == ["other"]


def test_without_a_candidate_it_is_the_incumbent(campaign: CampaignPaths) -> None:
    decision = campaign.version("v0002").decision_yaml
    decision.write_text("version: v0002\ndecision: keep\npromoted: true\nby: person\nbecause: I say so\n")
    assert finalize(campaign).read.candidate.version == "v0002"


class Crash(Exception):
    pass


def crash(*_: object) -> None:
    raise Crash


def test_a_declared_read_is_finished_for_its_own_candidate(campaign: CampaignPaths) -> None:
    with pytest.raises(Crash):
        finalize(campaign, "v0001", watch=crash)
    assert len(ledger(campaign)) == 1 and ledger(campaign)[0].result is None
    final = finalize(campaign, "v0002", again="whatever")
    assert final.fresh and final.read.candidate.version == "v0001" and final.read.why is None
    assert "declared earlier, was finished now" in final.notes[0] and "incumbent is v0002 by now" in final.notes[1]
    check_scored_once(campaign)


@pytest.mark.parametrize("change, message", [
    (lambda c: edit(c.campaign_yaml, "samples_per_task: 2", "samples_per_task: 3"), r"changed since read 1 was declared .*samples_per_task: 2 -> 3"),
    (lambda c: (shutil.rmtree(c.version("v0001").root), c.version("v0002").decision_yaml.unlink()), r"v0001: removed since read 1 was declared for it"),
])
def test_a_declared_read_is_finished_as_it_was_declared_or_not_at_all(campaign: CampaignPaths, change: Any, message: str) -> None:
    with pytest.raises(Crash):
        finalize(campaign, "v0001", watch=crash)
    change(campaign)
    with pytest.raises(FinalRefused, match=message):
        finalize(campaign, "v0002")
    assert ledger(campaign)[0].result is None


def test_what_is_not_ready_is_refused_and_nothing_is_read(campaign: CampaignPaths, tmp_path: Path) -> None:
    for candidate, message in (("v0000", "no version has been promoted over v0000"), ("v0009", "v0009: no such version")):
        with pytest.raises(FinalRefused, match=message):
            finalize(campaign, candidate)
    with pytest.raises(FinalRefused, match="tasks are not made yet"):
        finalize(make_campaign(tmp_path / "new" / "campaign"), "v0001")
    add_version(campaign, "v0003", "0.0003")
    with pytest.raises(FinalRefused, match="v0003: has no trained policy"):
        finalize(campaign, "v0003")
    tasks = campaign.workspace.sealed_tasks(task_set(campaign))
    tasks.unlink()
    with pytest.raises(FinalRefused, match=r"tasks\.jsonl: missing; it lies in the workspace"):
        finalize(campaign, "v0001")
    assert ledger(campaign) == [] and not campaign.final.root.exists()


def test_a_running_controller_is_left_alone(campaign: CampaignPaths) -> None:
    lease = acquire(campaign)
    with pytest.raises(LeaseHeld, match="a controller runs this campaign already"):
        finalize(campaign, "v0001")
    assert ledger(campaign) == []
    lease.release()
    assert finalize(campaign, "v0001").fresh


def test_a_failing_job_leaves_the_read_declared_and_can_be_mended(campaign: CampaignPaths) -> None:
    settle(campaign, FAKE_FAILURE_IN="evaluator", FAKE_FAILURE="user")
    with pytest.raises(UserError, match="final evaluate: recipe.yaml:3: this is yours to mend"):
        finalize(campaign, "v0001")
    settle(campaign, FAKE_FAILURE_IN="")
    final = finalize(campaign, "v0001")
    assert final.read.number == 1 and len(ledger(campaign)) == 1
    assert [read_json(job.record)["state"] for job in campaign.final.jobs()] == ["failed", "done"]


def test_told_to_stop_it_stops_and_goes_on_later(campaign: CampaignPaths) -> None:
    settle(campaign, FAKE_EVALUATE_SECONDS="0.6")

    def stop(state: object, plan: Any, events: object) -> None:
        if plan.running:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="stopped by SIGTERM; no job runs. Read 1 stays declared"):
        finalize(campaign, "v0001", watch=stop)
    assert finalize(campaign, "v0001").read.number == 1
    check_scored_once(campaign)


def test_what_was_removed_is_published_and_computed_again(campaign: CampaignPaths) -> None:
    finalize(campaign, "v0001")
    before = outcome(campaign)
    shutil.rmtree(campaign.final.evaluation(1, "v0001"))
    campaign.workspace.sealed_result(task_set(campaign), 1).unlink()
    assert finalize(campaign, "v0001").fresh
    assert outcome(campaign) == before
    check_scored_once(campaign)


def damage_scores(paths: CampaignPaths) -> None:
    part = paths.final.evaluation(1, "v0001") / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize("damage, message", [
    (lambda c: c.workspace.sealed_read(task_set(c), 1).write_text("{}"), r"read-000001\.json: not a read"),
    (lambda c: shutil.rmtree(c.workspace.sealed_read(task_set(c), 1).parent), r"eval/read-000001: scores under read 1, which the ledger does not"),
    (lambda c: c.root.rename(c.root.with_name("moved")), r"read 1, which belongs to campaigns/crash.*copied campaign starts without final/"),
    (lambda c: c.workspace.sealed_tasks(task_set(c)).chmod(0o644), r"tasks\.jsonl: sealed tasks, readable by others"),
    (damage_scores, r"part-00000\.parquet: content differs from the hash"),
])
def test_a_ledger_that_contradicts_the_campaign_is_refused(campaign: CampaignPaths, damage: Any, message: str) -> None:
    finalize(campaign, "v0001")
    tasks = task_set(campaign)
    damage(campaign)
    paths = campaign if campaign.root.exists() else CampaignPaths(campaign.root.with_name("moved"))
    assert re.search(message, "\n".join(sealed_problems(paths, tasks)))
    with pytest.raises(BadSealedLedger, match=message):
        finalize(paths, "v0001")


def test_a_lost_ledger_is_not_washed_clean(campaign: CampaignPaths) -> None:
    """The tasks were read; without the record of it no command says or does otherwise."""
    finalize(campaign, "v0001")
    shutil.rmtree(campaign.workspace.sealed_read(task_set(campaign), 1).parent)
    for command in ("finalize", "report", "validate"):
        done = evo(command, str(campaign.root))
        assert done.returncode == 2, command
        assert "without it these tasks are spent" in done.stderr + done.stdout and "starts without final" not in done.stderr + done.stdout


def test_a_workspace_that_moved_keeps_its_claims(campaign: CampaignPaths, tmp_path: Path) -> None:
    first = finalize(campaign, "v0001")
    campaign.workspace.root.rename(tmp_path / "elsewhere")
    moved = CampaignPaths(tmp_path / "elsewhere" / "campaigns" / "crash")
    second = finalize(moved, "v0001")
    assert not second.fresh and second.result == first.result


NEW, OLD = Candidate(version="v0002", policy="p2"), Candidate(version="v0001", policy="p1")


def entries(*reads: tuple[Read, bool]) -> list[Entry]:
    return [Entry(read, result_of(read) if finished else None) for read, finished in reads]


def test_which_read_answers() -> None:
    """A pure choice: go on with what is unfinished, show what is there, refuse another without a reason, else declare."""
    mine, theirs = "campaigns/a", "campaigns/b"
    assert choose([], mine, NEW, None) is None
    assert choose(entries((draft("b"), True)), mine, NEW, None) is None, "reads by other campaigns do not forbid"
    finished = entries((draft("a"), True), (draft("b"), True))
    assert choose(finished, mine, OLD, None) == finished[0] and choose(finished, theirs, OLD, None) == finished[1]
    with pytest.raises(FinalRefused):
        choose(finished, mine, NEW, None)
    assert choose(finished, mine, NEW, "a reason") is None
    unfinished = entries((draft("a"), True), (draft("a", candidate=NEW), False))
    assert choose(unfinished, mine, OLD, "a reason") == unfinished[1]


@pytest.fixture(scope="module")
def undisturbed(made: CampaignPaths, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """What an undisturbed run ends with, and how many points it offers to die at."""
    paths = fresh(made, tmp_path_factory.mktemp("undisturbed") / "workspace")
    process = controller(paths, DRIVER, KILL_AT="-1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    check_scored_once(paths)
    return outcome(paths), int(output.split()[-1])


def die_and_go_on(made: CampaignPaths, folder: Path, undisturbed: tuple[dict[str, Any], int], point: int, when: str) -> bool:
    """Whether the point was reached; then a second run finishes the claim, and it is the same."""
    paths = fresh(made, folder / f"{when}-{point}")
    process = controller(paths, DRIVER, KILL_AT=str(point), KILL_WHEN=when)
    process.communicate(timeout=120)
    reached = process.returncode == -signal.SIGKILL
    finalize(paths, "v0001")
    check_scored_once(paths)
    assert outcome(paths) == undisturbed[0]
    return reached


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_some_writes(made: CampaignPaths, tmp_path: Path, undisturbed: tuple[dict[str, Any], int], when: str) -> None:
    """A few points, spread over the run; the slow test has them all."""
    assert undisturbed[1] > 12
    for point in random.Random(when).sample(range(1, undisturbed[1]), 2):
        assert die_and_go_on(made, tmp_path, undisturbed, point, when)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_write(made: CampaignPaths, tmp_path: Path, undisturbed: tuple[dict[str, Any], int], when: str) -> None:
    reached = [die_and_go_on(made, tmp_path, undisturbed, point, when) for point in range(1, undisturbed[1] + 1)]
    # Heartbeats depend on the time a run takes, so the last few points may lie beyond its end.
    assert sum(reached) > 0.8 * len(reached)
