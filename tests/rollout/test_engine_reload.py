"""Weights replaced in place: really used, verified against the trainer, and refused when the folder is not whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_process import EngineProcess
from tiny_policy import TinyPolicy, make_policy

from evo_hpc.rollout.engine import Request, Sampling
from evo_hpc.rollout.errors import EngineClosed, ModelFolderError, RequestError, WeightMismatch

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=16, stop_token_ids=())
PROBE = [2, 9, 4, 30, 17, 17, 5, 1, 0, 12]
LONG_PROMPT = tuple((11 * i) % 32 for i in range(300))  # spans full KV blocks, so that the prefix cache takes part


def _reload(engine: EngineProcess, folder: Path, version: int, scored_by: TinyPolicy) -> float:
    return engine.call("reload", folder, version, probe_ids=PROBE, probe_logprobs=scored_by.score(PROBE))


def _assert_serves(engine: EngineProcess, policy: TinyPolicy, version: int) -> None:
    requests = [Request(f"{i}", LONG_PROMPT[: 300 - i], i) for i in range(3)]
    for request, completion in zip(requests, engine.generate(requests, SAMPLING), strict=True):
        expected = policy.score([*request.prompt_ids, *completion.token_ids])[len(request.prompt_ids) :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.weight_version == version


def test_new_weights_are_used_whole_and_no_old_key_or_value_survives(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    old, new = policies
    _assert_serves(engine, old, 0)
    assert _reload(engine, new.folder, 7, new) < 1e-4
    _assert_serves(engine, new, 7)
    assert engine.call("weight_version") == 7
    assert _reload(engine, old.folder, 8, old) < 1e-4
    _assert_serves(engine, old, 8)


def test_wrong_weights_are_caught_and_nothing_is_sampled_until_good_ones_come(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    old, new = policies
    with pytest.raises(WeightMismatch, match="weights 3"):
        _reload(engine, new.folder, 3, scored_by=old)
    assert engine.call("weight_version") == 0
    with pytest.raises(EngineClosed, match="weights 3"):
        engine.generate([Request("a", (3,), 0)], SAMPLING)
    with pytest.raises(EngineClosed, match="weights 3"):
        engine.call("score", PROBE)
    _reload(engine, new.folder, 4, new)
    _assert_serves(engine, new, 4)


def test_a_probe_that_is_not_a_number_is_a_mismatch(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    nans = np.full(len(PROBE), np.nan)
    with pytest.raises(WeightMismatch):
        engine.call("reload", policies[0].folder, 3, probe_ids=PROBE, probe_logprobs=nans)


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _torn_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qw')


@pytest.mark.parametrize("damage", [_without_weights, _without_config, _truncated, _empty, _torn_config])
def test_an_incomplete_folder_is_refused_and_the_old_weights_serve_on(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    old, new = policies
    folder = tmp_path / "published"
    shutil.copytree(new.folder, folder)
    damage(folder)
    with pytest.raises(ModelFolderError, match=str(folder)):
        _reload(engine, folder, 5, new)
    _assert_serves(engine, old, 0)


@pytest.mark.parametrize("layers", [1, 3])
def test_another_architecture_is_refused_and_the_old_weights_serve_on(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy], tmp_path: Path, layers: int
) -> None:
    other = make_policy(tmp_path / "other", 2, layers=layers)
    with pytest.raises(ModelFolderError, match=r"model\.layers"):
        _reload(engine, other.folder, 5, other)
    _assert_serves(engine, policies[0], 0)


def test_a_malformed_probe_is_refused_before_anything_is_loaded(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    old, new = policies
    for token_ids, logprobs in (([3], np.zeros(1)), (PROBE, np.zeros(3)), ([3, 99], np.zeros(2))):
        with pytest.raises(RequestError, match="probe"):
            engine.call("reload", new.folder, 5, probe_ids=token_ids, probe_logprobs=logprobs)
    _assert_serves(engine, old, 0)
