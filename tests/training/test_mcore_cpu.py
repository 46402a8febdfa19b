"""The shim on a machine without CUDA: megatron sees it, nobody else does."""

from __future__ import annotations

import sys

import pytest
import torch

from evo_hpc.training import mcore_cpu, parallel
from evo_hpc.training.mcore import tensor_parallel

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is inert where CUDA is")


def test_torch_itself_keeps_its_factories_and_its_answers():
    for name in mcore_cpu._FACTORIES:
        assert type(getattr(torch, name)).__name__ == "builtin_function_or_method", name
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_megatron_modules_make_cuda_tensors_on_the_cpu():
    overlay = sys.modules["megatron.core.optimizer.clip_grads"].torch
    assert overlay is not torch and overlay.nn is torch.nn
    assert overlay.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
    assert overlay.tensor([1.0], device=overlay.cuda.current_device()).device.type == "cpu"


def test_installing_twice_installs_once():
    assert mcore_cpu.install()
    assert sum(isinstance(finder, mcore_cpu._Finder) for finder in sys.meta_path) == 1


def test_inert_where_cuda_is(monkeypatch):
    monkeypatch.setattr(mcore_cpu, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finders = list(sys.meta_path)
    assert not mcore_cpu.install()
    assert sys.meta_path == finders


def test_named_random_states_do_not_disturb_the_default_one():
    parallel.initialize()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with tracker.fork():
        assert not torch.equal(torch.rand(2), first)
