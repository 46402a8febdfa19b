"""Evaluations as records: scores by task from rows, and what a committed evaluation says. Torch-free."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from evo_hpc.domains.base import SCORE
from evo_hpc.errors import UserError
from evo_hpc.lineage.identity import digest
from evo_hpc.paths import COMPLETE, VersionPaths
from evo_hpc.store.manifest import Torn, read_complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_tables, write_table

_SUMMARISED = ("task_id", "sample", "error_class", "components", "truncated", "response_tokens")
_ROWS_TOGETHER = 4096
"""Rows that are laid out as one piece of a file: the int32 offsets of a piece hold 2^31 tokens."""


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
    policy_identity: str
    id: str
    """Identity of this evaluation: its scores, policy and epoch (not the time it took)."""


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
        "scores_digest": digest(sorted((row["task_id"], row["sample"], row["error_class"], dict(row["components"])) for row in rows)),
        "component_means": _component_means(scored), "hardware": platform.machine(),
    }


def summarise_table(table: pa.Table, task_ids: Sequence[str], k: int) -> dict[str, Any]:
    """The same, of a table of rollouts."""
    return summarise(table.select(_SUMMARISED).to_pylist(), task_ids, k)


def write_rows(path: Path, table: pa.Table) -> None:
    """Write the rows of an evaluation; the same rows give the same bytes, whatever pieces they were put together from."""
    pieces = [table.slice(start, _ROWS_TOGETHER).combine_chunks() for start in range(0, max(len(table), 1), _ROWS_TOGETHER)]
    write_table(path, pa.concat_tables(pieces), ROLLOUT)


def _component_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["components"]:
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def read_evaluation(version: VersionPaths, suite: str) -> EvaluationRecord | None:
    """The committed evaluation of a version on a suite, or None. Raises BadEvaluation when it is damaged."""
    folder = version.evaluation(suite)
    return read_evaluation_folder(folder, version.id) if folder.exists() else None


def read_evaluation_folder(folder: Path, version: str) -> EvaluationRecord:
    """The committed evaluation in a folder. Raises BadEvaluation when it is damaged or another version's."""
    try:
        meta = read_complete(folder)["meta"]
        if meta["version"] != version:
            raise BadEvaluation(f"{folder}: belongs to {meta['version']}, not to {version}; a copied version starts without eval/: remove it here")
        return EvaluationRecord(
            version=meta["version"], suite=meta["suite"], epoch=meta["epoch"], epoch_components=meta["epoch_components"],
            policy_step=meta["policy_step"], k=meta["k"], task_ids=meta["task_ids"], rollouts=meta["rollouts"],
            missing=meta["missing"], avg_at_k=meta["avg_at_k"], policy_identity=meta["policy_identity"],
            id=digest([meta["scores_digest"], meta["policy_identity"], meta["epoch"]]),
        )
    except (Torn, KeyError, TypeError) as error:
        raise BadEvaluation(f"{folder}: damaged evaluation ({error}). Remove the folder: the version is evaluated again; "
                            f"{COMPLETE} is never to be edited") from error


def scores_by_task(version: VersionPaths, suite: str) -> dict[str, list[float]]:
    """Scores of each task's rollouts, in sample order; rollouts without a verdict are left out (the caller counts them).

    Reads what the completion record lists, hashes checked. Raises Torn.
    """
    return scores_in_folder(version.evaluation(suite))


def scores_in_folder(folder: Path) -> dict[str, list[float]]:
    """The same, of the evaluation in a folder."""
    files = [folder / f["name"] for f in read_complete(folder, hashes=True)["files"] if f["name"].endswith(".parquet")]
    table = read_tables(files, ROLLOUT, ["task_id", "sample", "components", "error_class"])
    scores: dict[str, list[tuple[int, float]]] = {}
    for row in table.to_pylist():
        if not row["error_class"]:
            scores.setdefault(row["task_id"], []).append((row["sample"], dict(row["components"])[SCORE]))
    return {task: [score for _, score in sorted(pairs)] for task, pairs in scores.items()}
