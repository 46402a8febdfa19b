"""One GRPO training step on Megatron against the same step in plain torch + transformers; same model, samples, threads.

The step: reference log-probabilities of the batch, then one update (loss, backward, clip, Adam). The plain version pads
the batch to its longest sample. Both run in one process, taking turns; the ratio is of the best repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "0.45M": {"vocab_size": 24, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "9.7M": {"vocab_size": 512, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
             "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
}
KL_COEF, CLIP_LOW, CLIP_HIGH, LR, GRAD_CLIP = 1e-3, 0.2, 0.28, 1e-5, 1.0


def make_model(folder: Path, size: str) -> int:
    """A random Qwen3 in `folder`; returns its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES[size], max_position_embeddings=512, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_samples(count: int, vocabulary: int) -> list[Any]:
    """`count` rollouts of unequal length: prompts of 8 to 12 tokens, responses of 20 to 64."""
    from evo_hpc.training.policy import Sample

    rng = random.Random(0)
    samples = []
    for index in range(count):
        prompt, response = rng.randint(8, 12), rng.randint(20, 64)
        ids = [rng.randrange(1, vocabulary) for _ in range(prompt + response)]
        samples.append(Sample(ids, [0] * prompt + [1] * response, advantage=(-1.0) ** index))
    return samples


def megatron_step(folder: Path, samples: Sequence[Any], token_budget: int) -> Callable[[], None]:
    """The package's own step."""
    from dataclasses import replace

    from evo_hpc.config.recipe import Optimizer as Settings
    from evo_hpc.training.optimizer import Optimizer
    from evo_hpc.training.policy import Policy
    from evo_hpc.training.steps import grpo_step

    settings = Settings(lr=LR, kl_coef=KL_COEF, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, grad_clip=GRAD_CLIP)
    policy = Policy.from_hf(folder, trainable=True, token_budget=token_budget)
    reference = Policy.from_hf(folder, trainable=False, token_budget=token_budget)
    optimizer = Optimizer(policy, settings)

    def step() -> None:
        ref = reference.logprobs(samples, temperature=1.0)
        grpo_step(policy, optimizer, [replace(s, ref_logprobs=r) for s, r in zip(samples, ref, strict=True)], settings, temperature=1.0)

    return step


def plain_step(folder: Path, samples: Sequence[Any], micro_batch: int) -> Callable[[], None]:
    """The same on transformers and torch: padded micro-batches in order of length, gradients accumulated, one AdamW step."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    ordered = sorted(samples, key=lambda s: -len(s.token_ids))
    batches = []
    for start in range(0, len(ordered), micro_batch):
        part = ordered[start : start + micro_batch]
        width = max(len(s.token_ids) for s in part)
        ids, mask = torch.zeros(len(part), width, dtype=torch.long), torch.zeros(len(part), width)
        attention = torch.zeros(len(part), width, dtype=torch.long)
        for i, s in enumerate(part):
            n = len(s.token_ids)
            ids[i, :n], mask[i, :n], attention[i, :n] = torch.tensor(s.token_ids), torch.tensor(s.loss_mask, dtype=torch.float), 1
        batches.append((ids, attention, mask[:, 1:], torch.tensor([s.advantage for s in part])[:, None]))
    total = sum(float(mask.sum()) for _, _, mask, _ in batches)

    def logprobs(net: Any, ids: Any, attention: Any) -> Any:
        logits = net(ids, attention_mask=attention, use_cache=False).logits[:, :-1]
        return -torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")

    def step() -> None:
        with torch.no_grad():
            refs = [logprobs(reference, ids, attention) for ids, attention, _, _ in batches]
        adam.zero_grad()
        for (ids, attention, mask, advantage), ref in zip(batches, refs, strict=True):
            lp = logprobs(model, ids, attention)
            ratio = torch.exp(lp - lp.detach())
            surrogate = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
            kl = torch.exp(ref - lp) - (ref - lp) - 1
            (((surrogate + KL_COEF * kl) * mask).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        adam.step()

    return step


def measure(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Best wall and CPU seconds of both steps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = make_model(folder, size)
        samples = make_samples(arguments.samples, SIZES[size]["vocab_size"])
        steps = {"megatron": megatron_step(folder, samples, arguments.token_budget), "plain": plain_step(folder, samples, arguments.micro_batch)}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for repetition in range(arguments.repetitions + 1):
            for name, step in steps.items():
                wall, cpu = time.perf_counter(), time.process_time()
                step()
                if repetition:  # the first of each warms up
                    seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    best = {name: (min(w for w, _ in runs), min(c for _, c in runs)) for name, runs in seconds.items()}
    return {
        "size": size, "parameters": parameters, "samples": arguments.samples, "tokens": sum(len(s.token_ids) for s in samples),
        "threads": arguments.threads, **{f"{name}_seconds": round(w, 4) for name, (w, _) in best.items()},
        **{f"{name}_cpu_seconds": round(c, 4) for name, (_, c) in best.items()},
        "ratio": round(best["megatron"][0] / best["plain"][0], 3), "cpu_ratio": round(best["megatron"][1] / best["plain"][1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, action="append", help="which model; both by default")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=32, help="rows of a padded micro-batch of the plain version")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    found = [measure(size, arguments) for size in arguments.size or SIZES]
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'model':>8} {'Megatron s':>11} {'plain s':>9} {'ratio':>6} {'CPU ratio':>9}   (ratio: below 1, Megatron is faster)")
    for f in found:
        print(f"{f['size']:>8} {f['megatron_seconds']:>11.3f} {f['plain_seconds']:>9.3f} {f['ratio']:>6.2f} {f['cpu_ratio']:>9.2f}")


if __name__ == "__main__":
    main()
