"""Evaluations as records: scores by task from rows, and what a committed evaluation says. Torch-free."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evo_hpc.errors import UserError
from evo_hpc.paths import COMPLETE, VersionPaths
from evo_hpc.store.manifest import Torn, read_complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_tables

SCORE = "correct"
"""The verifier component that a version is scored by."""


class BadEvaluation(UserError):
    """A committed evaluation that cannot be used, or two that cannot be compared."""


@dataclass(frozen=True)
class EvaluationRecord:
    """What COMPLETE.json of an evaluation folder says."""

    version: str
    suite: str
    epoch: str
    epoch_components: dict[str, str]
    policy_step: int
    k: int
    task_ids: list[str]
    rollouts: int
    missing: int
    avg_at_k: float


def summarise(rows: Sequence[Mapping[str, Any]], task_ids: Sequence[str], k: int) -> dict[str, Any]:
    """Avg@k over all tasks; a rollout that is missing or that the verifier failed on counts as a failure and is counted."""
    scored = [row for row in rows if not row["error_class"]]
    total = sum(dict(row["components"])[SCORE] for row in scored)
    expected = len(task_ids) * k
    return {
        "rollouts": len(rows), "expected": expected, "missing": expected - len(scored),
        "avg_at_k": total / expected if expected else 0.0, "k": k, "n_tasks": len(task_ids), "task_ids": list(task_ids),
        "truncated_fraction": sum(bool(row["truncated"]) for row in rows) / len(rows) if rows else 0.0,
        "response_tokens_mean": sum(row["response_tokens"] for row in rows) / len(rows) if rows else 0.0,
        "format_mean": _mean_component(scored, "format"), "hardware": f"{platform.machine()} {platform.processor()}".strip(),
    }


def _mean_component(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [dict(row["components"])[name] for row in rows if name in dict(row["components"])]
    return sum(values) / len(values) if values else None


def read_evaluation(version: VersionPaths, suite: str) -> EvaluationRecord | None:
    """The committed evaluation of a version on a suite, or None. Raises BadEvaluation when it is damaged."""
    folder = version.evaluation(suite)
    if not folder.exists():
        return None
    try:
        meta = read_complete(folder)["meta"]
        return EvaluationRecord(
            version=meta["version"], suite=meta["suite"], epoch=meta["epoch"], epoch_components=meta["epoch_components"],
            policy_step=meta["policy_step"], k=meta["k"], task_ids=meta["task_ids"], rollouts=meta["rollouts"],
            missing=meta["missing"], avg_at_k=meta["avg_at_k"],
        )
    except (Torn, KeyError, TypeError) as error:
        raise BadEvaluation(f"{folder}: damaged evaluation ({error}). Remove the folder: it is published again from the job that made it, "
                            f"or that job is run again; {COMPLETE} is never to be edited") from error


def scores_by_task(version: VersionPaths, suite: str) -> dict[str, list[float]]:
    """Scores of each task's rollouts, in sample order; rollouts without a verdict are left out (the caller counts them)."""
    files = sorted(version.evaluation(suite).glob("*.parquet"))
    table = read_tables(files, ROLLOUT, ["task_id", "sample", "components", "error_class"])
    scores: dict[str, list[tuple[int, float]]] = {}
    for row in table.to_pylist():
        if not row["error_class"]:
            scores.setdefault(row["task_id"], []).append((row["sample"], dict(row["components"])[SCORE]))
    return {task: [score for _, score in sorted(pairs)] for task, pairs in scores.items()}
