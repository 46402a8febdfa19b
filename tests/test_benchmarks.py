"""The benchmark scripts of docs/benchmarks.md run and give what they say, at a tiny size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def run(repository: Path, script: str, *arguments: str) -> object:
    done = subprocess.run([sys.executable, repository / "benchmarks" / script, *arguments, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_coverage(repository: Path) -> None:
    cells = run(repository, "coverage.py", "--tasks", "30", "--suites", "200", "--draws", "1000")
    assert len(cells) == 4 and all(88 <= c["t"] <= 100 for c in cells)  # type: ignore[arg-type, union-attr]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainer_and_rollout(repository: Path) -> None:
    (trainer,) = run(repository, "trainer.py", "--size", "0.45M", "--samples", "8", "--repetitions", "1")  # type: ignore[misc]
    assert trainer["ratio"] > 0 and trainer["tokens"] > 0
    rollout = run(repository, "rollout.py", "--size", "0.45M", "--prompts", "2", "--tokens", "5", "--rounds", "1")
    assert rollout


def gpu(repository: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [repository / "benchmarks" / "gpu.sh", *arguments], env={**os.environ, "PYTHON": sys.executable, **environment}, capture_output=True, text=True,
    )


def test_the_gpu_script_on_this_machine(repository: Path) -> None:
    done = gpu(repository, "--size", "tiny", "--tokens", "256", "--longest", "64", "--token-budget", "128", "--repetitions", "1", "--peak-tflops", "1")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {r["what"] for r in records} == {"machine", "gradients", "train", "logprobs", "publish"}
    gradients = [r for r in records if r["what"] == "gradients" and r["precision"] == "float32"]
    assert len(gradients) == 1 and gradients[0]["ok"] and gradients[0]["relative_error"] < 1e-5
    trained = {(r["packed"], r["recompute"]): r for r in records if r["what"] == "train" and r["precision"] == "float32"}
    assert set(trained) == {(packed, recompute) for packed in (True, False) for recompute in ("none", "full")}
    assert trained[True, "none"]["micro_batches"] < trained[False, "none"]["micro_batches"] == trained[False, "none"]["samples"]
    assert all(0 < r["mfu"] == r["tflops"] for r in trained.values()) and "relative error" in done.stdout


def test_the_gpu_script_says_what_it_lacks(repository: Path, tmp_path: Path) -> None:
    """In a bare environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    done = gpu(repository, PYTHON=str(tmp_path / "bare" / "bin" / "python"), PYTHONPATH="")
    assert done.returncode == 2 and "lacks: torch transformers numpy" in done.stderr and "megatron-core" in done.stderr and "--wheels DIR" in done.stderr


def test_model_flops_are_those_of_the_matrices() -> None:
    """Against torch's own count of a forward pass of transformers' model, which knows nothing of the formula."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.gpu_work import config_of, flops

    for size in ("tiny", "small"):
        config = config_of(size)
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**config), attn_implementation="eager")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 40, dtype=torch.long))
        assert flops(config, [40], backward=False) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert flops(config, [40, 40], backward=True) == pytest.approx(6 * flops(config, [40], backward=False))


def test_equivalence_is_two_one_sided_tests() -> None:
    """Against scipy's t-test of shifted samples."""
    from scipy.stats import ttest_ind

    from benchmarks.parity import tost

    ours, trl = [0.61, 0.63, 0.60, 0.66, 0.62, 0.59, 0.64, 0.61], [0.60, 0.65, 0.61, 0.60, 0.63, 0.62, 0.58, 0.60]
    found = tost(ours, trl, margin=0.05)
    one = ttest_ind([x + 0.05 for x in ours], trl, equal_var=False, alternative="greater").pvalue
    other = ttest_ind([x - 0.05 for x in ours], trl, equal_var=False, alternative="less").pvalue
    assert found.p_value == pytest.approx(max(one, other)) and found.equivalent and -0.05 < found.low < found.difference < found.high < 0.05
    apart = tost([x + 0.04 for x in ours], trl, margin=0.05)
    assert not apart.equivalent and apart.high > 0.05
    noisy = tost([0.3, 0.9, 0.6], [0.2, 0.95, 0.65], margin=0.05)
    assert not noisy.equivalent, "few runs that scatter show nothing"
    for result in (found, apart, noisy):
        assert result.equivalent == (-result.margin < result.low and result.high < result.margin)


def test_rates_leave_the_first_steps_out() -> None:
    from benchmarks.grpo import steps_per_second

    assert steps_per_second([0.0, 10.0, 20.0, 22.0, 24.0, 26.0], 3) == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_our_side_of_a_grpo_step(repository: Path) -> None:
    """The real training job, at a tiny size; TRL's side needs an environment of its own."""
    words = ["--only", "ours", "--size", "tiny", "--prompts", "2", "--group-size", "2", "--tokens", "12", "--steps", "4", "--warm-up", "1", "--turns", "1"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.grpo", *words, "--json"], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["steps_per_second"]["ours"][0] > 0 and 0 < found["neither_generating_nor_training"] < 1
    assert found["publish_to_seen_seconds"] > 0 and found["publish_reload_gb_per_second"] > 0 and found["copy_gb_per_second"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_job_ran_with_what_was_asked(tmp_path: Path) -> None:
    """Every setting that the roles of a real training job read back is the one in its recipe and profile."""
    from benchmarks.grpo_ours import Bench
    from benchmarks.grpo_setting import Setting, random_model
    from evo_hpc.config.yaml_io import dump_tree, load_tree, plain
    from evo_hpc.harness.inputs import effective_rows
    from evo_hpc.lineage.effective import read_back
    from evo_hpc.paths import SHARED_MEMORY

    random_model(tmp_path / "model", "tiny")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as shared:
        bench = Bench.make(tmp_path / "campaign", Path(shared), train_tasks=16)
        run = bench.train(Setting(str(tmp_path / "model"), steps=1, prompts=2, group_size=2, max_tokens=12, seed=3, threads=1), "v0001")
    roles = {role: plain(load_tree(path)) for role, path in run.effective.items()}
    (tmp_path / "effective.yaml").write_bytes(dump_tree({**run.asked, **roles}))
    found = read_back(effective_rows(tmp_path / "effective.yaml"))
    assert [setting for setting in found if not setting.same] == []
    read = {setting.name for setting in found}
    assert len(read) >= 30 and {
        "seed", "token_budget", "optimizer.lr", "optimizer.beta2", "optimizer.clip_high", "optimizer.kl", "rollout.temperature", "rollout.max_response_tokens",
        "cluster.trainer.threads", "cluster.engine.threads", "cluster.engine.dtype", "cluster.engine.kv_cache_mib",
    } <= read


def test_every_script_is_in_the_docs(repository: Path) -> None:
    text = (repository / "docs" / "benchmarks.md").read_text()
    named = set(re.findall(r"benchmarks[/.](\w+)(?:\.py)?\b", text))
    assert named - {"gpu"} == {p.stem for p in (repository / "benchmarks").glob("*.py")} and "benchmarks/gpu.sh" in text
