"""The sealed ledger: numbered over campaigns, written before, never rewritten; damage, gaps and edits are named."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.lineage.comparison import Interval
from evo_hpc.lineage.reads import Candidate, Estimate, Read, ReadResult
from evo_hpc.lineage.sealed import BadSealedLedger, declare_read, ledger_problems, place_of, read_ledger, write_result
from evo_hpc.paths import CampaignPaths, Workspace
from evo_hpc.store.atomic import AlreadyWritten

SET = "5ea1"


def draft(campaign: str = "a", **changes: Any) -> Read:
    return Read(**{
        "number": 0, "task_set": SET, "campaign": campaign, "place": f"campaigns/{campaign}", "folder": f"/x/campaigns/{campaign}",
        "baseline": Candidate(version="v0000", policy="p0"), "candidate": Candidate(version="v0001", policy="p1"), "alpha": 0.05,
        "method": "studentized", "draws": 1000, "seed": 3, "evaluator": {"temperature": "1.0"}, "generation": 2, "declared_at": 0.0, **changes,
    })


def result_of(read: Read, difference: float = 0.2) -> ReadResult:
    interval = Interval(
        n_tasks=4, k=2, mean_a=0.5, mean_b=0.5 + difference, difference=difference, ci_low=difference - 0.1, ci_high=difference + 0.1, alpha=0.05,
        p_value=0.01, method="studentized", missing_a=0, missing_b=0, draws=1000, seed=3, degenerate=False, note="", excludes_zero=True,
    )
    estimate = Estimate(mean=0.5, ci_low=0.4, ci_high=0.6, missing=0, note="")
    return ReadResult(
        read=read.number, read_digest=read.digest, evaluator_epoch="e", evaluations=("a", "b"), n_tasks=4, k=2, baseline=estimate,
        candidate=estimate, comparison=interval, comparison_t=interval, verdict="better", earlier=[], generation=2, finished_at=1.0,
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_reads_of_all_campaigns_share_one_numbered_ledger(workspace: Workspace) -> None:
    assert read_ledger(workspace, SET) == []
    first, second = declare_read(workspace, draft("a")), declare_read(workspace, draft("b"))
    other = declare_read(workspace, draft("a", task_set="other"))
    written = write_result(workspace, first, result_of(first))
    entries = read_ledger(workspace, SET)
    assert [(e.read.number, e.read.campaign) for e in entries] == [(1, "a"), (2, "b")] and other.number == 1
    assert entries[0].read == first and entries[0].result == written and entries[1].read == second and entries[1].result is None
    assert second.previous == first.digest and first.declared_at > 0


def test_the_records_are_the_owners_alone(workspace: Workspace) -> None:
    read = declare_read(workspace, draft())
    write_result(workspace, read, result_of(read))
    for path in (workspace.sealed_read(SET, 1), workspace.sealed_result(SET, 1)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_result_is_written_once(workspace: Workspace) -> None:
    read = declare_read(workspace, draft())
    write_result(workspace, read, result_of(read))
    write_result(workspace, read, result_of(read))
    with pytest.raises(AlreadyWritten):
        write_result(workspace, read, result_of(read, difference=0.3))


def test_campaigns_that_declare_at_once_get_numbers_of_their_own(workspace: Workspace) -> None:
    with ThreadPoolExecutor(6) as pool:
        reads = list(pool.map(lambda i: declare_read(workspace, draft(f"c{i}")), range(6)))
    assert sorted(read.number for read in reads) == [1, 2, 3, 4, 5, 6]
    assert {e.read.campaign for e in read_ledger(workspace, SET)} == {f"c{i}" for i in range(6)}


def test_campaigns_are_told_apart_by_their_place_in_the_workspace(tmp_path: Path) -> None:
    assert place_of(CampaignPaths(tmp_path / "campaigns" / "demo")) == "campaigns/demo"
    assert place_of(CampaignPaths(tmp_path / "mine")) == "mine"


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def forge(workspace: Workspace) -> None:
    """Read 1 is replaced by another that is whole in itself."""
    path = workspace.sealed_read(SET, 1)
    read = Read.model_validate_json(path.read_text())
    path.write_text(read.model_copy(update={"campaign": "nobody"}).signed().model_dump_json())


@pytest.mark.parametrize("damage, message", [
    (lambda w: w.sealed_read(SET, 1).unlink(), r"read-000002\.json: read number 2, expected 1"),
    (lambda w: w.sealed_read(SET, 2).unlink(), r"result-000002\.json: result of a read that is not in the ledger"),
    (lambda w: w.sealed_read(SET, 2).write_text("{torn"), r"read-000002\.json:1: not valid JSON"),
    (lambda w: w.sealed_read(SET, 2).write_text("{}"), r"read-000002\.json: not a read \(number: Field required\)"),
    (lambda w: edit(w.sealed_read(SET, 2), alpha=0.5), r"read-000002\.json: edited after it was written"),
    (lambda w: w.sealed_read(SET, 2).rename(w.sealed_read(SET, 3)), r"read-000003\.json: read number 2, expected 2"),
    (forge, r"read-000002\.json: does not follow the read before it"),
    (lambda w: edit(w.sealed_result(SET, 2), n_tasks=400), r"result-000002\.json: edited after it was written .*computes it again"),
    (lambda w: w.sealed_result(SET, 2).write_text("[]"), r"result-000002\.json: not the result of a read"),
    (lambda w: w.sealed_result(SET, 2).rename(w.sealed_result(SET, 1)), r"result-000001\.json: is the result of another read"),
])
def test_a_damaged_or_edited_ledger_is_refused(workspace: Workspace, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    declare_read(workspace, draft())
    second = declare_read(workspace, draft())
    write_result(workspace, second, result_of(second))
    assert ledger_problems(workspace, SET) == []
    damage(workspace)
    for attempt in (lambda: read_ledger(workspace, SET), lambda: declare_read(workspace, draft())):
        with pytest.raises(BadSealedLedger, match=message):
            attempt()
    assert len(ledger_problems(workspace, SET)) >= 1
