"""Rollout tokens/s: the rollout engine (vLLM) against transformers.generate, same random model, machine and threads.

Every request gets its own seed and returns its log-probabilities from the engine; transformers samples one batch from
one seed and returns tokens only, and all responses have one length, so each difference in work favours transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SIZES: dict[str, dict[str, int]] = {
    "0.45M": {
        "vocab_size": 32, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "9.7M": {
        "vocab_size": 512, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip
MAX_MODEL_LEN = 128


def make_model(folder: Path, size: str) -> int:
    """Save a random Qwen3 of `size` to `folder`; returns its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES[size], max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_prompts(count: int, vocabulary: int) -> list[tuple[int, ...]]:
    """`count` prompts of 6 to 16 token ids, none of them the padding id 0."""
    stream = random.Random(0)
    return [tuple(stream.randrange(1, vocabulary) for _ in range(stream.randint(6, 16))) for _ in range(count)]


def with_engine(folder: Path, arguments: argparse.Namespace) -> Callable[[int], int]:
    """A function that samples one batch with the rollout engine and returns its number of tokens."""
    from evo_hpc.rollout.engine import Engine, Request, Sampling

    engine = Engine(folder, max_model_len=MAX_MODEL_LEN, threads=arguments.threads)
    prompts = make_prompts(arguments.prompts, SIZES[arguments.size]["vocab_size"])
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=arguments.tokens, stop_token_ids=())

    def sample(round_number: int) -> int:
        requests = [
            Request(f"{i}/{j}", prompt, 10**6 * round_number + 1000 * i + j)
            for i, prompt in enumerate(prompts)
            for j in range(arguments.group_size)
        ]
        return sum(len(completion.token_ids) for completion in engine.generate(requests, sampling))

    return sample


def with_transformers(folder: Path, arguments: argparse.Namespace) -> Callable[[int], int]:
    """A function that samples the same batch with `transformers.generate` and returns its number of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [p for p in make_prompts(arguments.prompts, model.config.vocab_size) for _ in range(arguments.group_size)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = (ids != 0).long()

    def sample(round_number: int) -> int:
        torch.manual_seed(round_number)
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
                max_new_tokens=arguments.tokens, min_new_tokens=arguments.tokens, pad_token_id=0,
            )  # fmt: skip
        return int(output[:, width:].numel())

    return sample


BACKENDS = {"engine": with_engine, "transformers": with_transformers}


def measure(backend: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first batch, and tokens/s (wall clock, CPU time) of the best of `rounds` warm batches."""
    started = time.perf_counter()
    sample = BACKENDS[backend](arguments.model, arguments)
    sample(0)
    ready = time.perf_counter() - started
    best, best_cpu = 0.0, 0.0
    for number in range(1, arguments.rounds + 1):
        started, started_cpu = time.perf_counter(), time.process_time()
        tokens = sample(number)
        best = max(best, tokens / (time.perf_counter() - started))
        best_cpu = max(best_cpu, tokens / (time.process_time() - started_cpu))
    return {"tokens_per_second": best, "tokens_per_cpu_second": best_cpu, "start_seconds": ready}


def run_child(backend: str, size: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure` in a fresh process, alone on the machine as far as this script is concerned."""
    command = [sys.executable, __file__, "--child", backend, "--size", size, "--model", str(folder)]
    for name in ("prompts", "group_size", "tokens", "rounds", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Rollout tokens/s of the vLLM engine and of transformers.generate.")
    parser.add_argument("--size", choices=SIZES, help="measure this size only")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=45, help="length of every response")
    parser.add_argument("--rounds", type=int, default=3, help="warm batches; the best counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure each size, or be the process that measures one."""
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments)), flush=True)
        os._exit(0)  # a second of clean-up that measures nothing
    rows = []
    for size in [arguments.size] if arguments.size else list(SIZES):
        with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as folder:
            parameters = make_model(Path(folder), size)
            found = {backend: run_child(backend, size, Path(folder), arguments) for backend in BACKENDS}
        ratios = {
            f"ratio_{clock}": found["engine"][key] / found["transformers"][key]
            for clock, key in (("wall", "tokens_per_second"), ("cpu", "tokens_per_cpu_second"))
        }
        rows.append({"size": size, "parameters": parameters, **found, **ratios})
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("prompts", "group_size", "tokens", "rounds", "threads")}
        print(json.dumps({"settings": settings, "results": rows}))
        return
    work = f"{arguments.prompts} prompts x {arguments.group_size}, {arguments.tokens} tokens each"
    print(f"{work}, {arguments.threads} thread(s)")
    print("cpu: per second of CPU time, for a machine that others use as well")
    print(f"{'parameters':>10} {'':>13} {'engine':>8} {'transformers':>13} {'ratio':>6}")
    for row in rows:
        engine, other = row["engine"], row["transformers"]
        for label, key in (("tok/s", "tokens_per_second"), ("tok/s, cpu", "tokens_per_cpu_second")):
            ratio = row["ratio_wall" if label == "tok/s" else "ratio_cpu"]
            print(f"{row['parameters']:>10,} {label:>13} {engine[key]:>8,.0f} {other[key]:>13,.0f} {ratio:>6.2f}")
        starts = f"{engine['start_seconds']:>8.1f} {other['start_seconds']:>13.1f}"
        print(f"{row['parameters']:>10,} {'start, s':>13} {starts}")


if __name__ == "__main__":
    main()
