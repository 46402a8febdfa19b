"""The README's commands for real: `make demo` with real Megatron and real vLLM, then everything that one looks at it with."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from evo_hpc.config.yaml_io import load_tree
from evo_hpc.controller.claim import final_claim
from evo_hpc.controller.state import read_state
from evo_hpc.lineage.factors import AGENT_FACTORS
from evo_hpc.lineage.tree import node_changes
from evo_hpc.paths import CampaignPaths
from evo_hpc.report.record import read_report_record
from evo_hpc.store.atomic import read_json
from evo_hpc.store.manifest import read_complete
from evo_hpc.store.schemas import METRIC, METRICS, ROLLOUT, STEP
from evo_hpc.store.tables import read_tables

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> tuple[CampaignPaths, str]:
    """The demo campaign, run by `make demo` in a fresh workspace, and what it printed."""
    workspace = tmp_path_factory.mktemp("demo") / "workspace"
    done = subprocess.run(
        ["make", "demo", f"DEMO_ARGS=--workspace {workspace}"], cwd=repository, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return CampaignPaths(workspace / "campaigns" / "demo"), done.stdout


def test_v0001_beats_v0000_and_says_how_sure_it_is(demo: tuple[CampaignPaths, str]) -> None:
    paths, printed = demo
    comparison = read_json(paths.version("v0001").comparisons()[0])
    interval = comparison["interval"]
    assert interval["n_tasks"] == 160 and interval["k"] == 8 and interval["missing_a"] == interval["missing_b"] == 0
    assert interval["ci_low"] > 0 and interval["excludes_zero"] and comparison["interval_t"]["ci_low"] > 0
    assert interval["difference"] == pytest.approx(interval["mean_b"] - interval["mean_a"])
    assert f"{100 * interval['difference']:+.1f} points" in printed and str(paths.root) in printed


def test_it_goes_on_by_itself_one_factor_at_a_time(demo: tuple[CampaignPaths, str]) -> None:
    """Proposals from findings, each a single allowed factor with a prediction; some are kept and some are not."""
    state = read_state(demo[0])
    proposed = [v for v in state.versions.values() if v.node.version.author == "agent"]
    assert len(proposed) >= 3
    for version in proposed:
        own = version.node.version
        if len(own.parents) == 1:
            found = node_changes(state.versions[own.parents[0]].node, version.node)
            assert len(found) == 1 and found[0].factor in AGENT_FACTORS - {"seed"} and own.rule and own.evidence
        else:
            assert len(own.parents) == 2 and {p.decision.decision for n in own.parents if (p := state.versions[n])} <= {"keep", "merge"}
        assert own.hypothesis and own.prediction and own.rollback
        assert version.decision is not None and version.decision.by == "gate" and version.decision.prediction is not None
        assert version.analysis is not None and len(version.watches) >= 1
        for citation in [*own.evidence, *version.decision.evidence]:
            report = read_json(demo[0].root / citation.source)
            assert citation.finding in {f["id"] for f in report["findings"]}, "evidence that can be looked up"
    kinds = [v.decision.decision for v in proposed if v.decision]
    assert {"keep", "merge"} & set(kinds) and {"prune", "revert"} & set(kinds)
    assert len(demo[0].looks()) == sum(len(v.comparisons) for v in state.versions.values())


def test_the_incumbent_beats_the_base_policy(demo: tuple[CampaignPaths, str]) -> None:
    paths = demo[0]
    report = read_report_record(paths)
    incumbent = read_state(paths).incumbent_before(None)
    assert incumbent != "v0001", "the search found something better than where it began"
    assert report.best is not None and report.best.id == incumbent
    task_set = read_json(paths.tasks_manifest)["splits"]["sealed"]["task_set"]
    claim = final_claim(paths, task_set)
    assert claim is not None and claim.result.comparison.ci_low > 0 and claim.result.verdict == "better"
    assert claim.read.candidate.version == incumbent and claim.result.n_tasks == 256 and claim.result.k == 8
    assert len(paths.workspace.sealed_reads(task_set)) == 1, "read once"
    scored = read_json(paths.final.evaluation(1, incumbent) / "COMPLETE.json")["meta"]
    assert scored["n_tasks"] == 256 and scored["missing"] == 0


def test_analyzers_saw_probe_and_train_only(demo: tuple[CampaignPaths, str]) -> None:
    paths = demo[0]
    dev = {json.loads(line)["task_id"] for line in paths.tasks("dev").read_text().splitlines()}
    seen = b"".join(p.read_bytes() for v in paths.versions() for p in (v.root / "analysis").rglob("*") if p.suffix in (".json", ".md"))
    assert seen and not [task for task in dev if task.encode() in seen]


def test_the_report_of_this_very_run(demo: tuple[CampaignPaths, str]) -> None:
    paths = demo[0]
    page, text = paths.report_html.read_text(), paths.report_markdown.read_text()
    assert not re.search(r"(src|href)=[\"'](?!#)|@import|url\(", page), "one file, nothing from elsewhere"
    for version in read_state(paths).versions.values():
        dev = version.evaluations["dev"]
        for shown in (page, text):
            assert version.id in shown and (dev is None or f"{100 * dev.avg_at_k:.1f}" in shown)
    assert "<svg" in page and "sealed" in page


def test_the_base_policy_is_middling(demo: tuple[CampaignPaths, str]) -> None:
    score = read_json(demo[0].version("v0000").evaluation_complete("dev"))["meta"]["avg_at_k"]
    assert 0.2 < score < 0.7, "RL needs something to find: neither nothing nor everything"


def test_progress_was_shown_all_the_time(demo: tuple[CampaignPaths, str]) -> None:
    printed = demo[1]
    seconds = [60 * int(m) + int(s) for m, s in re.findall(r"^(\d\d):(\d\d) ", printed, re.M)]
    assert max(b - a for a, b in zip(seconds, seconds[1:], strict=False)) <= 20
    for word in ("base supervised", "loss", "tok/s", "s left", "v0001 training", "reward"):
        assert word in printed
    assert re.search("v0000 (starting the engine|evaluating)", printed)


def test_training_tables(demo: tuple[CampaignPaths, str]) -> None:
    version = demo[0].version("v0001")
    steps = read_tables(sorted(version.steps.glob("*.parquet")), STEP).sort_by("step").to_pylist()
    assert [s["step"] for s in steps] == list(range(1, 41))
    metrics = read_tables(sorted(version.metrics.glob("*.parquet")), METRIC).to_pylist()
    of_options = {"behaviour_kl", "clip_fraction_dual", "kl_in_reward_mean", *(name for name in METRICS if name.startswith("importance_"))}
    assert {m["name"] for m in metrics} == set(METRICS) - of_options, "what the trainer writes is what is declared, all of it"
    assert max(s["reload_error"] for s in steps) < 1e-3, "the engine had the trainer's weights at every step"
    assert max(s["sampler_logprob_diff_max"] for s in steps if s["sampler_logprob_diff_max"] is not None) < 1e-3
    assert sum(s["updates"] for s in steps[-1:]) == 40 and all(s["seconds_other"] < 0.25 * s["seconds_step"] + 0.2 for s in steps)
    rows = read_tables(sorted(version.rollouts.glob("*.parquet")), ROLLOUT)
    assert len(rows) == 40 * 16 * 8
    frame = rows.select(["trainer_step", "weight_version", "policy_step", "staleness", "seed", "kept", "advantage"]).to_pylist()
    assert all(r["weight_version"] == r["policy_step"] == r["trainer_step"] - 1 and r["staleness"] == 0 for r in frame)
    assert len({r["seed"] for r in frame}) == len(frame), "a seed of its own for every rollout"
    assert len({r["kept"] for r in frame}) == 2 and all(r["advantage"] == 0 for r in frame if not r["kept"])


def test_evaluations_and_effective_configuration(demo: tuple[CampaignPaths, str]) -> None:
    paths = demo[0]
    epochs = set()
    for version in ("v0000", "v0001"):
        for suite, tasks in (("dev", 160), ("probe", 48)):
            folder = paths.version(version).evaluation(suite)
            meta = read_complete(folder, hashes=True)["meta"]
            assert meta["n_tasks"] == tasks and meta["rollouts"] == meta["expected"] == 8 * tasks and meta["missing"] == 0
            rows = pq.read_table(folder / "part-00000.parquet").to_pylist()
            assert {r["evaluator_epoch"] for r in rows} == {meta["epoch"]} and {r["suite"] for r in rows} == {suite}
            epochs.add((suite, meta["epoch"]))
    assert len(epochs) == 2, "one epoch a suite, the same for both versions"
    effective: Any = load_tree(paths.version("v0001").effective_yaml)
    assert effective["trainer"]["dtype"] == effective["rollout"]["dtype"] == "float32"
    assert effective["trainer"]["optimizer"] and effective["recipe"]["optimizer"]["clip_high"] == effective["trainer"]["loss"]["clip_high"] == 0.28
    assert effective["rollout"]["sampling"]["temperature"] == 1.0
    assert paths.version("v0001").train.joinpath("COMPLETE.json").exists()


def test_sealed_tasks_are_outside_and_private(demo: tuple[CampaignPaths, str]) -> None:
    paths = demo[0]
    manifest = read_json(paths.tasks_manifest)
    sealed = paths.workspace.sealed_tasks(manifest["splits"]["sealed"]["task_set"])
    assert sealed.stat().st_mode & 0o777 == 0o600 and len(sealed.read_text().splitlines()) == 256
    ids = [{json.loads(line)["task_id"] for line in path.read_text().splitlines()} for path in
           (sealed, *(paths.tasks(split) for split in ("train", "probe", "dev")))]
    assert len(set.union(*ids)) == sum(map(len, ids)), "no task in two splits"


def test_running_again_changes_nothing(demo: tuple[CampaignPaths, str], repository: Path) -> None:
    paths = demo[0]
    before = {p: p.stat().st_mtime_ns for p in paths.root.rglob("*") if p.is_file() and "controller" not in p.parts}
    workspace = paths.root.parent.parent
    done = subprocess.run([repository / ".venv/bin/evo-hpc", "demo", "--workspace", workspace], capture_output=True, text=True)
    assert done.returncode == 0
    assert {p: p.stat().st_mtime_ns for p in paths.root.rglob("*") if p.is_file() and "controller" not in p.parts} == before


def test_a_run_that_collapses_is_stopped_by_the_watch(demo: tuple[CampaignPaths, str], repository: Path, tmp_path: Path) -> None:
    """The demo again from its base policy, with a learning rate that destroys it: real training, stopped in the middle, pruned unread."""
    source, paths = repository / "campaigns" / "demo", CampaignPaths(tmp_path / "campaigns" / "collapse")
    paths.root.mkdir(parents=True)
    changed = {
        "campaign.yaml": (("path: base/policy", f"path: {demo[0].base.policy}"), ("dev: 160", "dev: 16"), ("probe: 48", "probe: 8"), ("proposals: 4", "proposals: 0")),
        "recipe.yaml": (("lr: 2.0e-5", "lr: 1.0e-2"),), "cluster.yaml": (),
    }
    for name, edits in changed.items():
        text = (source / name).read_text()
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        (paths.root / name).write_text(text)
    done = subprocess.run([repository / ".venv/bin/evo-hpc", "run", paths.root], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    version = read_state(paths).versions["v0001"]
    assert version.stopped_early is not None and version.decision is not None
    step = version.stopped_early.step
    assert step < 40 and version.stopped_early.futile == ["score.collapse"]
    assert (version.decision.decision, version.decision.promoted, version.decision.outcome) == ("prune", False, "stopped_early")
    steps = read_tables(sorted(paths.version("v0001").steps.glob("*.parquet")), STEP, ["step"]).column("step").to_pylist()
    assert sorted(steps) == list(range(1, step + 1)) and not paths.looks() and not paths.version("v0001").evaluation("dev").exists()
    assert "told to stop by the futility rule" in done.stdout
    refused = subprocess.run([repository / ".venv/bin/evo-hpc", "finalize", paths.root], capture_output=True, text=True)
    assert refused.returncode == 2 and "no version has been promoted over v0000" in refused.stderr


def readme_commands(repository: Path) -> list[str]:
    """Every `evo-hpc` line of the README's code blocks, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", (repository / "README.md").read_text(), re.S)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if ".venv/bin/evo-hpc" in line]


