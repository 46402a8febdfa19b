"""The trainer alone on one accelerator: gradients against float64, training with and without packing and recomputation, the
log-probability pass, and the publishing of weights. Qwen3 with random weights, no network, no vLLM; benchmarks/gpu.sh starts it.

Model FLOPs utilisation: (6 N + 12 L H Q T) FLOPs a token of a sequence of T tokens (PaLM, arXiv 2204.02311, appendix B; benchmarks/gpu_work.py
says what is counted), divided by seconds and by the device's peak. The copy beside the publishing is of the same files.

Prints a JSON line a measurement as it is made, then a table; what the time does not suffice for is said.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_work import CONFIGS, PRECISIONS, build_policy, config_of, flops, make_samples, optimizer_of

PEAKS = {"bfloat16": {"H200": 989.0, "H100": 989.0, "A100": 312.0}, "float32": {"H200": 67.0, "H100": 67.0, "A100": 19.5}}
"""Dense TFLOP/s by what the device's name holds (NVIDIA's data sheets, SXM); float32 without TF32, which torch does not use by itself."""
BFLOAT16_ERROR, FLOAT32_ERROR = 5e-2, 1e-4
"""Relative error of the whole gradient that is still rounding."""


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(action: Callable[[], Any], repetitions: int) -> float:
    """Median seconds, after one that warms up."""
    found = []
    for repetition in range(repetitions + 1):
        synchronise()
        begin = time.perf_counter()
        action()
        synchronise()
        if repetition:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


class Bench:
    """One run of the script: its arguments, how long it may take, what it found."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        import torch

        self.arguments, self.folder, self.began, self.records = arguments, folder, time.monotonic(), list[dict[str, Any]]()
        self.cuda = torch.cuda.is_available()
        self.name = torch.cuda.get_device_name() if self.cuda else "cpu"

    def say(self, what: str, **values: Any) -> None:
        record = {"what": what, **values}
        self.records.append(record)
        print(json.dumps(record), flush=True)

    def late(self, what: str, **values: Any) -> bool:
        """Whether no time is left for more; said where so."""
        over = time.monotonic() - self.began > self.arguments.seconds
        if over:
            self.say("skipped", of=what, why=f"{self.arguments.seconds:.0f} s are over", **values)
        return over

    def model_folder(self, size: str) -> Path:
        folder = self.folder / size
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(size)))
        return folder

    def utilisation(self, work: float, seconds: float, precision: str) -> dict[str, float | None]:
        rate = work / seconds / 1e12
        peak = self.arguments.peak_tflops or next((peak for name, peak in PEAKS[precision].items() if name in self.name), None)
        return {"tflops": round(rate, 4), "peak_tflops": peak, "mfu": round(rate / peak, 4) if peak else None}

    def machine(self) -> None:
        import importlib.metadata
        import importlib.util

        import torch

        self.say("machine", device=self.name, torch=torch.__version__, cuda=torch.version.cuda, megatron_core=importlib.metadata.version("megatron-core"),
                 transformers=importlib.metadata.version("transformers"), precisions=PRECISIONS, cores=os.cpu_count(),
                 transformer_engine=importlib.util.find_spec("transformer_engine") is not None)

    def gradients(self, precision: str) -> None:
        """Of the policy gradient, against transformers in float64 on the CPU with the very same weights and samples."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from evo_hpc.training import hf_weights
        from evo_hpc.training.steps import grpo_step

        size = "tiny" if self.arguments.size == ["tiny"] else "small"
        config = config_of(size)
        policy = build_policy(self.model_folder(size), precision=precision, recompute="none", token_budget=512)
        samples = make_samples(config["vocab_size"], 1024, 128)
        reference = Qwen3ForCausalLM(Qwen3Config(**config)).double()
        reference.load_state_dict({name: tensor.double() for name, tensor in policy.export_state().items()}, strict=False)
        reference.tie_weights()
        total = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            ids = torch.tensor([sample.token_ids])
            logp = torch.log_softmax(reference(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
            total = total - sample.advantage * (logp * torch.tensor(sample.loss_mask[1:])).sum()
        (total / sum(sum(sample.loss_mask) for sample in samples)).backward()
        optimizer, settings = optimizer_of(policy)
        grpo_step(policy, optimizer, samples, settings, temperature=1.0)
        found = hf_weights.export_state(policy.module, policy.shape, lambda parameter: parameter.main_grad)
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        error = {name: float((found[name].double() - grad).norm() / grad.norm()) for name, grad in wanted.items() if name in found}
        whole = torch.cat([(found[name].double() - wanted[name]).flatten() for name in error]).norm() / torch.cat([wanted[n].flatten() for n in error]).norm()
        worst = max(error, key=lambda name: error[name])
        limit = BFLOAT16_ERROR if precision == "bfloat16" else FLOAT32_ERROR
        self.say("gradients", size=size, precision=precision, tensors=len(error), relative_error=float(whole), worst=worst, worst_error=error[worst],
                 limit=limit, ok=bool(whole < limit) and len(error) == len(wanted))

    def training(self, size: str, precision: str, recompute: str, packed: bool) -> None:
        """GRPO updates (forward, backward, Adam)."""
        import torch

        from evo_hpc.training.steps import grpo_step

        name = {"size": size, "precision": precision, "recompute": recompute, "packed": packed}
        if self.late("train", **name):
            return
        if self.cuda:
            gc.collect()  # models of earlier measurements hold on to themselves
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        config = config_of(size)
        budget = self.arguments.token_budget if packed else 1
        policy = build_policy(self.model_folder(size), precision=precision, recompute=recompute, token_budget=budget)
        optimizer, settings = optimizer_of(policy)
        samples = make_samples(config["vocab_size"], self.arguments.tokens, self.arguments.longest)
        lengths = [len(sample.token_ids) - 1 for sample in samples]
        batches = len(list(policy.micro_batches(samples)))
        seconds = timed(lambda: grpo_step(policy, optimizer, samples, settings, temperature=1.0), self.arguments.repetitions)
        self.say("train", **name, seconds=round(seconds, 4), tokens=sum(lengths), samples=len(samples), micro_batches=batches,
                 tokens_per_second=round(sum(lengths) / seconds), **self.utilisation(flops(config, lengths, backward=True), seconds, precision), **self.memory())
        if packed and recompute == "none":
            self.scoring(policy, samples, name)
            self.publishing(policy, size)

    def memory(self) -> dict[str, float]:
        import torch

        return {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if self.cuda else {}

    def scoring(self, policy: Any, samples: Sequence[Any], name: dict[str, Any]) -> None:
        """Log-probabilities of the same samples."""
        lengths = [len(sample.token_ids) - 1 for sample in samples]
        seconds = timed(lambda: policy.logprobs(samples, temperature=1.0), self.arguments.repetitions)
        self.say("logprobs", **name, seconds=round(seconds, 4), tokens=sum(lengths), tokens_per_second=round(sum(lengths) / seconds),
                 **self.utilisation(flops(config_of(name["size"]), lengths, backward=False), seconds, name["precision"]))

    def publishing(self, policy: Any, size: str) -> None:
        """The policy as a model folder in shared memory, as the sampling side gets it."""
        if self.late("publish", size=size):
            return
        target = Path(self.arguments.shared) / f"evo-gpu-{os.getpid()}"
        try:
            seconds = timed(lambda: policy.save_hf(target / "policy", self.folder / size), 1)
            files = sorted((target / "policy").glob("*.safetensors"))
            gigabytes = sum(path.stat().st_size for path in files) / 1e9
            copied = timed(lambda: [shutil.copyfile(path, target / f"copy-{path.name}") for path in files], 1)
        finally:
            shutil.rmtree(target, ignore_errors=True)
        self.say("publish", size=size, seconds=round(seconds, 4), gigabytes=round(gigabytes, 4), gb_per_second=round(gigabytes / seconds, 3),
                 copy_gb_per_second=round(gigabytes / copied, 3))

    def run(self) -> None:
        self.machine()
        chosen = [p for p in PRECISIONS if self.arguments.precision in ("all", p)]
        for precision in chosen:
            self.gradients(precision)
        for precision in reversed(chosen):  # what one would train in comes first
            for size in self.arguments.size:
                for packed in (True, False):
                    for recompute in ("none", "full"):
                        self.training(size, precision, recompute, packed)

    def table(self) -> str:
        lines = [f"{'':>9} {'size':>5} {'precision':>9} {'recompute':>9} {'packed':>6} {'tok/s':>10} {'TFLOP/s':>8} {'MFU':>6} {'GiB':>6}"]
        for r in self.records:
            if r["what"] in ("train", "logprobs"):
                mfu = "-" if r["mfu"] is None else f"{100 * r['mfu']:.1f}%"
                lines.append(f"{r['what']:>9} {r['size']:>5} {r['precision']:>9} {r['recompute']:>9} {'yes' if r['packed'] else 'no':>6} "
                             f"{r['tokens_per_second']:>10,} {r['tflops']:>8.2f} {mfu:>6} {r.get('peak_gib', '-'):>6}")
            elif r["what"] == "publish":
                lines.append(f"{r['what']:>9} {r['size']:>5} {r['gigabytes']:.3f} GB at {r['gb_per_second']:.2f} GB/s (a plain copy: {r['copy_gb_per_second']:.2f})")
            elif r["what"] == "gradients":
                lines.append(f"gradients {r['size']:>5} {r['precision']:>9} relative error {r['relative_error']:.2e} ({'ok' if r['ok'] else 'WRONG'}; "
                             f"worst {r['worst']} {r['worst_error']:.2e})")
            elif r["what"] == "skipped":
                lines.append(f"skipped: {' '.join(str(v) for k, v in r.items() if k != 'what')}")
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=CONFIGS, action="append", help="0.6B and 1.7B by default")
    parser.add_argument("--precision", choices=("all", "float32", "bfloat16"), default="all")
    parser.add_argument("--tokens", type=int, default=32768, help="of a batch")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest sample")
    parser.add_argument("--token-budget", type=int, default=8192, help="of a packed micro-batch")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=400.0, help="nothing new is begun after so many")
    parser.add_argument("--peak-tflops", type=float, help="what MFU is a share of; by the device's name where it is known")
    parser.add_argument("--shared", default="/dev/shm", help="where weights are published to")
    arguments = parser.parse_args()
    arguments.size = arguments.size or ["0.6B", "1.7B"]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        bench.run()
    print(bench.table())
    return 0 if all(r["ok"] for r in bench.records if r["what"] == "gradients") else 1


if __name__ == "__main__":
    sys.exit(main())
