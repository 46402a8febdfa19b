"""A real training job of two tensor-parallel ranks that saves in the background: one of them is killed, the end is the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from evo_hpc.config.yaml_io import load_tree, plain
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.processes import find_by_argument
from tests.e2e.test_resume import controller, finish, learned, small_campaign, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.rare, pytest.mark.timeout(900)]


def two_ranks(folder: Path, repository: Path, base: Path | None, *, asynchronous: bool) -> CampaignPaths:
    paths = small_campaign(folder, repository, base)
    recipe = yaml.safe_load(paths.recipe_yaml.read_text())
    recipe["compute"] = {"tensor_parallel": 2, "sequence_parallel": True}
    recipe["checkpoint"]["asynchronous"] = asynchronous
    paths.recipe_yaml.write_text(yaml.safe_dump(recipe))
    cluster = yaml.safe_load(paths.cluster_yaml.read_text()) or {}
    paths.cluster_yaml.write_text(yaml.safe_dump({**cluster, "trainer": {**cluster.get("trainer", {}), "ranks": 2}}))
    return paths


def test_a_killed_rank_of_two_that_save_in_the_background_changes_nothing(tmp_path: Path, repository: Path) -> None:
    undisturbed = two_ranks(tmp_path / "undisturbed", repository, None, asynchronous=False)
    finish(undisturbed)
    told = plain(load_tree(undisturbed.version("v0001").effective_yaml))["trainer"]
    assert (told["ranks"], told["tensor_parallel_size"], told["sequence_parallel"], told["checkpoints_asynchronous"]) == (2, 2, True, False)
    paths = two_ranks(tmp_path / "campaign", repository, undisturbed.base.policy, asynchronous=True)
    process = controller(paths)
    wait_for_step(paths, 5, process)
    [second] = find_by_argument("--job", str(paths.version("v0001").job("train", 0).root), "--role", "trainer", "--rank", "1")
    os.kill(second, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert [read_json(job.record)["state"] for job in paths.version("v0001").jobs() if job.kind == "train"] == ["failed", "done"]
    assert "resumed at step 3" in "".join(log.read_text() for log in paths.version("v0001").root.rglob("logs/trainer.log"))
    a, b = learned(undisturbed), learned(paths)
    assert a["metrics"] == b["metrics"]
    assert a["rollouts"] == b["rollouts"]
    assert a["weights"] == b["weights"]
