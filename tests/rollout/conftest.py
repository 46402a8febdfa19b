"""Two tiny policies, and one vLLM engine for every test of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file, here and in spawned processes

from engine_process import EngineProcess  # noqa: E402
from tiny_policy import MAX_MODEL_LEN, TinyPolicy, make_policy  # noqa: E402


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyPolicy, TinyPolicy]:
    """Two policies of one architecture (tied embeddings) and different weights."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("policies")
    return make_policy(root / "old", 0), make_policy(root / "new", 1)


@pytest.fixture(scope="session")
def shared_engine(policies: tuple[TinyPolicy, TinyPolicy]) -> Iterator[EngineProcess]:
    process = EngineProcess(policies[0].folder, max_model_len=MAX_MODEL_LEN, kv_cache_bytes=32 << 20)
    yield process
    assert process.close() == 0


@pytest.fixture
def engine(shared_engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]) -> Iterator[EngineProcess]:
    """The engine, serving the first policy as version 0 whatever the test before did."""
    yield shared_engine
    probe = list(range(2, 20))
    shared_engine.call("reload", policies[0].folder, 0, probe_ids=probe, probe_logprobs=policies[0].score(probe))
