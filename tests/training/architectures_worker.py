"""One of two ranks: every architecture in every layout, loaded, scored, updated where the layout allows it, and saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from evo_hpc.config import recipe
from evo_hpc.training import hf_weights, parallel, weight_files
from evo_hpc.training.architectures import read_shape
from evo_hpc.training.mcore import parallel_state, tensor_parallel
from evo_hpc.training.model import build_model
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.steps import supervised_step
from tests.training.conftest import random_samples

CONFIG = recipe.Optimizer(lr=1e-3, weight_decay=0.1, grad_clip=100.0)
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2-ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}


def set_layout(sizes: dict[str, int]) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def run(folder: Path, out: Path, layout: str) -> dict[str, Any]:
    """Round trip; log-probabilities except with pipeline stages; a gradient where experts and tensors are not both split."""
    shape = read_shape(folder)
    module = build_model(shape).eval()
    hf_weights.load_state(module, weight_files.read_folder(folder, shape), shape)
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in module.parameters())}
    exported = hf_weights.export_stream(module, shape)
    if parallel.is_main():
        weight_files.save_folder(out, exported, shape, folder)
    result["exported"] = [name for name, _ in exported]
    if layout == "pp2":
        return result
    samples = random_samples(5, seed=3)
    policy = Policy(module, shape, trainable=False, token_budget=64)
    result["logprobs"] = policy.logprobs(samples, temperature=0.8)
    if shape.experts is None or layout == "ep2":
        trained = Policy.from_hf(folder, trainable=True, token_budget=64, compute=recipe.Compute(distributed_optimizer=False))
        result["metrics"] = supervised_step(trained, Optimizer(trained, CONFIG), samples)
        result["gradients"] = hf_weights.export_state(trained.module, shape, lambda parameter: parameter.main_grad)
        result["state"] = trained.export_state()
    return result


def main(root: Path, out: Path) -> None:
    parallel.initialize(recipe.Compute(tensor_parallel=2))
    hf_weights.GATHER_BYTES = 30_000  # several messages a model, and tensors larger than one
    results = {}
    for layout, sizes in LAYOUTS.items():
        set_layout(sizes)
        for folder in sorted(root.iterdir()):
            if read_shape(folder).experts is not None or "ep2" not in layout:
                results[layout, folder.name] = run(folder, out / layout / folder.name, layout)
    torch.save(results, out / f"results-{torch.distributed.get_rank()}.pt")
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
