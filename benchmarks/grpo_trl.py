"""TRL's side: its GRPOTrainer in an environment of its own, and (run as a script there, with a setting's file) the training itself.

The trainer generates with transformers, its default. Float32, no gradient checkpointing, one update a step: the same work as ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "accelerate", "datasets", "safetensors==0.8.0", "pydantic>=2.12", "jinja2>=3.1.6")


def make_venv(folder: Path, pip: tuple[str, ...] = ()) -> Path:
    """The Python of a virtual environment with TRL, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if subprocess.run([python, "-c", "import trl, datasets, pydantic, jinja2"], capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "install", "-q", *pip, *PACKAGES], check=True)
    return python


def run(python: Path, setting: Path, out: Path, threads: int) -> list[dict[str, Any]]:
    """One training in a process of its own; a record a step. Raises RuntimeError where it fails."""
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_WAIT_POLICY": "PASSIVE",
    }
    done = subprocess.run([python, __file__, setting], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"TRL failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in out.read_text().splitlines()]


def train(s: dict[str, Any]) -> None:
    """In TRL's environment: train, and write a line a step."""
    import torch

    torch.set_num_threads(s["threads"])
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from evo_hpc.domains.base import get_domain, read_tasks
    from evo_hpc.domains.tokenizer import ChatTokenizer

    tasks, chat, domain = read_tasks(Path(s["tasks"])), ChatTokenizer.from_folder(Path(s["model"])), get_domain("arithmetic")
    tokenizer = AutoTokenizer.from_pretrained(s["model"])
    wanted = [tasks[position] for step in s["order"] for position in step]
    prompts = [chat.render([{**m} for m in task.messages]) for task in wanted]
    assert tokenizer(prompts[:8])["input_ids"] == [chat.encode_text(prompt) for prompt in prompts[:8]], "both sides read prompts alike"
    scores: list[float] = []
    lengths: list[int] = []

    steps = iter(s["order"])

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], task: list[int], **_: Any) -> list[float]:
        assert [wanted[n] for n in sorted(set(task))] == [tasks[p] for p in next(steps)], "each step has the prompts that it has on our side"
        found = []
        for ids, number in zip(completion_ids, task, strict=True):
            verdict = domain.verify(wanted[number], chat.decode_response(ids), truncated=ids[-1] not in chat.eos_ids)
            scores.append(verdict.components["correct"])
            lengths.append(len(ids))
            found.append(s["correct"] * verdict.components["correct"] + s["format"] * verdict.components["format"])
        return found

    out = Path(s["out"]).open("w", buffering=1)
    generating = [0.0]

    class Record(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            size = len(scores)
            line = {"step": state.global_step, "time": time.time(), "score_mean": sum(scores) / size, "tokens_mean": sum(lengths) / size,
                    "rollouts": size, "seconds_generate": generating[0]}
            print(json.dumps(line), file=out)
            scores.clear()
            lengths.clear()
            generating[0] = 0.0

    config = GRPOConfig(
        output_dir=str(Path(s["out"]).with_suffix(".trl")), use_cpu=not torch.cuda.is_available(), bf16=False, fp16=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=s["seed"], max_steps=s["steps"],
        per_device_train_batch_size=s["prompts"] * s["group_size"], gradient_accumulation_steps=1, num_generations=s["group_size"],
        max_completion_length=s["max_tokens"], temperature=1.0, beta=s["kl_coef"], use_bias_correction_kl=False, epsilon=s["clip_low"],
        epsilon_high=s["clip_high"], loss_type="dapo", scale_rewards="group", learning_rate=s["lr"], lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=s["grad_clip"], gradient_checkpointing=False,
        shuffle_dataset=False, remove_unused_columns=False, dataloader_num_workers=0, model_init_kwargs={"dtype": "float32"}, top_k=0, top_p=1.0,
    )
    data = Dataset.from_dict({"prompt": prompts, "task": list(range(len(prompts)))})
    trainer = GRPOTrainer(model=s["model"], reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Record()])
    single = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return single(*args, **kwargs)
        finally:
            generating[0] += time.perf_counter() - begin

    trainer._generate_single_turn = timed
    trainer.train()


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    train(json.loads(Path(sys.argv[1]).read_text()))
