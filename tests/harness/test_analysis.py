"""Analyses and looks on disk: they appear at once, are read back whole, and are refused when they do not fit the version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from evo_hpc.errors import UserError
from evo_hpc.harness.analysis import BadAnalysis, publish_analysis, read_analysis, read_watches, run_analysis, run_watch, version_inputs
from evo_hpc.harness.harness import Harness, discover, make_harness
from evo_hpc.harness.inputs import Inputs
from evo_hpc.harness.job import run as analyse_in_a_job
from evo_hpc.jobs.claims import claim
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.spec import Identity, JobSpec
from evo_hpc.paths import CampaignPaths, ExchangePaths, JobPaths, VersionPaths, part_name
from evo_hpc.store.manifest import complete
from evo_hpc.store.processes import ProcessIdentity
from evo_hpc.store.schemas import ROLLOUT, STEP
from evo_hpc.store.tables import write_table
from tests.harness.data import group, rollout, step_row, write_analyzer


def train(version: VersionPaths, scores: list[float]) -> None:
    """A published training run of two parts."""
    half = len(scores) // 2
    for first, last in ((1, half), (half + 1, len(scores))):
        steps = range(first, last + 1)
        write_table(version.steps / part_name(first, last), [step_row(s, score_mean=scores[s - 1]) for s in steps], STEP, durable=False)
        rows = [row for s in steps for row in group("t0", [1, 0], s)]
        write_table(version.rollouts / part_name(first, last), rows, ROLLOUT, durable=False)
    version.effective_yaml.write_text("recipe: {optimizer: {lr: 1}}\ntrainer: {optimizer: {lr_max: 1}}\n")
    (version.train / "policy").mkdir()
    (version.train / "policy/x.parquet").touch()
    complete(version.train, {"version": version.id})


def evaluate(version: VersionPaths, suite: str) -> None:
    """A published evaluation."""
    rows = [rollout(f"t{t}", i, float(i > t), suite=suite) for t in range(3) for i in range(4)]
    write_table(version.evaluation(suite) / "part-00000.parquet", rows, ROLLOUT, durable=False)
    complete(version.evaluation(suite), {"version": version.id})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[CampaignPaths, Harness]:
    """A campaign whose v0001 collapsed, analysed by h0001 of the built-in `score` alone (the others are replaced by a small one)."""
    paths = CampaignPaths(tmp_path_factory.mktemp("c"))
    for name in ("signal", "length", "optimisation"):
        write_analyzer(paths.analyzers_folder / name)
    harness = make_harness(paths, discover(paths), 1)
    version = paths.version("v0001")
    train(version, [0.8] * 5 + [0.2] * 5)
    for suite in ("probe", "dev"):
        evaluate(version, suite)
    run_analysis(version, harness, version_inputs(version))
    return paths, harness


@pytest.fixture
def version(made: tuple[CampaignPaths, Harness], tmp_path: Path) -> VersionPaths:
    shutil.copytree(made[0].root, tmp_path / "c")
    return CampaignPaths(tmp_path / "c").version("v0001")


def test_inputs_are_what_is_published_and_never_dev(version: VersionPaths) -> None:
    inputs = version_inputs(version)
    assert [p.name for p in inputs.steps] == [p.name for p in inputs.train] == ["part-000001-000005.parquet", "part-000006-000010.parquet"]
    assert inputs.probe == (version.evaluation("probe") / "part-00000.parquet",) and inputs.effective == version.effective_yaml
    assert version_inputs(VersionPaths(version.root.parent / "v0009")) == Inputs()
    (version.steps / "part-000001-000005.parquet").write_bytes(b"short")
    with pytest.raises(BadAnalysis, match="train: cannot be analysed, it is damaged"):
        version_inputs(version)


def test_an_analysis_is_read_back(version: VersionPaths, made: tuple[CampaignPaths, Harness]) -> None:
    found = read_analysis(version, "h0001")
    assert found is not None and (found.version, found.harness) == ("v0001", "h0001")
    assert list(found.reports) == ["length", "optimisation", "score", "signal"]
    assert found.measures["score.train_score_late"].value == pytest.approx(0.2) and found.measures["signal.score"].value == pytest.approx(0.5)
    assert [f.id for f in found.findings] == ["score.collapse", "score.fell_from_peak"] and found.seconds > 0
    [first, _] = found.citations(version.root.parent.parent)
    assert (first.finding, first.version, first.threshold, first.source) == (
        "score.collapse", "v0001", 0.5, "versions/v0001/analysis/h0001/score/findings.json",
    )
    assert found.paths("score").report.read_text().startswith("# Score of v0001") and found.meta["harness_digest"] == made[1].digest
    assert read_analysis(version, "h0002") is None


def test_an_analysis_is_made_once(version: VersionPaths, made: tuple[CampaignPaths, Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evo_hpc.harness.analysis.analyse", None)
    assert run_analysis(version, made[1], version_inputs(version)).findings


def test_only_published_bytes_are_analysed(version: VersionPaths, made: tuple[CampaignPaths, Harness], tmp_path: Path) -> None:
    inputs = version_inputs(version)
    shutil.rmtree(version.analysis("h0001"))
    data = inputs.steps[0].read_bytes()
    inputs.steps[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BadAnalysis, match="content differs from the hash"):
        run_analysis(version, made[1], inputs)
    with pytest.raises(BadAnalysis, match="no file of what v0001 has published"):
        run_analysis(version, made[1], Inputs(probe=(version.evaluation("dev") / "part-00000.parquet",)))
    assert not version.analysis("h0001").exists()


@pytest.mark.parametrize("harm", ["edit", "remove", "other version", "meta", "other results", "other harness"])
def test_an_analysis_that_does_not_fit_is_refused(version: VersionPaths, harm: str) -> None:
    folder, name = version.analysis("h0001"), "h0001"
    record = json.loads((folder / "COMPLETE.json").read_text())
    if harm == "edit":
        text = (folder / "score/findings.json").read_text()
        (folder / "score/findings.json").write_text(text.replace('"critical"', '"harmless"'))
    elif harm == "remove":
        (folder / "score/table.parquet").unlink()
    elif harm == "other version":
        folder.parent.rename(version.root.parent / "analysis")
        version = VersionPaths(version.root.parent / "v0002")
        version.root.mkdir()
        (version.root.parent / "analysis").rename(version.root / "analysis")
    elif harm == "meta":
        del record["meta"]["inputs_digest"]
        (folder / "COMPLETE.json").write_text(json.dumps(record))
    elif harm == "other results":
        shutil.rmtree(version.train)
        train(version, [0.3] * 10)
    else:
        name = "h0002"
        folder.rename(folder.with_name(name))
    with pytest.raises(BadAnalysis, match=r"remove it here|[Rr]emove the folder"):
        read_analysis(version, name)


def test_the_watch_looks_with_the_live_analyzers(version: VersionPaths, made: tuple[CampaignPaths, Harness]) -> None:
    files = version_inputs(version)
    parts = [{"path": str(path), "sha256": "0"} for path in files.steps]
    for step in (7, 10):
        so_far = Inputs(steps=files.steps, train=files.train)
        look = run_watch(version, made[1], so_far, step=step, run="r", stop_on=["score.collapse", "signal.x"], parts=parts)
        assert list(look.reports) == ["score"] and (look.step, look.run, look.parts) == (step, "r", parts)
        assert look.stop_on == ["score.collapse", "signal.x"]
    first, second = read_watches(version)
    assert (first.step, first.futile, first.findings) == (7, [], [])  # too few steps to say
    assert (second.futile, [f.id for f in second.findings]) == (["score.collapse"], ["score.collapse", "score.fell_from_peak"])
    assert second.reports["score"].up_to_step == 10 and second.measures["score.probe_avg_at_k"].value is None
    assert run_watch(version, made[1], Inputs(), step=10, run="r", stop_on=[], parts=[]).futile == ["score.collapse"]  # once is for good
    version.watch(10).rename(version.watch(11))
    with pytest.raises(BadAnalysis, match="a look at step 10"):
        read_watches(version)


def in_a_job(version: VersionPaths, digest: str) -> tuple[RoleContext, Path]:
    """What the job of a version's analysis is given, and where it writes."""
    campaign = CampaignPaths(version.root.parent.parent)
    job = version.job("analyse", 0)
    incarnation = claim(job_folder(job), Identity(job_name="j", generation=1, start=0, process=ProcessIdentity.current(), claimed_at=0.0))
    spec = JobSpec.model_construct(kind="analyse", campaign="c", owner=version.id, params={"harness": "h0001", "digest": digest})
    return RoleContext("analyst", job, incarnation, spec, ExchangePaths(campaign.root / "exchange")), incarnation.analysis


