"""Two gloo ranks, data- or tensor-parallel, against one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.reference import worst


MANY: dict[str, Any] = {
    "ratio": "sequence", "loss": "sequence_mean", "entropy_coef": 0.2, "dual_clip": 1.2, "kl": "k2", "importance": "truncated",
    "importance_level": "sequence",
}
"""Options of the loss that look beyond one token, or at the whole vocabulary."""


def launch(
    repository: Path, world_size: int, model: Path, out: Path, tp: int, count: int, options: dict[str, Any], source: Path | None = None
) -> dict[str, Any]:
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.training.distributed_worker", str(model), str(out), str(tp), str(count), json.dumps(options)]
    command += [str(source)] if source else []
    base = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(command, cwd=repository, env={**base, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)[-4000:]
    return torch.load(out / "result.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tp", "count", "folder", "options"), [(1, 9, "tied", MANY), (1, 1, "tied", {}), (2, 9, "tied", {}), (2, 9, "untied", MANY)],
    ids=["dp2-many", "dp2-one-sample", "tp2", "tp2-many"],
)
def test_two_ranks_are_one(repository, request, tmp_path, tp, count, folder, options):
    """count 1 with two data-parallel ranks: one of them has nothing to do, and must still join."""
    model = request.getfixturevalue(f"{folder}_folder")
    one = launch(repository, 1, model, tmp_path / "one", 1, count, options)
    two = launch(repository, 2, model, tmp_path / "two", tp, count, options)
    assert (two["world"]["tensor_parallel_size"], two["world"]["data_parallel_size"]) == (tp, 2 // tp)
    for got, expected in zip(two["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)
    for name, value in one["metrics"].items():
        if name != "micro_batches":
            assert two["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert worst(two["gradients"], one["gradients"]) < 1e-6
    moved = {name: gradient.abs() > 1e-6 for name, gradient in one["gradients"].items()}
    assert max((two["state"][n] - one["state"][n])[m].abs().max().item() for n, m in moved.items() if m.any()) < 1e-6
    # the checkpoint of two ranks continues in one process
    again = launch(repository, 1, model, tmp_path / "again", 1, count, options, tmp_path / "two" / "step-000001")
    assert max((again["final"][n] - two["final"][n])[m].abs().max().item() for n, m in moved.items() if m.any()) < 1e-5
