"""Qwen2.5, Llama and Qwen3-MoE in the real engine: loaded, sampled, and replaced by weights in several files. One process for all."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from evo_hpc.rollout.engine import Engine, Request, Sampling
from evo_hpc.training.architectures import read_shape
from evo_hpc.training.weight_files import INDEX, read_folder, save_folder
from tests.training.tiny_models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.rare]

CASES = ("qwen2", "qwen2-tied", "llama-scaled-tied", "moe", "moe-some-dense-tied")
PROBE = [2, 9, 4, 30, 17, 17, 5, 1, 0, 12]
PROMPT = tuple((11 * i) % 32 for i in range(150))  # more than a KV block


def score(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Log-probability of each token by transformers; position 0 is 0."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), -1)
    return np.concatenate([[0.0], rows[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()])


def serve(root: Path, probes: dict[str, list[np.ndarray]], answers: Any) -> None:
    """For every case: (weights, completions) of the first weights, of the second, and of the first again."""
    for case in CASES:
        engine = Engine(root / case / "0", max_model_len=200, kv_cache_bytes=32 << 20)
        for version in (0, 1, 0):
            engine.reload(root / case / str(version), version, probe_ids=PROBE, probe_logprobs=probes[case][version])
            done = engine.generate([Request(f"{i}", PROMPT[: 150 - i], i) for i in range(3)], Sampling(1.0, 1.0, 16, ()))
            answers.put((case, version, [(each.token_ids, each.logprobs) for each in done]))
        engine.close()
    answers.put(None)


@pytest.mark.timeout(300)
def test_every_architecture_samples_from_the_weights_that_it_was_given(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    probes: dict[str, list[np.ndarray]] = {}
    for case in CASES:
        first, second, whole = tmp_path / case / "0", tmp_path / case / "1", tmp_path / case / "whole"
        write_model(first, case, seed=0), write_model(whole, case, seed=1)
        shape = read_shape(whole)
        save_folder(second, read_folder(whole, shape), shape, whole, max_shard_bytes=80_000)
        assert (second / INDEX).exists()
        probes[case] = [score(folder, PROBE) for folder in (first, second)]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=serve, args=(tmp_path, probes, answers), daemon=True)
    process.start()
    seen = []
    while (answer := answers.get(timeout=120)) is not None:
        case, version, completions = answer
        seen.append((case, version))
        for i, (token_ids, logprobs) in enumerate(completions):
            expected = score(tmp_path / case / str(version), [*PROMPT[: 150 - i], *token_ids])[150 - i :]
            np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    assert seen == [(case, version) for case in CASES for version in (0, 1, 0)]
    process.join(30)
    assert process.exitcode == 0
