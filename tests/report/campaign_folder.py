"""A small campaign on disk, written by the package's own writers in this process: no job runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.gate import compare
from evo_hpc.controller.judge import decide
from evo_hpc.controller.state import read_state
from evo_hpc.controller.tasks import make_tasks
from evo_hpc.domains.base import read_tasks
from evo_hpc.evaluation.scores import summarise
from evo_hpc.lineage.decision import write_decision
from evo_hpc.lineage.tree import create_version, load_node
from evo_hpc.lineage.version import Prediction, Version
from evo_hpc.paths import CampaignPaths, VersionPaths, part_name
from evo_hpc.store.manifest import publish_folder
from evo_hpc.store.schemas import ROLLOUT, STEP
from evo_hpc.store.tables import metric_rows, write_table

STEPS, K = 6, 2


class Owner:
    """The right to commit, of a test that is alone."""

    generation = 1

    def check(self) -> None:
        """Nobody else writes here."""


def new_campaign(folder: Path) -> CampaignPaths:
    """Settings, tasks, a base policy, v0000 and v0001; nothing trained or scored."""
    folder.mkdir(parents=True)
    (folder / "campaign.yaml").write_text(
        "name: small\ndescription: made by hand\ndomain:\n  name: arithmetic\n  config: {train: 16, probe: 8, dev: 20, sealed: 8}\n"
        f"evaluation:\n  samples_per_task: {K}\n"
    )
    (folder / "recipe.yaml").write_text(f"steps: {STEPS}\n")
    paths = CampaignPaths(folder)
    make_tasks(paths, load_model(paths.campaign_yaml, Campaign))
    publish_policy(paths.base.policy, "base")
    recipe = load_model(paths.recipe_yaml, Recipe)
    create_version(paths, Version(id="v0000", author="campaign", hypothesis="The base policy."), recipe.model_copy(update={"steps": 0}), None)
    child = Version(id="v0001", parents=["v0000"], author="campaign", hypothesis="GRPO raises the score.",
                    prediction=Prediction(metric="dev/avg_at_k", direction="up", by=0.0))
    create_version(paths, child, recipe, load_node(paths.version("v0000")))
    return paths


def publish_policy(folder: Path, weights: str) -> None:
    source = folder.with_name(f"source-of-{folder.name}")
    source.mkdir(parents=True)
    for name, text in (("config.json", "{}"), ("model.safetensors", weights)):
        (source / name).write_text(text)
    publish_folder(folder, {p.name: p for p in source.iterdir()}, {})


def publish_training(paths: CampaignPaths, version: str) -> None:
    """Steps and a policy."""
    run, found = read_state(paths).versions[version].run, paths.version(version)
    source = paths.root / f"trained-{version}"
    where = {"campaign": "small", "version": version, "attempt": 0, "incarnation": 0}
    rows = [metric_rows(where, step, {"score_mean": 0.3 + 0.05 * step, "kl": 0.001 * step})[1] for step in range(1, STEPS + 1)]
    write_table(source / part_name(1, STEPS), rows, STEP)
    (source / "effective.yaml").write_text("trainer: {torch: 2.13.0+cpu, megatron_core: 0.16.1}\n")
    publish_policy(source / found.policy(STEPS).name, version)
    policy = {f"{found.policy(STEPS).relative_to(found.train)}/{p.name}": p for p in (source / found.policy(STEPS).name).iterdir()}
    publish_folder(found.train, {f"steps/{part_name(1, STEPS)}": source / part_name(1, STEPS), "effective.yaml": source / "effective.yaml", **policy},
                   {"version": version, "run": run, "step": STEPS})


def publish_evaluation(paths: CampaignPaths, version: str, suite: str, right: float) -> None:
    """Rollouts of which about `right` are."""
    tasks, found, rng = read_tasks(paths.tasks(suite)), paths.version(version), random.Random(f"{version} {suite}")
    rows = [_row(version, suite, task.task_id, sample, float(rng.random() < right)) for task in tasks for sample in range(K)]
    source = paths.root / f"scored-{version}-{suite}" / "part-00000.parquet"
    write_table(source, rows, ROLLOUT)
    publish_folder(found.evaluation(suite), {source.name: source}, {
        "version": version, "suite": suite, "epoch": f"epoch-of-{suite}", "policy_step": 0,
        "epoch_components": {"suite": suite, "engine.engine": "vllm", "engine.engine_version": "0.32.0"},
        "policy_identity": read_state(paths).versions[version].policy_identity, **summarise(rows, [task.task_id for task in tasks], K),
    })


def look_and_decide(paths: CampaignPaths) -> None:
    """What the controller does once v0001 is scored."""
    state = read_state(paths)
    compare(paths, state.settings.campaign, state.versions["v0000"], state.versions["v0001"], Owner())  # type: ignore[arg-type]
    state = read_state(paths)
    write_decision(VersionPaths(paths.version("v0001").root).decision_yaml, decide(state, state.versions["v0001"]))


def _row(version: str, suite: str, task: str, sample: int, score: float) -> dict[str, Any]:
    return {
        "campaign": "small", "version": version, "suite": suite, "policy_step": 0, "trainer_step": None, "task_id": task, "group_id": task,
        "sample": sample, "seed": 1, "turns": 1, "prompt_ids": [1], "response_ids": [2], "loss_mask": [1], "logprobs": [-0.1], "text": "x",
        "messages": None, "tool_calls": [], "stop_reason": "stop", "reward": score, "components": [("correct", score)], "verifier_detail": "",
        "error_class": None, "weight_version": 0, "evaluator_epoch": None, "generate_seconds": 0.0, "verify_seconds": 0.0, "prompt_tokens": 1,
        "response_tokens": 1, "truncated": False, "trigrams_total": 0, "trigrams_unique": 0, "longest_token_run": 1, "tool_call_count": 0,
        "tool_error_count": 0, "domain_features": [], "task_attributes": [], "advantage": None, "kept": None, "staleness": None,
    }
