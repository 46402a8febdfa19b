from __future__ import annotations

import json
import multiprocessing
import shutil

import pytest
import torch

from evo_hpc.config import recipe
from evo_hpc.paths import CHECKPOINT_EXTRA, COMPLETE
from evo_hpc.training import checkpoint, retention
from evo_hpc.training.errors import CheckpointError
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.steps import grpo_step
from tests.training.conftest import random_samples, write_qwen3
from tests.training.reference import worst

CONFIG = recipe.Optimizer(lr=1e-3, lr_warmup_updates=3, weight_decay=0.1, kl_coef=0.0)


def build(folder, config=CONFIG):
    policy = Policy.from_hf(folder, trainable=True, token_budget=128)
    return policy, Optimizer(policy, config)


def train(pair, steps):
    return [grpo_step(*pair, random_samples(6, seed=step), CONFIG, temperature=1.0) for step in steps]


@pytest.fixture(scope="module")
def saved(tied_folder, tmp_path_factory):
    """A parent with checkpoints of steps 1, 2 and 3, and the policy trained on to step 4."""
    parent = tmp_path_factory.mktemp("check points")
    pair = build(tied_folder)
    for step in (1, 2, 3):
        train(pair, [step])
        checkpoint.save(parent / f"step-{step:06d}", *pair, {"step": step, "loss": 0.1})
    train(pair, [4])
    return parent, pair[0].export_state()


@pytest.fixture
def copies(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoints")


@pytest.mark.parametrize("used_before", [False, True])
def test_resume_is_bit_identical(saved, tied_folder, used_before):
    parent, expected = saved
    pair = build(tied_folder)
    if used_before:
        train(pair, [50, 51, 52, 53])
    extra = checkpoint.load(parent / "step-000002", *pair)
    assert extra == {"step": 2, "loss": 0.1} and pair[1].updates == 2
    metrics = train(pair, [3, 4])
    assert metrics[0]["lr"] == pytest.approx(1e-3) and worst(pair[0].export_state(), expected) == 0.0


def test_random_states_are_restored(tied_folder, tmp_path):
    pair = build(tied_folder)
    train(pair, [1])
    torch.manual_seed(5)
    checkpoint.save(tmp_path / "step-000001", *pair, {})
    expected = torch.rand(3)
    torch.manual_seed(6)
    checkpoint.load(tmp_path / "step-000001", *pair)
    assert torch.equal(torch.rand(3), expected)


def test_save_starts_no_process_and_leaves_only_the_folder(tied_folder, tmp_path):
    pair = build(tied_folder)
    train(pair, [1])
    checkpoint.save(tmp_path / "step-000001", *pair, {})
    assert multiprocessing.active_children() == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_newest_complete_passes_over_torn_ones_and_says_why(copies):
    torn = copies / "step-000003"
    (torn / COMPLETE).unlink()
    (copies / "step-000004").mkdir()
    found, skipped = checkpoint.newest_complete(copies)
    assert found == copies / "step-000002"
    assert [path for path, _ in skipped] == [copies / "step-000004", torn]
    assert all(COMPLETE in reason for _, reason in skipped)


def test_newest_complete_of_nothing(tmp_path):
    assert checkpoint.newest_complete(tmp_path / "absent") == (None, [])


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
@pytest.mark.parametrize("pattern", ["*.distcp", "common.pt", ".metadata", "metadata.json", "extra.json"])
def test_damage_to_any_file_is_found_and_named(copies, tied_folder, pattern, damage):
    path = next((copies / "step-000003").glob(pattern))
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
        checkpoint.verify(copies / "step-000003")
    assert checkpoint.newest_complete(copies)[0] == copies / "step-000002"


def test_a_torn_checkpoint_is_not_loaded_and_changes_nothing(copies, tied_folder):
    (copies / "step-000003" / "common.pt").write_bytes(b"")
    pair = build(tied_folder)
    before = pair[0].export_state()
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        checkpoint.load(copies / "step-000003", *pair)
    assert worst(before, pair[0].export_state()) == 0.0 and pair[1].updates == 0


def test_a_checkpoint_of_another_model_is_refused(copies, untied_folder):
    with pytest.raises(CheckpointError, match="holds another model"):
        checkpoint.load(copies / "step-000003", *build(untied_folder))


def test_an_intact_checkpoint_is_not_overwritten_a_torn_one_is_set_aside(copies, tied_folder):
    pair = build(tied_folder)
    train(pair, [1])
    with pytest.raises(CheckpointError, match="exists and is intact"):
        checkpoint.save(copies / "step-000003", *pair, {})
    (copies / "step-000003" / "common.pt").unlink()
    checkpoint.save(copies / "step-000003", *pair, {"again": True})
    assert checkpoint.newest_complete(copies) == (copies / "step-000003", [])
    assert (copies / "step-000003.quarantined-0").is_dir()


@pytest.mark.parametrize("stage", ["files", "record", "rename"])
def test_a_save_that_dies_leaves_no_checkpoint(tied_folder, tmp_path, monkeypatch, stage):
    class Killed(BaseException):
        pass

    def die(*args, **kwargs):
        raise Killed

    target = {"files": "dist_checkpointing.save", "record": "complete", "rename": "os.rename"}[stage]
    pair = build(tied_folder)
    train(pair, [1])
    with monkeypatch.context() as patched:
        patched.setattr(f"evo_hpc.training.checkpoint.{target}", die)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path / "step-000001", *pair, {})
    assert checkpoint.newest_complete(tmp_path) == (None, [])
    assert len(checkpoint.remove_partial(tmp_path)) == 1
    checkpoint.save(tmp_path / "step-000001", *pair, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_hostile_folder_names(hostile_path, tmp_path):
    model = write_qwen3(tmp_path / "model", tied=True)
    pair = build(model)
    train(pair, [1])
    checkpoint.save(hostile_path / "step-000001", *pair, {})
    checkpoint.load(hostile_path / "step-000001", *pair)


def test_only_a_runs_own_checkpoints_make_way(tmp_path):
    """Another run of the version (its recipe was edited since) left some of higher steps, and one that cannot be read."""
    first, second = tmp_path / "inc-0", tmp_path / "inc-1"
    for parent, run, steps in ((first, "before", (50, 75)), (second, "now", (10, 20, 25))):
        for step in steps:
            folder = parent / f"step-{step:06d}"
            folder.mkdir(parents=True)
            (folder / CHECKPOINT_EXTRA).write_text(json.dumps({"run": run}))
    (second / "step-000090").mkdir()
    retention.prune([first, second], 2, "now")
    assert sorted(p.name for p in first.iterdir()) == ["step-000050", "step-000075"]
    assert sorted(p.name for p in second.iterdir()) == ["step-000020", "step-000025", "step-000090"]
