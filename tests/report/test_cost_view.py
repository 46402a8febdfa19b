"""`evo-hpc cost`: the same numbers in the record and in the tables, against the budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evo_hpc.controller.cost import write_cost
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.report.cost_view import cost_record, cost_view
from tests.controller.attempts import NAME, Owner, write_attempt
from tests.report.campaign_folder import new_campaign

SLURM = {"train": {"gpus_per_node": "4"}}


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    """One accounted training of 4 GPU hours, one estimated of 2 that failed, an evaluation without GPUs."""
    paths = new_campaign(tmp_path / "campaign")
    first = write_attempt(paths.version("v0001").job("train", 0), **SLURM)
    run = SlurmJob(name=f"{NAME}-s0", job_id="7", array_index=None, state="COMPLETED", submitted=1000, started=1001, ended=4601, elapsed=3600,
                   tres={"gres/gpu": 4, "node": 1}, source="sacct")
    assert write_cost(first, Owner(), [run], 1e12)  # type: ignore[arg-type]
    write_attempt(paths.version("v0002").job("train", 0), recorded="failed", **SLURM)
    write_attempt(paths.version("v0001").job("evaluate", 0), seconds=1800, **SLURM)
    return paths


def shown(record: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(cost_view(record))
    return console.export_text()


def row(text: str, *words: str) -> list[str]:
    (line,) = [line.split() for line in text.splitlines() if tuple(line.split()[: len(words)]) == words]
    return line[len(words) :]


def test_the_record(paths: CampaignPaths) -> None:
    record = cost_record(paths)
    assert json.loads(json.dumps(record)) == record
    assert [(w["owner"], w["kind"], w["gpu_hours"], w["source"]) for w in record["work"]] == [
        ("v0001", "evaluate", 0.0, "estimated"), ("v0001", "train", 4.0, "accounted"), ("v0002", "train", 2.0, "estimated"),
    ]
    assert [(k["kind"], k["gpu_hours"], k["wall_hours"]) for k in record["kinds"]] == [("evaluate", 0.0, 0.5), ("train", 6.0, 1.5)]
    total = record["total"]
    assert (total["gpu_hours"], total["wall_hours"], total["starts"], total["source"], total["share"]) == (6.0, 2.0, 3, "mixed", 1.0)
    assert sum(w["share"] for w in record["work"]) == pytest.approx(1.0)


def test_the_tables_show_the_record(paths: CampaignPaths) -> None:
    text = shown(cost_record(paths))
    assert row(text, "v0001", "train") == ["4", "1", "1", "66.7", "-", "1", "accounted"], "its published steps are gone"
    assert row(text, "v0002", "train") == ["2", "0.5", "0.5", "33.3", "0.0", "1", "estimated"]
    assert row(text, "v0001", "evaluate") == ["0", "0.5", "0.5", "0.0", "100.0", "1", "estimated"]
    assert row(text, "all", "train") == ["6", "1.5", "1.5", "100.0", "0.0", "2", "mixed"], "of what is known"
    assert row(text, "all", "6") == ["2", "2", "100.0", "50.0", "3", "mixed"]
    assert "No budget is set" in text


def test_against_a_budget(paths: CampaignPaths) -> None:
    with paths.campaign_yaml.open("a") as file:
        file.write("budget: {gpu_hours: 24, version_gpu_hours: 3, grace: 0.5}\n")
    record = cost_record(paths)
    assert record["budget"]["caps"] == [
        {"cap": "gpu_hours", "limit": 24.0, "used": 6.0, "unit": "GPU hours"}, {"cap": "version_gpu_hours", "limit": 3.0, "used": None, "unit": "GPU hours"},
    ]
    assert [(o["scope"], o["used"], o["stops_running_jobs"]) for o in record["budget"]["overruns"]] == [("v0001", 4.0, False)]
    text = shown(record)
    assert "Cap of the campaign: 6 of 24 GPU hours used (25.0 %)" in text
    assert "campaign.yaml:8: v0001 has used 4 of 3 GPU hours" in text


def test_accounting_of_now_counts_where_nothing_is_written_yet(paths: CampaignPaths) -> None:
    job = paths.version("v0003").job("train", 0)
    write_attempt(job, recorded=None, **SLURM)
    run = SlurmJob(name=f"{NAME}-s0", job_id="9", array_index=None, state="PREEMPTED", submitted=1000, started=1001, ended=8201, elapsed=7200,
                   tres={"gres/gpu": 4, "node": 1}, source="sacct")
    record = cost_record(paths, [run])
    (live,) = [w for w in record["work"] if w["owner"] == "v0003"]
    assert (live["gpu_hours"], live["source"], live["goodput"], live["useful_seconds"]) == (8.0, "accounted", None, None)


def test_before_anything_ran(tmp_path: Path) -> None:
    record = cost_record(new_campaign(tmp_path / "campaign"))
    assert record["total"]["share"] is None and record["total"]["source"] == "none"
    assert "has run no jobs yet" in shown(record)


def test_a_folder_that_is_no_campaign(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a campaign folder"):
        cost_record(CampaignPaths(tmp_path))
