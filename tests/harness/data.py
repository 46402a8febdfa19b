"""Tables as a training run and an evaluation write them, and analyzers as folders, for the tests of the harness."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from evo_hpc.assets import asset_dir
from evo_hpc.harness import child
from evo_hpc.harness.inputs import Inputs, effective_rows
from evo_hpc.harness.manifest import Analyzer, load_analyzer
from evo_hpc.harness.protocol import Outcome, Request
from evo_hpc.lineage.findings import AnalyzerReport
from evo_hpc.paths import AnalysisPaths
from evo_hpc.store.schemas import ROLLOUT, STEP
from evo_hpc.store.tables import write_table

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def rollout(task: str, sample: int, reward: float | None, *, suite: str = "train", step: int | None = None, **changes: Any) -> dict[str, Any]:
    """One row of a ROLLOUT table; right where its reward is at least 1."""
    row = {
        "campaign": "c", "version": "v0001", "suite": suite, "policy_step": step or 0, "trainer_step": step, "task_id": task,
        "group_id": f"{task}@{step}", "sample": sample, "seed": sample, "turns": 1, "prompt_ids": [1], "response_ids": [2], "loss_mask": [1],
        "logprobs": [-0.5], "text": "1", "messages": None, "tool_calls": [], "stop_reason": "stop", "reward": reward,
        "components": [] if reward is None else [("correct", float(reward >= 1))], "verifier_detail": None,
        "error_class": "verifier" if reward is None else None, "weight_version": 0, "evaluator_epoch": None, "generate_seconds": 0.1,
        "verify_seconds": 0.1, "prompt_tokens": 5, "response_tokens": 20, "truncated": False, "trigrams_total": 18, "trigrams_unique": 17,
        "longest_token_run": 1, "tool_call_count": 0, "tool_error_count": 0, "domain_features": [],
        "task_attributes": [("digits", str(3 + int(task[-1]) % 2))],
        "advantage": 0.0 if reward is None else reward - 0.5, "kept": True, "staleness": 0,
    }
    return {**row, **changes}


def group(task: str, rewards: Sequence[float | None], step: int, **changes: Any) -> list[dict[str, Any]]:
    """The rollouts of one prompt in one step, with what the trainer makes of them."""
    known = [reward for reward in rewards if reward is not None]
    mean, kept = sum(known) / len(known), len(known) == len(rewards) and max(known) > min(known)
    return [
        rollout(task, sample, reward, step=step, **{"advantage": reward - mean if kept else 0.0, "kept": kept, **changes})
        for sample, reward in enumerate(rewards)
    ]


def step_row(step: int, **metrics: float | None) -> dict[str, Any]:
    """One row of a STEP table: a healthy run, but for `metrics`."""
    healthy = {
        "score_mean": 0.5, "reward_mean": 0.5, "groups": 16.0, "entropy": 1.0, "kl": 0.01, "clip_fraction_low": 0.01, "clip_fraction_high": 0.01,
        "ratio_max": 1.5, "ratio_min": 0.7, "approx_kl_old": 0.001, "grad_norm": 0.5, "grad_clipped": float(step % 5 == 0), "lr": 1e-4,
        "trained_tokens": 1000.0, "sampler_kl": 1e-9, "sampler_logprob_diff_max": 1e-5, "reload_error": 1e-6, "zero_variance_fraction": 0.1,
        "truncated_fraction": 0.01, "loss": -0.01,
    }
    return {"campaign": "c", "version": "v0001", "attempt": 0, "incarnation": 0, "step": step, "time": NOON, **healthy, **metrics}


def write_inputs(
    folder: Path, *, steps: Sequence[Mapping[str, Any]] = (), train: Sequence[Mapping[str, Any]] = (), probe: Sequence[Mapping[str, Any]] = (),
    effective: str | None = None,
) -> Inputs:
    """Files of the tables that have rows."""
    found: dict[str, Any] = {}
    for name, rows, schema in (("steps", steps, STEP), ("train", train, ROLLOUT), ("probe", probe, ROLLOUT)):
        if rows:
            write_table(folder / f"{name}.parquet", rows, schema, durable=False)
            found[name] = (folder / f"{name}.parquet",)
    if effective is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "effective.yaml").write_text(effective)
        found["effective"] = folder / "effective.yaml"
    return Inputs(**found)


@functools.cache
def built_in(name: str) -> Analyzer:
    """An analyzer that ships with the package."""
    return load_analyzer(asset_dir("analyzers") / name)


def write_analyzer(
    folder: Path, *, inputs: str = "[steps]", query: str = "SELECT step, score_mean FROM steps ORDER BY step",
    measures: str = "SELECT avg(score_mean) AS score FROM result", report: str = "{{ version }}: {{ measures.score | number }}\n", more: str = "",
) -> Path:
    """An analyzer of a campaign's own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "analyzer.yaml").write_text(f"name: {folder.name}\nlayer: score\nquestion: How good?\ninputs: {inputs}\n{more}")
    (folder / "query.sql.j2").write_text(query)
    (folder / "measures.sql.j2").write_text(measures)
    (folder / "report.md.j2").write_text(report)
    return folder


def run_here(analyzer: Analyzer, inputs: Inputs, out: Path, *, up_to_step: int | None = None, dry: bool = False) -> Outcome:
    """What the process that runs analyzers does, without the process."""
    out.mkdir(parents=True, exist_ok=True)
    return child.run(Request(
        analyzers=[(str(analyzer.paths.root), analyzer.manifest)], **{n: [str(p) for p in getattr(inputs, n)] for n in ("steps", "train", "probe")},
        effective=effective_rows(inputs.effective), version="v0001", up_to_step=up_to_step, out=str(out), dry=dry,
        cpu_seconds=1, memory_bytes=1, file_bytes=1, parent=os.getpid(),
    ))


def report_of(analyzer: Analyzer, inputs: Inputs, out: Path, *, up_to_step: int | None = None) -> AnalyzerReport:
    """What an analyzer says of the inputs."""
    outcome = run_here(analyzer, inputs, out, up_to_step=up_to_step)
    assert outcome.state == "done", outcome.message
    return AnalyzerReport.model_validate_json(AnalysisPaths(out / analyzer.name).findings.read_bytes())
