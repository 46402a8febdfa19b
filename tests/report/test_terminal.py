"""What the commands show: the same numbers as text and as JSON, hostile text as it is, one surface that does not change unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evo_hpc.controller.loop import Controller
from evo_hpc.controller.state import read_state
from evo_hpc.paths import CampaignPaths
from evo_hpc.report.live import describe
from evo_hpc.report.views import status_record
from tests.crash.campaign import evo, finish, make_campaign


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> CampaignPaths:
    paths = make_campaign(tmp_path_factory.mktemp("shown") / "campaign", trainer={"threads": 2})  # its stand-ins say that they run with 1
    finish(paths)
    return paths


def test_the_surface() -> None:
    """Commands and options as users script them; changing one is a decision."""
    import typer

    from evo_hpc.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    surface = {name: sorted(option for p in command.params for option in p.opts) for name, command in commands.items()}
    assert surface == {
        "demo": ["--json", "--workspace"], "run": ["--dry-run", "--json", "--take-over", "--until", "campaign"], "status": ["--json", "campaign"],
        "lineage": ["--json", "campaign"], "analyze": ["--json", "campaign", "version"], "finalize": ["--again", "--json", "campaign"],
        "report": ["--json", "--out", "campaign"], "doctor": ["--cluster", "--json", "campaign"], "cost": ["--json", "campaign"],
        "launch": ["--dry-run", "--json", "--take-over", "--until", "campaign"], "stop": ["--json", "--now", "--reason", "campaign"],
        "pause": ["--json", "--reason", "campaign"], "resume": ["--json", "campaign"],
        "show": ["--json", "campaign", "version"], "diff": ["--json", "after", "before", "campaign"], "validate": ["--json", "campaign"],
        "export": ["--json", "--out", "campaign", "tracker", "versions"],
    }


def test_before_anything_ran(tmp_path: Path) -> None:
    paths = make_campaign(tmp_path / "campaign")
    assert "No controller has run this campaign yet" in evo("status", str(paths.root)).stdout
    record = json.loads(evo("status", str(paths.root), "--json").stdout)
    assert record["controller"] is None and record["versions"] == [] and record["tasks"] is None
    assert sorted(p.name for p in paths.root.iterdir()) == ["campaign.yaml", "cluster.yaml", "recipe.yaml"], "looking writes nothing"


def test_a_setting_that_the_job_did_not_run_with_is_shown(campaign: CampaignPaths) -> None:
    record = json.loads(evo("show", str(campaign.root), "v0001", "--json").stdout)
    (finding,) = [f for f in record["findings"] if f["id"] == "optimisation.not_effective"]
    assert finding["severity"] == "critical" and finding["text"].startswith("cluster.trainer.threads: 2 was asked for, and the job ran with 1 (trainer.threads)")
    assert "optimisation.not_effective cluster.trainer.threads: 2 was asked for" in evo("show", str(campaign.root), "v0001").stdout


def test_status_text_and_json_agree(campaign: CampaignPaths) -> None:
    text = evo("status", str(campaign.root)).stdout
    record = json.loads(evo("status", str(campaign.root), "--json").stdout)
    scores = {v["id"]: v["evaluations"]["dev"]["avg_at_k"] for v in record["versions"]}
    assert scores == {"v0000": 0.3, "v0001": 0.6}
    for version, score in scores.items():
        assert any(line.startswith(version) and f"{100 * score:.1f}" in line for line in text.splitlines())
    interval = record["versions"][1]["comparisons"][0]["interval"]
    for number in ("difference", "ci_low", "ci_high"):
        assert f"{100 * interval[number]:+.1f}" in text
    assert record["looks"] == 1 and f"{record['alpha_spent']:.4f}" in text and record["controller"]["running"] is False


def test_show_and_diff(campaign: CampaignPaths) -> None:
    shown = evo("show", str(campaign.root), "v0001").stdout
    for word in ("parents     v0000", "Avg@2 60.0 %", "20 tasks", "0 missing", "steps", "budget", "train-000", "done"):
        assert word in shown, shown
    record = json.loads(evo("show", str(campaign.root), "v0001", "--json").stdout)
    assert record["changes"] == [{"field": "steps", "before": 0, "after": 12, "factor": "budget"}]
    assert json.loads(evo("diff", str(campaign.root), "v0001", "v0000", "--json").stdout)["changes"][0]["after"] == 0
    assert "have the same recipe" in evo("diff", str(campaign.root), "v0001", "v0001").stdout


def test_an_unknown_version_is_named_with_those_that_exist(campaign: CampaignPaths) -> None:
    done = evo("show", str(campaign.root), "v0009")
    assert done.returncode == 2 and "v0009: no such version" in done.stderr and "v0000, v0001" in done.stderr


def test_a_reader_that_goes_away_is_no_error(campaign: CampaignPaths) -> None:
    command = f"'{sys.executable}' -m evo_hpc.cli status --json '{campaign.root}' | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stdout.strip() == "{" and "Traceback" not in done.stderr


def test_hostile_text_is_shown_as_it_is(campaign: CampaignPaths, tmp_path: Path) -> None:
    import shutil

    copy = CampaignPaths(tmp_path / "campaign")
    shutil.copytree(campaign.root, copy.root)
    hostile = "[red]bold[/red] [/nothing] {{ 7 * 7 }} \u202e"
    yaml = copy.version("v0001").version_yaml
    lines = [line if not line.startswith("hypothesis:") else f"hypothesis: {json.dumps(hostile)}" for line in yaml.read_text().splitlines()]
    yaml.write_text("\n".join(line for line in lines if not line.startswith("  ")) + "\n")
    text = yaml.read_text()
    yaml.write_text(text.replace("parents:", "parents: [v0000]").replace("prediction:", "prediction: null"))
    done = evo("show", str(copy.root), "v0001")
    assert done.returncode == 0, done.stderr
    assert "[red]bold[/red] [/nothing] {{ 7 * 7 }}" in done.stdout
    assert json.loads(evo("show", str(copy.root), "v0001", "--json").stdout)["hypothesis"] == hostile


def test_a_running_campaign_shows_its_jobs(tmp_path: Path) -> None:
    """Looked at in the middle, by the controller's own watcher: jobs with stage and step, and events in words."""
    paths = make_campaign(tmp_path / "campaign", environment={"FAKE_STEP_SECONDS": "0.1"})
    seen, words = [], []

    def watch(state, plan, events) -> None:  # type: ignore[no-untyped-def]
        seen.extend(job for job in status_record(state)["jobs"] if job["state"] == "running" and job.get("progress"))
        words.extend(str(text) for event in events if (text := describe(event)) is not None)

    Controller(paths, watch).run()
    stages = {(job["owner"], job["progress"].get("stage")) for job in seen}
    assert ("v0001", "training") in stages and any(job["progress"].get("step") for job in seen)
    assert words[0] == "tasks made: 16 train, 8 probe, 20 dev, 8 sealed"
    assert any(w.startswith("v0001 compared with v0000 on dev: +30.0 points [") for w in words)
    assert status_record(read_state(paths))["controller"]["running"] is False
