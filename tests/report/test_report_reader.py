"""The report of a campaign on disk, at every stage of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evo_hpc.config.yaml_io import dump_model
from evo_hpc.errors import UserError
from evo_hpc.lineage.looks import read_looks
from evo_hpc.paths import CampaignPaths
from evo_hpc.report.html import write_report
from evo_hpc.report.record import read_report_record
from evo_hpc.store.atomic import read_json
from tests.report.campaign_folder import STEPS, look_and_decide, new_campaign, publish_evaluation, publish_training


def both(paths: CampaignPaths) -> str:
    """The two reports, written and read back."""
    write_report(paths, None)
    return paths.report_html.read_text() + paths.report_markdown.read_text()


def test_a_campaign_from_its_first_moment_to_its_decision(tmp_path: Path) -> None:
    paths = new_campaign(tmp_path / "campaigns" / "small")
    text = both(paths)
    assert text.count("Nothing has been scored yet.") == 2 and text.count("No training step has been written yet.") == 2

    publish_training(paths, "v0001")
    report = read_report_record(paths)
    assert report["v0001"].curves and report["v0001"].curves.steps == tuple(range(1, STEPS + 1))
    assert report["v0001"].curves.values["score_mean"][-1] == pytest.approx(0.6) and report["v0001"].curves.values["entropy"] == (None,) * STEPS
    assert report.software["torch"] == ("2.13.0+cpu",)

    for version, right in (("v0000", 0.3), ("v0001", 0.8)):
        for suite in ("dev", "probe"):
            publish_evaluation(paths, version, suite, right)
    text = both(paths)
    assert "nothing has been decided yet" in text and "not decided yet, evaluated: v0001" in text
    before = read_report_record(paths)["v0001"].over_base

    look_and_decide(paths)
    report = read_report_record(paths)
    stored = read_json(paths.version("v0001").comparisons()[0])
    assert report.incumbent == "v0001" and report["v0001"].standing == "kept" and report["v0001"].verdict == "kept"
    assert report["v0001"].over_base and report["v0001"].over_base.model_dump(mode="json") == stored["interval"], "one interval, not two that differ"
    assert before is not None and before.difference == report["v0001"].over_base.difference
    assert report.data_at == read_looks(paths)[0].declared_at
    score = report["v0001"].score
    committed = read_json(paths.version("v0001").evaluation_complete("dev"))["meta"]
    assert score and score.ci_low is not None and score.ci_low < score.avg_at_k == committed["avg_at_k"]
    assert both(paths).count("v0001 is the best version") == 2


def test_out_names_a_folder_and_the_record_is_plain(tmp_path: Path) -> None:
    paths = new_campaign(tmp_path / "campaigns" / "small")
    report = write_report(paths, tmp_path / "elsewhere")
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["report.html", "report.md"] and not paths.reports.exists()
    assert json.loads(json.dumps(report.record()))["versions"][1]["standing"] == "open"
    with pytest.raises(UserError, match="is a file"):
        write_report(paths, paths.campaign_yaml)


def test_a_stopped_run_is_shown_with_its_findings(tmp_path: Path) -> None:
    """As the controller leaves it: a look with a futile finding, a published run without a policy."""
    from evo_hpc.controller.state import read_state
    from evo_hpc.lineage.findings import AnalyzerReport, Finding
    from evo_hpc.store.manifest import publish_folder

    paths = new_campaign(tmp_path / "campaigns" / "small")
    version, run = paths.version("v0001"), read_state(paths).versions["v0001"].run
    finding = Finding(id="score.collapse", severity="critical", measure="score.drop", value=0.4, above=0.1, text="The score collapsed.")
    findings = tmp_path / "findings.json"
    found = AnalyzerReport(analyzer="score", layer="score", version="v0001", up_to_step=4, measures={}, findings=[finding], rows=1)
    findings.write_text(found.model_dump_json())
    publish_folder(version.watch(4), {"score/findings.json": findings}, {
        "version": "v0001", "step": 4, "run": run, "harness": "h0001", "stop_on": ["score.collapse"], "parts": [], "futile": ["score.collapse"],
        "seconds": 1.0,
    })
    publish_folder(version.train, {}, {"version": "v0001", "run": run, "step": 4, "stopped_early": {"step": 4, "findings": ["score.collapse"]}})
    report = read_report_record(paths)
    assert report["v0001"].standing == "stopped early" and report["v0001"].stopped_early and report["v0001"].stopped_early.step == 4
    assert "1 stopped early" in both(paths)


def test_a_damaged_campaign_is_refused_by_name(tmp_path: Path) -> None:
    paths = new_campaign(tmp_path / "campaigns" / "small")
    version = paths.version("v0001").version_yaml
    version.write_bytes(dump_model(read_report_record(paths)["v0001"].version).replace(b"v0000", b"v0042"))
    with pytest.raises(UserError, match="v0042 does not exist"):
        write_report(paths, None)
    assert not paths.reports.exists()
