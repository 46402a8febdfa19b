"""What benchmarks/gpu_trainer.py measures with: Qwen3 of several sizes with random weights, samples, and how many FLOPs a model's work is.

Model FLOPs as PaLM counts them (arXiv 2204.02311, appendix B): a token of a sequence of T tokens costs 6 N + 12 L H Q T FLOPs forward and
backward, N parameters, L layers, H heads of size Q; a forward pass alone a third of it. Summed here over the tokens of each sequence with
its own T. N is without an input embedding that is only looked up (an embedding that is tied to the output counts, as the output).
Recomputed activations do not count: they are no work of the model. Attention counts as if it were not causal, as in the paper.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "small": {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False},
    "0.6B": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "1.7B": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
}


def config_of(size: str) -> dict[str, Any]:
    """config.json of a Qwen3 of that size."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": False, "eos_token_id": 0,
        **CONFIGS[size],
    }


def flops(config: dict[str, Any], lengths: Sequence[int], *, backward: bool) -> float:
    """Model FLOPs of these sequences, by the formula above."""
    hidden, layers, heads, size = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"))
    width, kv = heads * size, config["num_key_value_heads"] * size
    layer = hidden * (2 * width + 2 * kv) + 3 * hidden * config["intermediate_size"]
    n = layers * layer + config["vocab_size"] * hidden
    each = [t * (6 * n + 12 * layers * width * t) for t in lengths]
    return sum(each) * (1.0 if backward else 1 / 3)


def make_samples(vocabulary: int, tokens: int, longest: int, seed: int = 0) -> list[Any]:
    """Rollouts of very unequal length, `tokens` in all or a little more: prompts of up to an eighth of the longest, the rest responses."""
    from evo_hpc.training.packing import Sample

    rng, found, total = random.Random(seed), list[Any](), 0
    while total < tokens:
        prompt, response = rng.randint(longest // 16, longest // 8), rng.randint(longest // 8, longest * 7 // 8)
        ids = [rng.randrange(1, vocabulary) for _ in range(prompt + response)]
        found.append(Sample(ids, [0] * prompt + [1] * response, advantage=rng.gauss(0, 1)))
        total += len(ids)
    return found


PRECISIONS = ("float32", "bfloat16")


def build_policy(folder: Path, *, precision: str, recompute: str, token_budget: int) -> Any:
    """A trainable policy of `folder`/config.json with random weights made on the device: no file is read."""
    from evo_hpc.config.recipe import Compute
    from evo_hpc.training import parallel
    from evo_hpc.training.architectures import read_shape
    from evo_hpc.training.model import build_model
    from evo_hpc.training.policy import Policy

    compute = Compute(precision=precision, recompute=recompute)  # type: ignore[arg-type]
    parallel.initialize(compute)
    shape = read_shape(folder)
    return Policy(build_model(shape, compute), shape, trainable=True, token_budget=token_budget, compute=compute)


def optimizer_of(policy: Any) -> tuple[Any, Any]:
    """Adam, and what the loss goes by: no reference, no clipping of gradients, so that they can be looked at."""
    from evo_hpc.config.recipe import Optimizer as Settings
    from evo_hpc.training.optimizer import Optimizer

    settings = Settings(lr=1e-6, kl_coef=0.0, grad_clip=1e9)
    return Optimizer(policy, settings), settings
