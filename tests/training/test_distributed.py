"""Two gloo ranks in each layout, against one process. What needs more than two ranks, or a GPU, is not tried here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.distributed_worker import Case
from tests.training.reference import worst
from tests.training.tiny_models import write_model

MANY: dict[str, Any] = {
    "ratio": "sequence", "loss": "sequence_mean", "entropy_coef": 0.2, "dual_clip": 1.2, "kl": "k2", "importance": "truncated",
    "importance_level": "sequence",
}
"""Options of the loss that look beyond one token, or at the whole vocabulary."""
TP2: dict[str, Any] = {"tensor_parallel": 2}
SP2: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
CP2: dict[str, Any] = {"context_parallel": 2}
PP2: dict[str, Any] = {"pipeline_parallel": 2}
EP2: dict[str, Any] = {"expert_parallel": 2}
NOT_DISTRIBUTED: dict[str, Any] = {"distributed_optimizer": False}

CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "dp2-many": ("tied", 9, MANY, {}),
    "dp2-one-sample": ("tied", 1, {}, {}),
    "dp2-plain-adam": ("untied", 9, {}, NOT_DISTRIBUTED),
    "tp2": ("tied", 9, {}, TP2),
    "tp2-many": ("untied", 9, MANY, TP2),
    "sp2-many": ("tied", 9, MANY, SP2),
    "sp2-untied": ("untied", 9, {}, SP2),
    "cp2-many": ("tied", 9, MANY, CP2),
    "cp2-one-sample": ("untied", 1, {}, CP2),
    "pp2-many": ("tied", 9, MANY, PP2),
    "pp2-untied": ("untied", 9, {}, PP2),
    "ep2": ("moe", 9, {}, EP2),
    "ep2-one-sample": ("moe", 1, MANY, EP2),
    "ep2-plain-adam": ("moe", 9, {}, {**EP2, **NOT_DISTRIBUTED}),
    "ep2-tp2": ("moe", 9, MANY, {**EP2, **SP2}),
    "tp2-full-recompute": ("tied", 9, {}, {**SP2, "recompute": "full"}),
    "cp2-selective-recompute": ("tied", 9, {}, {**CP2, "recompute": "selective"}),
}
"""Model, number of samples, options of the loss, layout. One sample with two data-parallel ranks: one of them has nothing to do,
and must still join."""
RESUMED = ("ep2", "ep2-plain-adam", "sp2-many", "cp2-many", "pp2-many")
"""Also continued in their own layout: of experts Megatron can do no other."""

GROWN = ("dp2-many", "dp2-plain-adam", "tp2", "cp2-many", "pp2-untied")
"""Also continued by two ranks from the checkpoint of one."""


BFLOAT16: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    f"bfloat16-{name}": ("tied", 9, {}, {**compute, "precision": "bfloat16"}) for name, compute in (("dp2", {}), ("sp2", SP2), ("pp2", PP2))
}
FOUR: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "tp2-pp2": ("tied", 9, MANY, {**SP2, **PP2}),
    "tp2-cp2": ("tied", 9, MANY, {**SP2, **CP2}),
    "tp2-dp2": ("untied", 9, MANY, TP2),
    "pp2-cp2": ("tied", 9, MANY, {**PP2, **CP2}),
    "ep2-pp2": ("moe", 9, {}, {**EP2, **PP2}),
    "ep2-cp2": ("moe", 9, MANY, {**EP2, **CP2}),
    "ep4-tp2": ("moe", 3, MANY, {**SP2, "expert_parallel": 4}),
}
"""Of four ranks."""


def launch(repository: Path, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Run the cases one after the other in `world_size` processes; what rank 0 found in each. A rank that fails ends the others."""
    for case in cases:
        Path(case.out).mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.training.distributed_worker", json.dumps([asdict(case) for case in cases])]
    base = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    logs = [Path(cases[0].out) / f"log-{rank}" for rank in range(world_size)]
    ranks = [
        subprocess.Popen(command, cwd=repository, env={**base, "RANK": str(rank)}, stderr=logs[rank].open("w")) for rank in range(world_size)
    ]
    try:
        deadline = time.monotonic() + 400
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        said = "\n".join(log.read_text()[-4000:] for log in logs)
        assert [rank.poll() for rank in ranks] == [0] * world_size, said
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return [torch.load(Path(case.out) / "result.pt", weights_only=False) for case in cases]


def named(repository: Path, world_size: int, cases: list[Case]) -> dict[str, dict[str, Any]]:
    return dict(zip([Path(case.out).name for case in cases], launch(repository, world_size, cases), strict=True))


@pytest.fixture(scope="module")
def folders(tied_folder: Path, untied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"tied": tied_folder, "untied": untied_folder, "moe": write_model(tmp_path_factory.mktemp("sparse") / "moe", "moe")}


