"""Ranks of the distributed tests: for each case in turn, score, update, save and reload; rank 0 writes what came of it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evo_hpc.config import recipe
from evo_hpc.training import checkpoint, hf_weights, parallel
from evo_hpc.training.mcore import parallel_state
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.steps import grpo_step
from evo_hpc.training.weighting import corrected, normalised
from tests.training.conftest import random_samples
from tests.training.reference import off_policy

CONFIG = recipe.Optimizer(lr=1e-3, weight_decay=0.1, grad_clip=0.1, kl_coef=0.05, clip_low=0.1, clip_high=0.15)


@dataclass
class Case:
    """One layout and one kind of loss; `source`: a checkpoint to continue from, instead of the first update."""

    folder: str
    out: str
    count: int = 9
    options: dict[str, Any] = field(default_factory=dict)
    compute: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    background: bool = False


def whole_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """By Hugging Face names. A distributed optimizer has each rank reduce its own shard only: gather them first."""
    assert policy.trained is not None
    if policy.shares_out_optimizer:
        for buffer in [*policy.trained.buffers, *policy.trained.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
    return hf_weights.export_state(policy.module, policy.shape, lambda p: p.main_grad)


def run(case: Case) -> None:
    """Two updates with a checkpoint between them; or, from another layout's checkpoint, the second update alone."""
    folder, out, config = Path(case.folder), Path(case.out), CONFIG.model_copy(update=case.options)
    compute = recipe.Compute.model_validate(case.compute)
    layout = parallel.initialize(compute)
    policy = Policy.from_hf(folder, trainable=True, token_budget=64, compute=compute)
    optimizer = Optimizer(policy, config)
    first, second = random_samples(case.count, seed=1), random_samples(case.count, seed=2)
    frozen = Policy.from_hf(folder, trainable=False, token_budget=64, compute=compute)
    logprobs = frozen.logprobs([*first, *second], temperature=0.8)
    first, second = (
        normalised(corrected(off_policy(raw, lp, spread=0.2, seed=3), config)[0], config, 26)
        for raw, lp in ((first, logprobs[: case.count]), (second, logprobs[case.count :]))
    )
    result: dict[str, Any] = {
        "logprobs": logprobs, "layout": asdict(layout), "world": policy.effective_config(), "optimizer": optimizer.effective_config(),
        "rank": [parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_context_parallel_rank()],
    }
    if case.source is None:
        result["metrics"] = grpo_step(policy, optimizer, first, config, temperature=0.8)
        result["gradients"] = whole_gradients(policy)
        result["state"] = policy.export_state()
        extra = {"count": case.count}
        if case.background:
            pending = checkpoint.save_async(out / "step-000001", policy, optimizer, extra)
        else:
            checkpoint.save(out / "step-000001", policy, optimizer, extra)
    else:
        assert checkpoint.load(Path(case.source), policy, optimizer) == {"count": case.count}
    result["again"] = grpo_step(policy, optimizer, second, config, temperature=0.8)
    result["final"] = policy.export_state()
    if case.source is None and case.background:
        pending.finalize()
    result["everywhere"] = parallel.gather_objects(result["again"])
    if parallel.is_main():
        torch.save(result, out / "result.pt")
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        run(Case(**each))
    parallel.shutdown()
