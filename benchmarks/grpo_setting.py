"""What both sides of benchmarks/grpo.py and benchmarks/parity.py are given: one model folder, prompts in one order, one reward, equal numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evo_hpc.domains.arithmetic.policy import EOS_ID, write_policy_files
from evo_hpc.domains.base import read_tasks
from evo_hpc.seeds import positions_for_step

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    "1M": {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "10M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
}
CAMPAIGN_SEED = 7


@dataclass(frozen=True)
class Setting:
    """One training run, for either side."""

    model: str
    """Folder in Hugging Face layout, with the tokenizer."""
    steps: int
    prompts: int
    """Groups of a step; one optimizer update a step."""
    group_size: int
    max_tokens: int
    seed: int
    threads: int
    lr: float = 2e-5
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 1e-3
    grad_clip: float = 1.0
    correct: float = 1.0
    """Weight of a right answer in the reward."""
    format: float = 0.1
    """Weight of a response in the scratch-pad grammar."""

    def write(self, path: Path, tasks: Path, out: Path) -> None:
        """The setting as a file for another Python: with the tasks of each step, and where to write what happened."""
        order = [positions_for_step(len(read_tasks(tasks)), self.prompts, step, CAMPAIGN_SEED, self.seed) for step in range(1, self.steps + 1)]
        path.write_text(json.dumps({**asdict(self), "tasks": str(tasks), "order": order, "out": str(out)}))

    def recipe(self) -> dict[str, Any]:
        """The same as recipe.yaml. Groups without a difference stay in, as they do in TRL; nothing is saved before the end."""
        return {
            "seed": self.seed, "steps": self.steps,
            "rollout": {"prompts_per_step": self.prompts, "group_size": self.group_size, "temperature": 1.0, "max_response_tokens": self.max_tokens},
            "reward": {"weights": {"correct": self.correct, "format": self.format}}, "data_filter": {"zero_variance": "keep"},
            "optimizer": {"lr": self.lr, "clip_low": self.clip_low, "clip_high": self.clip_high, "kl_coef": self.kl_coef, "grad_clip": self.grad_clip,
                          "mini_batches": 1, "loss": "token_mean"},
            "checkpoint": {"every": self.steps + 1},
        }


def random_model(folder: Path, size: str, seed: int = 0) -> int:
    """A random Qwen3 with the arithmetic domain's tokenizer that never ends a response, so that every response of either side has all its
    tokens. Returns its parameters. Every answer is wrong and every advantage zero, which costs what any other value costs.

    One channel of the residual stream is the same for all tokens, and the end token alone points against it: probability e^-80.
    """
    from safetensors.torch import load_file, save_file

    from evo_hpc.training.random_init import write_random_weights
    from evo_hpc.training.weight_names import EMBEDDING

    write_policy_files(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SIZES[size], "max_position_embeddings": 512}, indent=2))
    write_random_weights(folder, seed)
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING][:, 0] = 3.0
    weights[EMBEDDING][EOS_ID, 0] = -3.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())