@pytest.fixture(scope="module")
def outcomes(repository: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, Any]]:
    """Of each case: one process; two; and one that continues from the checkpoint of two."""
    root = tmp_path_factory.mktemp("layouts")
    one, two, again = list[Case](), list[Case](), list[Case]()
    for name, (folder, count, options, compute) in CASES.items():
        own = {key: value for key, value in compute.items() if key == "distributed_optimizer"}
        model = str(folders[folder])
        one.append(Case(model, str(root / f"one-{name}"), count, options, own))
        two.append(Case(model, str(root / name), count, options, compute, background="many" in name))
        if compute.get("expert_parallel", 1) == 1:
            again.append(Case(model, str(root / f"again-{name}"), count, options, own, source=str(root / name / "step-000001")))
    for name, (folder, count, options, compute) in BFLOAT16.items():
        one.append(Case(str(folders[folder]), str(root / f"one-{name}"), count, options, {"precision": "bfloat16"}))
        two.append(Case(str(folders[folder]), str(root / name), count, options, compute))
    for name in RESUMED:
        case = two[list(CASES).index(name)]
        two.append(replace(case, out=str(root / f"resumed-{name}"), source=f"{case.out}/step-000001"))
    for name in GROWN:
        case = two[list(CASES).index(name)]
        two.append(replace(case, out=str(root / f"grown-{name}"), source=str(root / f"one-{name}" / "step-000001")))
    single, found = named(repository, 1, one), named(repository, 2, two)
    single |= named(repository, 1, again)
    every = {name: (single[f"one-{name}"], found[name], single.get(f"again-{name}")) for name in CASES}
    every |= {name: (single[f"one-{name}"], found[name], None) for name in BFLOAT16}
    every |= {f"grown-{name}": (single[f"one-{name}"], found[name], found[f"grown-{name}"]) for name in GROWN}
    return every | {f"resumed-{name}": (None, found[name], found[f"resumed-{name}"]) for name in RESUMED}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one(outcomes: dict[str, tuple[Any, Any, Any]], name: str) -> None:
    one, two, again = outcomes[name]
    for got, expected in zip(two["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)
    for metric, value in one["metrics"].items():
        if metric != "micro_batches":
            assert two["metrics"][metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    assert two["everywhere"][0].keys() == two["everywhere"][1].keys() == one["again"].keys()
    first, second = ({k: v for k, v in each.items() if k != "micro_batches"} for each in two["everywhere"])
    assert first == second
    assert worst(two["gradients"], one["gradients"]) < 1e-6
    # Adam's first step is lr * sign(g): where g is rounding noise its sign is not comparable
    moved = {weight: gradient.abs() > 1e-6 for weight, gradient in one["gradients"].items()}
    assert max((two["state"][n] - one["state"][n])[m].abs().max().item() for n, m in moved.items() if m.any()) < 1e-6
    assert worst(two["final"], two["state"]) > 1e-4
    if again is None:
        return
    # the checkpoint of two ranks, written while they trained on where it says so, continues in one process
    assert max((again["final"][n] - two["final"][n])[m].abs().max().item() for n, m in moved.items() if m.any()) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GROWN)
def test_two_ranks_go_on_where_one_was(outcomes: dict[str, tuple[Any, Any, Any]], name: str) -> None:
    one, two, grown = outcomes[f"grown-{name}"]
    moved = {weight: gradient.abs() > 1e-6 for weight, gradient in one["gradients"].items()}
    assert max((grown["final"][n] - one["final"][n])[m].abs().max().item() for n, m in moved.items() if m.any()) < 1e-5
    assert grown["optimizer"] == two["optimizer"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RESUMED)
def test_a_layout_resumes_bit_for_bit(outcomes: dict[str, tuple[Any, Any, Any]], name: str) -> None:
    _, undisturbed, resumed = outcomes[f"resumed-{name}"]
    assert worst(resumed["final"], undisturbed["final"]) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BFLOAT16)
def test_two_ranks_are_one_to_the_resolution_of_bfloat16(outcomes: dict[str, tuple[Any, Any, Any]], name: str) -> None:
    one, two, _ = outcomes[name]
    assert (two["world"]["dtype"], two["optimizer"]["master_dtype"]) == ("bfloat16", "float32")
    assert two["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], abs=1e-3)
    assert two["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-2)
    for weight, gradient in one["gradients"].items():
        assert torch.nn.functional.cosine_similarity(two["gradients"][weight].flatten(), gradient.flatten(), dim=0) > 0.99, weight


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(600)
def test_four_ranks_in_two_dimensions_are_one(repository: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    one = [Case(str(folders[folder]), str(tmp_path / f"one-{name}"), count, options) for name, (folder, count, options, _) in FOUR.items()]
    four = [Case(str(folders[folder]), str(tmp_path / name), *rest) for name, (folder, *rest) in FOUR.items()]
    single, found = named(repository, 1, one), named(repository, 4, four)
    for name in FOUR:
        assert worst(found[name]["gradients"], single[f"one-{name}"]["gradients"]) < 1e-6, name
        assert found[name]["metrics"]["loss"] == pytest.approx(single[f"one-{name}"]["metrics"]["loss"], rel=1e-5, abs=1e-6), name
        assert [m["loss"] for m in found[name]["everywhere"]] == [found[name]["again"]["loss"]] * 4, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_layout_is_as_asked_for_and_says_so(outcomes: dict[str, tuple[Any, Any, Any]]) -> None:
    for name in CASES:
        two = outcomes[name][1]
        compute, world = CASES[name][3], two["world"]
        sizes = {f: world[f"{f}_size"] for f in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")}
        assert sizes == {f: compute.get(f, 1) for f in sizes}, name
        model = sizes["tensor_parallel"] * sizes["pipeline_parallel"] * sizes["context_parallel"]
        assert world["data_parallel_size"] * model == 2, name
        assert world["sequence_parallel"] == compute.get("sequence_parallel", False), name
        assert world["recompute"] == compute.get("recompute", "none"), name
        shared = world["data_parallel_size"] * sizes["context_parallel"] == 2 and compute.get("distributed_optimizer", True)
        assert two["optimizer"]["distributed_optimizer"] == shared, name
        assert world["layers_here"] == 2 // sizes["pipeline_parallel"], name
