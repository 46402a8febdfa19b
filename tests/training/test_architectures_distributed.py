"""Every architecture on two gloo ranks: tensor-, pipeline- and expert-parallel, against transformers. One pair of processes for all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.training.architectures_worker import CONFIG, LAYOUTS
from tests.training.conftest import random_samples
from tests.training.reference import Reference, worst
from tests.training.tiny_models import CASES, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DENSE, SPARSE = [c for c in CASES if "moe" not in c], [c for c in CASES if "moe" in c]
EVERY = [(layout, case) for layout in LAYOUTS for case in (SPARSE if "ep2" in layout else CASES)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for case in CASES:
        write_model(root / case, case)
    return root


@pytest.fixture(scope="module")
def ranks(repository: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    """Folder of the exported models, and each rank's results."""
    out = tmp_path_factory.mktemp("out")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.training.architectures_worker", str(root), str(out)]
    processes = [subprocess.Popen(command, cwd=repository, env={**base, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-4000:]
    return out, [torch.load(out / f"results-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize(("layout", "case"), EVERY)
def test_round_trip_is_bit_equal(root, ranks, layout, case):
    out, results = ranks
    before, after = load_file(root / case / "model.safetensors"), load_file(out / layout / case / "model.safetensors")
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert results[1][layout, case]["exported"] == []
    largest = max(rank[layout, case]["parameters"] for rank in results)
    split = 0.95 if layout == "ep2" else 0.85  # of this little model, the experts are not much
    assert largest < split * sum(tensor.numel() for tensor in before.values()), "nothing was split"


@pytest.mark.parametrize(("layout", "case"), [pair for pair in EVERY if pair[0] != "pp2"])
def test_logprobs_are_those_of_transformers(root, ranks, layout, case):
    reference, samples = Reference(root / case, CONFIG), random_samples(5, seed=3)
    for rank in ranks[1]:
        for sample, values in zip(samples, rank[layout, case]["logprobs"], strict=True):
            with torch.no_grad():
                expected, _ = reference.logprobs(sample, 0.8)
            np.testing.assert_allclose(values[1:], expected.numpy(), atol=5e-5)


@pytest.mark.parametrize(("layout", "case"), [pair for pair in EVERY if pair[0] == "ep2" or pair[0] == "tp2" and pair[1] in DENSE])
def test_gradient_is_that_of_transformers(root, ranks, layout, case):
    reference = Reference(root / case, CONFIG)
    want, got = reference.supervised_step(random_samples(5, seed=3)), ranks[1][0][layout, case]
    assert got["metrics"]["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["metrics"]["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert worst(got["gradients"], reference.gradients()) < 1e-5
    moved = {name: gradient.abs() > 1e-5 for name, gradient in got["gradients"].items()}
    assert max((got["state"][n] - reference.state()[n])[m].abs().max().item() for n, m in moved.items() if m.any()) < 1e-5
