"""A campaign whose jobs are stand-ins, and what must hold of it however it got there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from evo_hpc.paths import COMPLETE, TEMP_PREFIX, CampaignPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.manifest import read_complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_tables

HERE = Path(__file__).resolve().parent
STEPS, EVERY = 12, 4
RULES = """
rules:
  - id: no-kl
    when: [{measure: score.probe_avg_at_k, above: 0}]
    change: {field: optimizer.kl_coef, set: [0.0]}
    hypothesis: Without the KL term the score rises.
    prediction: {metric: dev/avg_at_k, direction: up, by: 0.05}
    rollback: Set {{ field }} back to {{ before }}.
  - id: wider-clip
    when: [{measure: score.probe_avg_at_k, above: 0}]
    change: {field: optimizer.clip_high, set: [0.4]}
    hypothesis: With a wider clip the score rises.
    prediction: {metric: probe/avg_at_k, direction: up, by: 0.05}
    rollback: Set {{ field }} back to {{ before }}.
  - id: huge-steps
    when: [{measure: score.probe_avg_at_k, above: 0}]
    change: {field: optimizer.lr, multiply: [1000]}
    hypothesis: With a huge learning rate the score rises.
    prediction: {metric: dev/avg_at_k, direction: up, by: 0.05}
    rollback: Set {{ field }} back to {{ before }}.
  - id: hotter
    when: [{measure: score.probe_avg_at_k, above: 0}]
    change: {field: rollout.temperature, set: [1.5]}
    hypothesis: Hotter sampling explores more.
    prediction: {metric: score.train_late, direction: up, by: 0.01}
    rollback: Set {{ field }} back to {{ before }}.
"""


def make_search(folder: Path, **cluster: Any) -> CampaignPaths:
    """A campaign that goes on by itself, two versions at a time: it meets keep, merge, revert and a run that is stopped early."""
    paths = make_campaign(folder, **cluster)
    text = paths.campaign_yaml.read_text().replace("dev: 20", "dev: 40").replace("search: {proposals: 0}", "search: {proposals: 5, width: 2}")
    paths.campaign_yaml.write_text(text.replace("watch: {every: 0}", "watch: {every: 10}"))
    paths.recipe_yaml.write_text(paths.recipe_yaml.read_text().replace(f"steps: {STEPS}", "steps: 16"))
    paths.rules_yaml.write_text(RULES)
    return paths


def make_campaign(folder: Path, **cluster: Any) -> CampaignPaths:
    """Small and quick: 12 steps, 20 dev tasks x 2, v0001 and no more."""
    folder.mkdir(parents=True)
    python = folder.parent / "python-of-the-jobs"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{HERE / 'fake_python.py'}' \"$@\"\n")
    python.chmod(0o755)
    (folder / "campaign.yaml").write_text(
        "name: crash\ndomain:\n  name: arithmetic\n  config: {train: 16, probe: 8, dev: 20, sealed: 8}\n"
        "base_model:\n  supervised: {steps: 1}\nevaluation:\n  samples_per_task: 2\nsearch: {proposals: 0}\nwatch: {every: 0}\n"
    )
    (folder / "recipe.yaml").write_text(f"steps: {STEPS}\nreward:\n  weights: {{correct: 1.0}}\ncheckpoint:\n  every: {EVERY}\n")
    settings = {"python": str(python), "max_parallel_jobs": 2, "max_starts": 50, "max_attempts": 20, "grace_seconds": 5, **cluster}
    settings["environment"] = {"PYTHONPATH": str(HERE), **settings.get("environment", {})}
    (folder / "cluster.yaml").write_text(json.dumps(settings))
    return CampaignPaths(folder)


def evo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One `evo-hpc` command, to its end."""
    return subprocess.run([sys.executable, "-m", "evo_hpc.cli", *arguments], capture_output=True, text=True, timeout=180)


def controller(paths: CampaignPaths, *driver: str, **environment: str) -> subprocess.Popen[str]:
    """Start a controller in a process of its own."""
    command = [sys.executable, *(driver or ("-m", "evo_hpc.cli", "run")), str(paths.root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment})


def finish(paths: CampaignPaths, **environment: str) -> str:
    """Run to the end; the output."""
    process = controller(paths, **environment)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def outcome(paths: CampaignPaths) -> dict[str, Any]:
    """What a campaign has decided and measured, without times, processes and counters."""
    comparison = read_json(paths.version("v0001").comparisons()[-1])
    return {
        "interval": comparison["interval"], "alpha": comparison["look"]["alpha"],
        "policy": read_complete(paths.version("v0001").policy(STEPS), hashes=True)["files"],
        "scores": {v: read_json(paths.version(v).evaluation_complete("dev"))["meta"]["avg_at_k"] for v in ("v0000", "v0001")},
    }


def check_sound(paths: CampaignPaths, looks: int = 1) -> None:
    """What must hold at the end of any history: everything once, nothing torn, nothing left running."""
    assert len(paths.looks()) == len(paths.version("v0001").comparisons()) == looks, "one comparison, one look"
    version = paths.version("v0001")
    read_complete(version.train, hashes=True)
    steps = pq.ParquetDataset(sorted(version.steps.glob("*.parquet"))).read().column("step").to_pylist()
    assert sorted(steps) == list(range(1, STEPS + 1)), "every step once, whatever was redone"
    rows = read_tables(sorted(version.rollouts.glob("*.parquet")), ROLLOUT, ["trainer_step", "sample"]).to_pylist()
    assert len(rows) == 2 * STEPS and len({(r["trainer_step"], r["sample"]) for r in rows}) == 2 * STEPS
    for owner in (paths.base, *paths.versions()):
        for job in owner.jobs():
            record = read_json(job.record)
            if record["state"] == "done":
                assert (job.root / f"inc-{record['incarnation']}" / "result.json").exists()
                ended = read_json(job.incarnation(record["incarnation"]).result)["finished_at"]
                later = [read_json(path) for number, path in job.claims() if number > record["incarnation"]]
                # A copy may have begun between the end of the one that counts and the controller's word on it.
                assert all(claim["claimed_at"] > ended for claim in later), "the incarnation that counts held the claim when it ended"
        done = [j for j in owner.jobs() if read_json(j.record)["state"] == "done"]
        kinds = [(j.kind, j.shard) for j in done]
        assert len(kinds) == len(set(kinds)), f"{owner.root}: work done twice: {kinds}"
    for v in paths.versions():
        for suite in ("dev", "probe"):
            read_complete(v.evaluation(suite), hashes=True)
    assert not [p for p in paths.root.rglob(f"{TEMP_PREFIX}*") if p.name != COMPLETE and "checkpoints" not in p.parts], "temporaries left"
    mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(paths.root).encode() in _read(p)]
    assert not mine, f"processes left: {mine}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
