"""Evaluates one small campaign on the real engine in several ways, and prints as JSON whether the rollouts are the same."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import evo_hpc.evaluation.job as evaluation_job
from evo_hpc.jobs.context import Stopped
from evo_hpc.paths import COMPLETE, EVALUATION_PART, CampaignPaths
from evo_hpc.rollout.engine import Engine
from evo_hpc.store.manifest import complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_table
from evo_hpc.training.random_init import write_random_weights
from tests.evaluation.evaluating import make_folder, start

SETTINGS: dict[str, Any] = {"suites": ("dev",), "max_response_tokens": 48, "samples_per_task": 8}
COLUMNS = ["task_id", "sample", "seed", "response_ids", "logprobs", "components", "stop_reason"]


def rollouts(folder: Path, chunk: int, cut: int | None = None, **changes: Any) -> tuple[dict[tuple[str, int], Any], int]:
    """All rollouts of one evaluation by task and sample, cut off after `cut` of them and begun again; and how many chunks that was."""
    paths = campaign(folder)
    work_of, sample, finished_one = evaluation_job.work_of, evaluation_job._Evaluator._sample, evaluation_job._Evaluator._finished_one
    chunks: list[range] = []

    def sampled(self: Any, spec: Any, epoch: str, at: range, before: int) -> Any:
        chunks.append(at)
        return sample(self, spec, epoch, at, before)

    def stopping(self: Any, spec: Any, finished: int) -> None:
        self.context.stop_requested = finished == cut
        finished_one(self, spec, finished)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation_job, "work_of", lambda *args: replace(work_of(*args), chunk_rollouts=chunk))
        if cut is not None:
            with patch.context() as stop:
                stop.setattr(evaluation_job._Evaluator, "_finished_one", stopping)
                with pytest.raises(Stopped):
                    evaluation_job.run(start(paths, **SETTINGS, **changes))
        patch.setattr(evaluation_job._Evaluator, "_sample", sampled)
        (made,) = evaluation_job.run(start(paths, **SETTINGS, **changes))["evaluations"]
    rows = read_table(paths.root / made["folder"] / EVALUATION_PART, ROLLOUT, COLUMNS).to_pylist()
    return {(row["task_id"], row["sample"]): row for row in rows}, len(chunks)


def campaign(folder: Path) -> CampaignPaths:
    """A campaign whose policy has weights."""
    paths = make_folder(folder)
    policy = paths.root / "policy-0"
    (policy / COMPLETE).unlink()
    (policy / "model.safetensors").unlink()
    write_random_weights(policy, 0)
    complete(policy, {})
    return paths


def main(folder: Path) -> None:
    """One engine for all, as it must be in one process; its state is another each time."""
    engines: list[Engine] = []

    def the_engine(*args: Any, **kwargs: Any) -> Engine:
        if not engines:
            engines.append(Engine(*args, **kwargs))
        return engines[0]

    evaluation_job.Engine = the_engine  # type: ignore[assignment, misc]
    whole, _ = rollouts(folder / "whole", 1000)
    chunked, chunks = rollouts(folder / "chunked", 16)
    single, _ = rollouts(folder / "single", 8)
    cut, redone = rollouts(folder / "cut", 16, cut=40)
    shards = [rollouts(folder / f"shard-{n}", 16, shard=n, shards=3)[0] for n in range(3)]
    print(json.dumps({
        "rollouts": len(whole), "different": len({tuple(row["response_ids"]) for row in whole.values()}), "chunks": chunks, "redone": redone,
        "same": {
            "chunked": chunked == whole, "single": single == whole, "cut": cut == whole, "shards": {**shards[0], **shards[1], **shards[2]} == whole,
        },
    }))
    engines[0].close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
