"""A whole GRPO step against TRL's GRPOTrainer: same model folder, prompts in the same order, reward, rollouts and tokens, threads.

Ours is the training job that a campaign runs (Megatron trainer and vLLM worker, each with --threads threads, taking turns by their nature).
Both sides run in turns (A B A B), each turn a fresh process; steps a second are over the steps after the first --warm-up of each turn, from
the end of one step to the end of the next. Responses never end early, so both sides make the same number of tokens.

Usage: python -m benchmarks.grpo --venv FOLDER [--size 1M --size 10M] [--json]. FOLDER gets an environment with TRL if it has none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import grpo_trl
from benchmarks.grpo_ours import Bench, OurRun, copy_gb_per_second
from benchmarks.grpo_setting import SIZES, Setting, random_model
from evo_hpc.paths import SHARED_MEMORY


def steps_per_second(times: list[float], skip: int) -> float:
    """Over the steps after the first `skip`, which must leave at least one."""
    return (len(times) - skip) / (times[-1] - times[skip - 1])


def ours_record(runs: list[OurRun], skip: int, weights: Path, shared: Path) -> dict[str, Any]:
    """What else is to be known of our side."""
    latencies = [seconds for run in runs for version, seconds in run.publish_to_seen.items() if version >= skip]
    publish = statistics.median(run.median("seconds_publish", skip) for run in runs)
    gigabytes = weights.stat().st_size / 1e9
    seen = statistics.median(latencies) if latencies else None
    return {
        "neither_generating_nor_training": statistics.mean(run.neither(skip) for run in runs), "publish_seconds": publish,
        "publish_to_seen_seconds": seen, "weights_mb": round(1000 * gigabytes, 3),
        "publish_reload_gb_per_second": gigabytes / (publish + seen) if seen is not None else None,
        "copy_gb_per_second": copy_gb_per_second(weights, shared),
        "median_seconds": {name: statistics.median(run.median(f"seconds_{name}", skip) for run in runs)
                           for name in ("step", "generate", "logprobs", "train", "publish", "other")},
    }


def measure(size: str, arguments: argparse.Namespace, folder: Path, shared: Path) -> dict[str, Any]:
    """Both sides at one size."""
    model = folder / "model"
    parameters = random_model(model, size)
    setting = Setting(str(model), arguments.steps, arguments.prompts, arguments.group_size, arguments.tokens, seed=0, threads=arguments.threads)
    bench = Bench.make(folder / "campaign", shared)
    python = None if arguments.only == "ours" else grpo_trl.make_venv(arguments.venv, tuple(arguments.pip))
    ours: list[OurRun] = []
    rates: dict[str, list[float]] = {"ours": [], "trl": []}
    theirs: list[dict[str, Any]] = []
    for turn in range(arguments.turns):
        ours.append(bench.train(setting, f"v{turn + 1:04d}"))
        rates["ours"].append(steps_per_second(ours[-1].times(), arguments.warm_up))
        assert all(row["response_tokens_mean"] == arguments.tokens for row in ours[-1].rows), "every response has all its tokens"
        if python is not None:
            asked, out = folder / f"trl-{turn}.json", folder / f"trl-{turn}.jsonl"
            setting.write(asked, bench.paths.tasks("train"), out)
            rows = grpo_trl.run(python, asked, out, arguments.threads)
            assert all((row["tokens_mean"], row["rollouts"]) == (arguments.tokens, setting.prompts * setting.group_size) for row in rows)
            rates["trl"].append(steps_per_second([row["time"] for row in rows], arguments.warm_up))
            theirs += rows[arguments.warm_up :]
    found: dict[str, Any] = {
        "size": size, "parameters": parameters, "rollouts": setting.prompts * setting.group_size, "tokens_each": arguments.tokens,
        "threads": arguments.threads, "steps": arguments.steps, "warm_up": arguments.warm_up, "steps_per_second": rates,
        **ours_record(ours, arguments.warm_up, model / "model.safetensors", shared),
    }
    if python is not None:
        found["ratio"] = statistics.mean(rates["ours"]) / statistics.mean(rates["trl"])
        found["ratio_by_turn"] = [a / b for a, b in zip(rates["ours"], rates["trl"], strict=True)]
        found["trl_median_seconds_generate"] = statistics.median(row["seconds_generate"] for row in theirs)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """For people."""
    lines = []
    for f in found:
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in f["median_seconds"].items())
        lines.append(f"{f['size']} ({f['parameters']:,} parameters), {f['rollouts']} rollouts x {f['tokens_each']} tokens, {f['threads']} thread(s) a process")
        lines.append(f"  ours: {', '.join(f'{r:.3f}' for r in f['steps_per_second']['ours'])} steps/s; seconds: {parts}")
        if "ratio" in f:
            turns = ", ".join(f"{r:.2f}" for r in f["ratio_by_turn"])
            lines.append(f"  TRL:  {', '.join(f'{r:.3f}' for r in f['steps_per_second']['trl'])} steps/s; generate {f['trl_median_seconds_generate']:.3f} s")
            lines.append(f"  ratio ours / TRL: {f['ratio']:.2f} (by turn: {turns}); above 1, ours is faster")
        lines.append(f"  neither generating nor training: {100 * f['neither_generating_nor_training']:.1f} % of a step")
        if f["publish_to_seen_seconds"] is not None:
            lines.append(f"  publish to seen {f['publish_to_seen_seconds']:.3f} s; {f['weights_mb']:.1f} MB published and reloaded at "
                         f"{f['publish_reload_gb_per_second']:.3f} GB/s; a plain copy in shared memory: {f['copy_gb_per_second']:.2f} GB/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="folder of the environment with TRL; made if absent")
    parser.add_argument("--pip", action="append", default=[], help="extra argument of pip for that environment")
    parser.add_argument("--size", choices=SIZES, action="append", help="1M and 10M by default")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=10, help="of each turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each turn that do not count; at least 1")
    parser.add_argument("--turns", type=int, default=2, help="turns of each side")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--only", choices=("ours",), help="without TRL")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.venv is None and arguments.only is None:
        parser.error("--venv FOLDER is needed for TRL (or --only ours)")
    if not 1 <= arguments.warm_up < arguments.steps:
        parser.error("--warm-up must be at least 1 and less than --steps")
    found = []
    for size in arguments.size or ("1M", "10M"):
        with tempfile.TemporaryDirectory(prefix="evo-grpo-") as folder, tempfile.TemporaryDirectory(prefix="evo-grpo-", dir=SHARED_MEMORY) as shared:
            found.append(measure(size, arguments, Path(folder), Path(shared)))
    print(json.dumps(found, indent=1) if arguments.json else table(found))


if __name__ == "__main__":
    main()
