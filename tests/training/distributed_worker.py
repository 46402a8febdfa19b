"""One rank of the distributed test: scores, updates, saves and reloads, and writes what it got from rank 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from evo_hpc.config import recipe
from evo_hpc.training import checkpoint, hf_weights, parallel
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.steps import grpo_step
from evo_hpc.training.weighting import corrected, normalised
from tests.training.conftest import random_samples
from tests.training.reference import off_policy

CONFIG = recipe.Optimizer(lr=1e-3, weight_decay=0.1, grad_clip=0.1, kl_coef=0.05, clip_low=0.1, clip_high=0.15)


def run(folder: Path, out: Path, tensor_parallel_size: int, count: int, config: recipe.Optimizer, checkpoint_from: Path | None) -> None:
    """Two updates with a checkpoint between them; or, from another layout's checkpoint, the second update alone."""
    parallel.initialize(tensor_parallel_size=tensor_parallel_size)
    policy = Policy.from_hf(folder, trainable=True, token_budget=64)
    optimizer = Optimizer(policy, config)
    first, second = random_samples(count, seed=1), random_samples(count, seed=2)
    frozen = Policy.from_hf(folder, trainable=False, token_budget=64)
    logprobs = frozen.logprobs([*first, *second], temperature=0.8)
    first, second = (
        normalised(corrected(off_policy(raw, lp, spread=0.2, seed=3), config)[0], config, 26) for raw, lp in ((first, logprobs[:count]), (second, logprobs[count:]))
    )
    result: dict[str, object] = {"logprobs": logprobs, "world": policy.effective_config()}
    if checkpoint_from is None:
        result["metrics"] = grpo_step(policy, optimizer, first, config, temperature=0.8)
        result["gradients"] = hf_weights.export_state(policy.module, policy.shape, lambda p: p.main_grad)
        result["state"] = policy.export_state()
        checkpoint.save(out / "step-000001", policy, optimizer, {"count": count})
    else:
        checkpoint.load(checkpoint_from, policy, optimizer)
    grpo_step(policy, optimizer, second, config, temperature=0.8)
    result["final"] = policy.export_state()
    if parallel.is_main():
        torch.save(result, out / "result.pt")
    parallel.shutdown()


if __name__ == "__main__":
    folder, out, size, count, options, *source = sys.argv[1:]
    run(Path(folder), Path(out), int(size), int(count), CONFIG.model_copy(update=json.loads(options)), Path(source[0]) if source else None)