def job_folder(job: JobPaths) -> JobPaths:
    job.root.mkdir(parents=True)
    return job


def test_a_job_finds_what_the_controller_would(version: VersionPaths, made: tuple[CampaignPaths, Harness]) -> None:
    before = read_analysis(version, "h0001")
    assert before is not None
    shutil.rmtree(version.analysis("h0001"))
    context, folder = in_a_job(version, made[1].digest)
    outputs = analyse_in_a_job(context)
    assert outputs == {"harness": "h0001", "folder": context.relative(folder)} and read_analysis(version, "h0001") is None
    for _ in range(2):
        publish_analysis(version, "h0001", folder)
        found = read_analysis(version, "h0001")
        assert found is not None and found.reports == before.reports and found.inputs_digest == before.inputs_digest
    # One of results that the version no longer has makes way.
    old = json.loads((version.analysis("h0001") / "COMPLETE.json").read_text())
    old["meta"]["inputs_digest"] = "of others"
    (version.analysis("h0001") / "COMPLETE.json").write_text(json.dumps(old))
    publish_analysis(version, "h0001", folder)
    assert read_analysis(version, "h0001") is not None and len(list((version.root / "analysis").iterdir())) == 2


def test_a_job_of_another_harness_is_refused(version: VersionPaths) -> None:
    context, folder = in_a_job(version, "edited")
    with pytest.raises(UserError, match="harness h0001 is no longer the one that this analysis was asked for"):
        analyse_in_a_job(context)
    assert not folder.exists()


def test_a_job_that_is_told_to_stop_leaves_nothing(version: VersionPaths, made: tuple[CampaignPaths, Harness]) -> None:
    context, folder = in_a_job(version, made[1].digest)
    context.stop_requested = True
    with pytest.raises(Stopped):
        analyse_in_a_job(context)
    assert not folder.exists()
