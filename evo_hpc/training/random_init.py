"""Random weights for a model that starts from nothing: the initialisation of its own config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from evo_hpc.training.architectures import read_shape
from evo_hpc.training.weight_files import save_folder
from evo_hpc.training.weight_names import hf_shapes


def write_random_weights(folder: Path, seed: int) -> None:
    """Add weights to a folder that has config.json and tokenizer: normal(0, initializer_range) matrices, norms of one, biases of zero."""
    shape = read_shape(folder)
    std = float(shape.raw.get("initializer_range", 0.02))
    generator = torch.Generator().manual_seed(seed)

    def initial(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
        return torch.empty(size).normal_(0.0, std, generator=generator)

    save_folder(folder, ((name, initial(name, size)) for name, size in hf_shapes(shape).items()), shape, tokenizer_from=folder)
