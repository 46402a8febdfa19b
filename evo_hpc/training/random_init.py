"""Random weights for a model that starts from nothing: the initialisation of its own config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from evo_hpc.training import hf_weights
from evo_hpc.training.model import read_shape


def write_random_weights(folder: Path, seed: int) -> None:
    """Add weights to a folder that has config.json and tokenizer: normal(0, initializer_range) matrices, norms of one."""
    shape = read_shape(folder)
    std = float(shape.raw.get("initializer_range", 0.02))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(0.0, std, generator=generator)
        for name, size in hf_weights.hf_shapes(shape).items()
    }
    hf_weights.save_folder(folder, tensors, shape, tokenizer_from=folder)
