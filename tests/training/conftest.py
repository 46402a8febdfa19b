"""Tiny random Qwen3 folders and samples for the training tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from evo_hpc.training.packing import Sample

VOCAB = 32
torch.set_num_threads(1)


def write_qwen3(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """A two-layer Qwen3 with weights large enough for distributions far from uniform, and norms away from one."""
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, rope_theta=1e6, max_position_embeddings=256, tie_word_embeddings=tied,
        dtype="float32",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(params=["tied", "untied"])
def model_folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def random_samples(count: int, seed: int, *, shortest: int = 6, longest: int = 30, prompt: int = 4) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(rng.integers(0, VOCAB, n).tolist(), [0] * prompt + [1] * (n - prompt), float(rng.normal()))
        for n in rng.integers(shortest, longest + 1, count).tolist()
    ]


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    return random_samples