def test_every_command_of_the_readme(demo: tuple[CampaignPaths, str], repository: Path, tmp_path: Path) -> None:
    """In a folder laid out like the checkout; the reading ones also with --json. `make demo` ran above, `make test` runs this."""
    (tmp_path / "workspace").symlink_to(demo[0].root.parent.parent)
    (tmp_path / "campaigns").symlink_to(repository / "campaigns")
    (tmp_path / ".venv").symlink_to(repository / ".venv")
    for line in re.findall(r"^(?:mkdir|cp) .*$", (repository / "README.md").read_text(), re.M):
        subprocess.run(shlex.split(line), cwd=tmp_path, check=True)
    mine = subprocess.run([".venv/bin/evo-hpc", "validate", "workspace/campaigns/mine"], cwd=tmp_path, capture_output=True, text=True)
    assert mine.returncode == 0, mine.stdout
    commands = readme_commands(repository)
    assert len(commands) >= 5
    for command in commands:
        if " run " in command and "--dry-run" not in command:
            continue  # test_resume.py runs a campaign of its own
        for words in (shlex.split(command), [*shlex.split(command), "--json"]):
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, f"{words}: {done.stderr}"
            assert done.stdout.strip()
            if "--json" in words:
                assert isinstance(json.loads(done.stdout), dict)


def test_stage_benchmark(demo: tuple[CampaignPaths, str], repository: Path) -> None:
    done = subprocess.run(
        [repository / ".venv/bin/python", repository / "benchmarks/stages.py", demo[0].root, "--json"], capture_output=True, text=True, check=True,
    )
    found = json.loads(done.stdout)
    assert found["seconds"] < 600, "from nothing to the claim in ten minutes"
    assert 0 < found["engine_start_share"] < 0.5 and found["analyzers"]["analyses"] == len(demo[0].versions())
    assert found["analyzers"]["analyses_seconds"] + found["analyzers"]["looks_seconds"] < 0.3 * found["seconds"], "beside training, for the most part"
    assert sum(found["steps"]["v0001"]["share"].values()) == pytest.approx(1.0)


def test_nothing_is_left_running_or_lying_in_shared_memory(demo: tuple[CampaignPaths, str]) -> None:
    root = str(demo[0].root).encode()
    left = [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if os.access(p, os.R_OK) and root in p.read_bytes()]
    assert left == []
    shared = Path("/dev/shm") / f"evo_hpc-{os.getuid()}"
    assert [p for p in shared.glob("*/inc-*")] == []
