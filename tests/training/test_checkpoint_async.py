"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evo_hpc.config import recipe
from evo_hpc.paths import COMPLETE
from evo_hpc.training import checkpoint, checkpoint_writer, parallel
from evo_hpc.training.errors import CheckpointError
from evo_hpc.training.mcore import filesystem_async
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.steps import grpo_step
from tests.training.conftest import random_samples, write_qwen3
from tests.training.reference import worst

CONFIG = recipe.Optimizer(lr=1e-3, lr_warmup_updates=3, weight_decay=0.1, kl_coef=0.0)


def build(folder: Path, compute: recipe.Compute = recipe.Compute()) -> tuple[Policy, Optimizer]:
    policy = Policy.from_hf(folder, trainable=True, token_budget=128, compute=compute)
    return policy, Optimizer(policy, CONFIG)


def train(pair: tuple[Policy, Optimizer], *steps: int) -> None:
    for step in steps:
        grpo_step(*pair, random_samples(6, seed=step), CONFIG, temperature=1.0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written only once it is set."""
    opened, plain = threading.Event(), filesystem_async.FileSystemWriterAsync.write_preloaded_data

    def slow(*args: object, **kwargs: object) -> None:
        assert opened.wait(60)
        plain(*args, **kwargs)

    monkeypatch.setattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data", staticmethod(slow))
    return opened


@pytest.mark.parametrize("shared", [True, False], ids=["distributed", "plain"])
def test_what_is_saved_is_the_state_of_the_call_though_training_went_on(tied_folder, tmp_path, gate, monkeypatch, shared):
    monkeypatch.setattr(parallel, "shares_out_optimizer", lambda compute: shared)
    pair = build(tied_folder)
    train(pair, 1)
    at_call = pair[0].export_state()
    pending = checkpoint.save_async(tmp_path / "step-000001", *pair, {"step": 1})
    train(pair, 2, 3)
    assert not pending.done and checkpoint.newest_complete(tmp_path) == (None, [])
    gate.set()
    assert pending.finalize() == tmp_path / "step-000001" and pending.done
    resumed = build(tied_folder)
    assert checkpoint.load(tmp_path / "step-000001", *resumed) == {"step": 1}
    assert worst(resumed[0].export_state(), at_call) == 0.0
    train(resumed, 2, 3)
    assert worst(resumed[0].export_state(), pair[0].export_state()) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_training_in_the_meantime_is_not_changed_by_a_save(tied_folder, tmp_path):
    one, other = build(tied_folder), build(tied_folder)
    train(one, 1, 2)
    train(other, 1)
    pending = checkpoint.save_async(tmp_path / "step-000001", *other, {})
    train(other, 2)
    pending.finalize()
    assert worst(one[0].export_state(), other[0].export_state()) == 0.0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("of another kind")])
@pytest.mark.parametrize("background", [True, False])
def test_a_write_that_fails_says_so_at_the_end_and_leaves_no_checkpoint(tied_folder, tmp_path, monkeypatch, error, background):
    def fail(*args: object) -> None:
        raise error

    pair = build(tied_folder)
    train(pair, 1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_writer, "_write_buckets", fail)
        with pytest.raises(CheckpointError, match=r"step-000001: was not written \(rank 0: .*(No space left|of another kind)"):
            if background:
                checkpoint.save_async(tmp_path / "step-000001", *pair, {}).finalize()
            else:
                checkpoint.save(tmp_path / "step-000001", *pair, {})
    assert checkpoint.newest_complete(tmp_path) == (None, [])
    assert len(checkpoint.remove_partial(tmp_path)) == 1
    checkpoint.save_async(tmp_path / "step-000001", *pair, {}).finalize()
    checkpoint.verify(tmp_path / "step-000001")


@pytest.mark.parametrize("shared", [True, False], ids=["distributed", "plain"])
def test_a_checkpoint_from_before_the_first_update(tied_folder, tmp_path, monkeypatch, shared):
    monkeypatch.setattr(parallel, "shares_out_optimizer", lambda compute: shared)
    pair = build(tied_folder)
    checkpoint.save(tmp_path / "step-000000", *pair, {})
    train(pair, 1, 2)
    resumed = build(tied_folder)
    checkpoint.load(tmp_path / "step-000000", *resumed)
    train(resumed, 1, 2)
    assert worst(resumed[0].export_state(), pair[0].export_state()) == 0.0


def test_a_checkpoint_of_another_precision_is_refused_with_what_to_set(tied_folder, tmp_path):
    pair = build(tied_folder)
    train(pair, 1)
    checkpoint.save(tmp_path / "step-000001", *pair, {})
    with pytest.raises(CheckpointError, match="set compute.precision to float32"):
        checkpoint.load(tmp_path / "step-000001", *build(tied_folder, recipe.Compute(precision="bfloat16")))


KILLED = """
import sys, time
from pathlib import Path
from evo_hpc.training.mcore import filesystem_async
from tests.training.test_checkpoint_async import build, checkpoint, train
model, parent = Path(sys.argv[1]), Path(sys.argv[2])
pair = build(model)
train(pair, 1)
checkpoint.save(parent / "step-000001", *pair, {"step": 1})
import functools
plain = filesystem_async._write_item
@functools.wraps(plain)
def slow(*args, **kwargs):
    result = plain(*args, **kwargs)
    (parent / "writing").touch()
    time.sleep(0.5)
    return result
filesystem_async._write_item = slow
train(pair, 2)
pending = checkpoint.save_async(parent / "step-000002", *pair, {"step": 2})
train(pair, 3)
(parent / "trained").touch()
pending.finalize()
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_one_before_as_the_newest(repository, tmp_path):
    model, parent = write_qwen3(tmp_path / "model", tied=True), tmp_path / "checkpoints"
    parent.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(model), str(parent)], cwd=repository, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not ((parent / "writing").exists() and (parent / "trained").exists()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    partial = [path for path in parent.iterdir() if path.is_dir() and path.name != "step-000001"]
    assert len(partial) == 1 and not (partial[0] / COMPLETE).exists() and list(partial[0].glob("*.distcp")), "it was being written"
    assert checkpoint.newest_complete(parent) == (parent / "step-000001", [])
    assert checkpoint.remove_partial(parent) == partial
    pair = build(model)
    assert checkpoint.load(parent / "step-000001", *pair) == {"step": 1}
