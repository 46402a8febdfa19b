"""Who has been displaced commits nothing: a controller of an earlier generation, an incarnation whose claim was superseded.

Between a controller's last look at who owns the campaign and a record's appearance lies a window: a fraction of a millisecond for most
records, the time of a copy for published folders, of sbatch for submission records. What falls into it is tried, too: the record then is
one that the next controller finds, or it finds the next one's and stops; the end is the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch import launcher
from evo_hpc.dispatch.attempt import read_attempt
from evo_hpc.dispatch.slurm.judge import judge
from evo_hpc.jobs.claims import Superseded, check_claim, claim
from evo_hpc.jobs.spec import Identity, Result, Start
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.atomic import write_json_once
from evo_hpc.store.processes import ProcessIdentity
from tests.chaos.case import Case, late_cases
from tests.chaos.killing import play, undisturbed
from tests.chaos.test_controller_killed import STRIDE
from tests.chaos.zombie import UNGUARDED


def check_zombies(search: bool) -> dict[str, Any]:
    """What was recorded, once it was seen that zombies wrote nothing and that they had tried whatever was written."""
    [found] = play([{"search": search}], work="tests.chaos.zombie:run")
    assert "answer" in found, found["error"]
    answer: dict[str, Any] = found["answer"]
    did = [(context, label) for context, label, word in answer["zombies"] if word in ("begin", "end") and label not in ("squeue", "sacct")]
    assert not did, f"a displaced controller wrote or commanded: {did}"
    passed = [context for context, _, word in answer["zombies"] if word == "returned" and context != "zombie cost"]
    assert not passed, f"a displaced controller was not refused: {passed}"
    refused = {context.removeprefix("zombie ") for context, _, word in answer["zombies"] if word == "refused"}
    uncovered = {label for context, label in answer["lasting"] if context not in refused and not label.startswith("link controller/generation-")}
    assert not uncovered, f"records that no displaced controller has tried to write: {uncovered}; have zombie.py try what writes them"
    for job, label in answer["by_jobs"]:
        # Another incarnation's folder is nobody's business; results count by the claim, which is write-once.
        assert re.fullmatch(rf"(link|rename) {re.escape(job)}/(claim-\d+\.json|inc-\d+/.*)", label), f"a job writes {label}"
    return answer


def test_displaced_controllers_are_refused_everywhere() -> None:
    """Every action of a whole campaign and of its final claim is tried by an earlier generation first."""
    answer = check_zombies(search=False)
    written = {label.partition(" ")[2] for _, label in answer["lasting"]}
    for name in ("versions/v0001/decision.yaml", "looks/look-000001.json", "versions/v0001/train", "base/policy", "harness/h0001"):
        assert name in written
    assert any("/reads/result-" in name for name in written), "the final claim is part of it"
    assert any(name.endswith("submission-000000.json") for name in written)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_displaced_controllers_are_refused_in_a_search() -> None:
    """Rounds, watches, merges and runs that are ended early, too."""
    answer = check_zombies(search=True)
    written = [label for _, label in answer["lasting"]]
    assert any("/rounds/" in label or "round-" in label for label in written) and any("/watch/" in label for label in written)
    assert not set(UNGUARDED) & {context for context, _ in answer["lasting"]}, "what is not guarded writes nothing"


def late(chosen: list[Case], expected: dict[str, Any]) -> int:
    """Displaced after the last check: how many came that far; all of them ended as an undisturbed campaign does."""
    reached = 0
    for found in play(chosen):
        assert "answer" in found, f"{Case(**found['case'])}\n{found['error']}"
        assert found["answer"]["outcome"] == expected, str(Case(**found["case"]))
        reached += found["answer"]["reached"]
    return reached


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_in_the_window_between_check_and_record() -> None:
    """The old controller stands still there while the new one does all the work, and then goes on."""
    expected, points, _ = undisturbed()
    every = late_cases(points)
    chosen = every[:: max(1, STRIDE // 2)]
    print(f" {len(every)} records and submissions, {len(chosen)} of them tried ", end="", flush=True)
    assert late(chosen, expected) > 0.8 * len(chosen)


PROCESS = ProcessIdentity(host="elsewhere", boot="b", pid=7, start_ticks=1)


def identity(restart: int) -> Identity:
    return Identity(job_name="j", generation=1, start=0, restart=restart, process=PROCESS, claimed_at=0.0)


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    found = CampaignPaths(tmp_path / "c").base.job("supervise", 0)
    write_json_once(found.start(0), Start(number=0, generation=1, written_at=0.0, slurm_name="name").model_dump())
    return found


def test_a_superseded_incarnation_leaves_no_result(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The split brain of a requeued job: the old step ends well after the new one has claimed."""

    def work(*_: object) -> Result:
        claim(job, identity(restart=1))
        return Result(outcome="done")

    monkeypatch.setattr(launcher, "_run", work)
    with pytest.raises(Superseded):
        launcher._incarnation(job, "j", 1, 0, [], None)
    assert not job.incarnation(0).result.exists()
    with pytest.raises(Superseded):
        claim(job, identity(restart=0))
    assert len(job.claims()) == 2


def test_a_result_written_in_the_window_is_read_by_nobody(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the folder of an incarnation that does not hold the attempt."""
    old = claim(job, identity(restart=0))

    def passes(*arguments: Any) -> None:
        check_claim(*arguments)
        claim(job, identity(restart=1))

    passes(job, old)
    write_json_once(old.result, Result(outcome="done", outputs={"of": "the old one"}).model_dump())
    status = judge(read_attempt(job), None, Slurm(), 0.0)
    assert status.phase != "finished" and status.result is None
    new = job.incarnation(1)
    check_claim(job, new)
    write_json_once(new.result, Result(outcome="done", outputs={"of": "the new one"}).model_dump())
    status = judge(read_attempt(job), None, Slurm(), 0.0)
    assert (status.phase, status.incarnation) == ("finished", 1) and status.result is not None and status.result.outputs == {"of": "the new one"}
