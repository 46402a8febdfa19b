"""Stand-ins for the roles of jobs: the same contract, records and folders as the real ones, without torch or vLLM.

They let hundreds of crash points be tried. That they keep the real roles' contract is checked in tests/e2e
against what the real ones left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from typing import Any

from evo_hpc.domains.base import Task, read_tasks, task_set_hash
from evo_hpc.evaluation.chunks import score_in_chunks
from evo_hpc.evaluation.epoch import epoch_components, epoch_of
from evo_hpc.evaluation.job import EvaluateParams, EvaluationSpec, outputs_of, shown_names, tasks_of, work_of
from evo_hpc.evaluation.sealed import without_words
from evo_hpc.jobs.context import RoleContext
from evo_hpc.lineage.identity import policy_identity
from evo_hpc.seeds import derive_seed
from evo_hpc.store.atomic import write_bytes, write_json
from evo_hpc.store.manifest import complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import table_of
from evo_hpc.training.recorder import Recorder

STEP_SECONDS = float(os.environ.get("FAKE_STEP_SECONDS", "0.01"))
EVALUATE_SECONDS = float(os.environ.get("FAKE_EVALUATE_SECONDS", "0"))
BASE_QUALITY = 30
CHUNK_ROLLOUTS = 16


def quality(recipe: dict[str, Any]) -> int:
    """How good a policy a recipe makes, in percent of rollouts that are right: enough for every decision to be met."""
    optimizer = recipe["optimizer"]
    if optimizer["lr"] > 1e-2:
        return 0
    gained = 20 * (optimizer["kl_coef"] == 0) + 20 * (optimizer["clip_high"] != 0.28) - 50 * (recipe["rollout"]["temperature"] > 1)
    return 55 + gained


def row(context: RoleContext, version: str, suite: str, task: Any, sample: int, score: float, **changes: Any) -> dict[str, Any]:
    """A whole rollout row."""
    return {
        "campaign": context.spec.campaign, "version": version, "suite": suite, "policy_step": 0, "trainer_step": None,
        "task_id": task.task_id, "group_id": task.task_id, "sample": sample, "seed": 1, "turns": 1, "prompt_ids": [1],
        "response_ids": [2], "loss_mask": [1], "logprobs": [-0.1], "text": "x", "messages": None, "tool_calls": [],
        "stop_reason": "stop", "reward": score, "components": [("correct", score), ("format", 1.0)], "verifier_detail": "",
        "error_class": None, "weight_version": 0, "evaluator_epoch": None, "generate_seconds": 0.0, "verify_seconds": 0.0,
        "prompt_tokens": 1, "response_tokens": 1, "truncated": False, "trigrams_total": 0, "trigrams_unique": 0,
        "longest_token_run": 1, "tool_call_count": 0, "tool_error_count": 0, "domain_features": [], "task_attributes": [],
        "advantage": None, "kept": None, "staleness": None, **changes,
    }


def policy_folder(context: RoleContext, step: int, good: int) -> str:
    """A folder that looks like a policy and knows how good it is."""
    folder = context.incarnation.policy(step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_text(f"weights of step {step} of run {context.spec.params.get('run')}")
    (folder / "quality").write_text(str(good))
    complete(folder, {"weight_version": step})
    return context.relative(folder)


def supervise(context: RoleContext) -> dict[str, Any]:
    context.progress(stage="supervised", step=0, steps=1)
    write_bytes(context.incarnation.effective(context.role), b"threads: 1\n")
    context.check_claim()
    return {"policy": policy_folder(context, 1, BASE_QUALITY), "step": 1, "loss": 0.1, "tokens": 1.0,
            "effective": {"trainer": context.relative(context.incarnation.effective(context.role))}}


def train(context: RoleContext) -> dict[str, Any]:
    """Steps that are functions of their number, checkpoints that carry the parts, resume from the newest whole one."""
    steps, every = context.spec.params["recipe"]["steps"], context.spec.params["recipe"]["checkpoint"]["every"]
    task = read_tasks(context.campaign_paths.tasks("train"))[0]
    write_bytes(context.incarnation.effective("trainer"), b"threads: 1\n")
    done, parts = _resume(context)
    recorder = Recorder(context, parts, 1000)
    for step in range(done + 1, steps + 1):
        if context.stop_requested:
            _save(context, recorder, step - 1)
            context.raise_if_stopped()
        time.sleep(STEP_SECONDS)
        good = quality(context.spec.params["recipe"])
        score = 0.4 if step <= 3 else good / 100
        rows = [
            row(context, context.spec.owner, "train", task, sample, float(sample), trainer_step=step, advantage=float(2 * sample - 1), kept=True)
            for sample in range(2)
        ]
        recorder.add(step, table_of(rows, ROLLOUT), {"loss": 1.0 / step, "score_mean": score, "reward_mean": score})
        context.progress(stage="training", step=step, steps=steps)
        if step % every == 0 and step < steps:
            _save(context, recorder, step)
    folder = _save(context, recorder, steps)
    return {
        "step": steps, "run": context.spec.params["run"], "parts": recorder.parts, "checkpoint": context.relative(folder),
        "policy": policy_folder(context, steps, quality(context.spec.params["recipe"])), "effective": _effective(context),
    }


def _save(context: RoleContext, recorder: Recorder, step: int) -> Any:
    import json

    folder = context.incarnation.checkpoint(step)
    if not folder.exists():
        recorder.flush()
        context.check_claim()
        temp = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
        temp.mkdir(parents=True)
        (temp / "extra.json").write_text(json.dumps({"step": step, "run": context.spec.params["run"], "parts": recorder.parts}))
        complete(temp, {"kind": "checkpoint"})
        temp.rename(folder)
    return folder


def _resume(context: RoleContext) -> tuple[int, list[dict[str, Any]]]:
    from evo_hpc.paths import OwnerPaths
    from evo_hpc.store.atomic import read_json

    found = [
        read_json(extra) for job in OwnerPaths(context.job.owner).jobs() if job.kind == "train"
        for inc in job.incarnations() for extra in inc.checkpoints.glob("step-*/extra.json")
    ]
    mine = [(extra["step"], extra["parts"]) for extra in found if extra["run"] == context.spec.params["run"]]
    return max(mine, key=lambda pair: pair[0], default=(0, []))


def _effective(context: RoleContext) -> dict[str, str]:
    from evo_hpc.paths import OwnerPaths

    incarnations = [inc for job in OwnerPaths(context.job.owner).jobs() if job.kind == "train" for inc in job.incarnations()]
    return {
        role: context.relative(inc.effective(role)) for inc in incarnations for role in ("trainer", "rollout") if inc.effective(role).exists()
    }


def rollout(context: RoleContext) -> dict[str, Any]:
    """Serves nothing; ends when it is told to. Like a real engine it needs a while before it can say what it is."""
    time.sleep(3 * STEP_SECONDS)
    context.raise_if_stopped()
    write_bytes(context.incarnation.effective("rollout"), b"threads: 1\n")
    while True:
        context.raise_if_stopped()
        time.sleep(0.02)


def evaluate(context: RoleContext) -> dict[str, Any]:
    """Scores drawn at the chance that the policy's folder names; the same luck for every version, as with the real one's seeds."""
    params = EvaluateParams.model_validate(context.spec.params)
    write_bytes(context.incarnation.effective(context.role), b"threads: 1\n")
    tasks, finished, k = tasks_of(context, params), 0, context.campaign.evaluation.samples_per_task
    context.progress(stage="evaluating", step=0, steps=sum(len(params.part(tasks[spec.suite])) * k for spec in params.evaluations))
    for spec in params.evaluations:
        context.raise_if_stopped()
        _evaluate(context, params, spec, tasks[spec.suite], finished)
        finished += len(params.part(tasks[spec.suite])) * k
        context.progress(step=finished)
    return outputs_of(context, params)


def _evaluate(context: RoleContext, params: EvaluateParams, spec: EvaluationSpec, tasks: list[Task], finished: int) -> None:
    """In chunks far smaller than the real ones, so that a few tasks are several."""
    policy = context.resolve(spec.policy)
    chance = int((policy / "quality").read_text()) if (policy / "quality").exists() else BASE_QUALITY
    components = epoch_components(
        suite=spec.suite, task_set=task_set_hash(tasks), evaluation=context.campaign.evaluation, campaign_seed=context.campaign.seed,
        verifier={}, template="", tokenizer="", stop_token_ids=(), engine={"engine": "none"}, score="correct",
    )
    epoch, (_, hidden), part = epoch_of(components), shown_names(spec.suite, tasks), params.part(tasks)
    work = replace(work_of(context, params, spec, tasks, policy_identity(policy), epoch), chunk_rollouts=CHUNK_ROLLOUTS)

    def sample(chunk: range, before: int) -> list[dict[str, Any]]:
        time.sleep(EVALUATE_SECONDS / len(work.chunks()))
        context.raise_if_stopped()
        context.progress(step=finished + before)
        rows = [
            row(context, spec.version, spec.suite, task, s, float(derive_seed("luck", task.task_id, s) % 100 < chance), evaluator_epoch=epoch)
            for task in (part[i] for i in chunk) for s in range(work.k)
        ]
        return [without_words(r, hidden) for r in rows] if hidden else rows

    score_in_chunks(context, work, {
        "version": spec.version, "suite": spec.suite, "policy": spec.policy, "policy_step": spec.policy_step, "device": "cpu",
        "policy_identity": policy_identity(policy), "epoch": epoch, "epoch_components": components,
    }, sample)


def _until_stopped(context: RoleContext) -> None:
    context.progress(stage="waiting")
    while not context.stop_requested:
        time.sleep(0.02)


def _first_of_its_name(context: RoleContext) -> bool:
    mark = context.incarnation.root / f"started-{context.role}"
    if mark.exists():
        return False
    mark.write_text(str(os.getpid()))
    return True


def broken(context: RoleContext) -> dict[str, Any]:
    """Fails as told by the environment: the kinds of failure that a role can have."""
    from evo_hpc.errors import UserError

    match os.environ["FAKE_FAILURE"]:
        case "user":
            raise UserError("recipe.yaml:3: this is yours to mend")
        case "error":
            raise RuntimeError("the machine did something")
        case "exit":
            os._exit(7)
        case "abort":
            os.abort()
        case "hang":
            time.sleep(3600)
        case "silent":  # alive, and awake for two seconds, without progress
            context.progress(stage="silent")
            for _ in range(20):
                time.sleep(0.1)
        case "obedient":
            _until_stopped(context)
            context.raise_if_stopped()
        case "error on stop":
            _until_stopped(context)
            raise RuntimeError("could not save")
        case "starting":  # no handler yet
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _until_stopped(context)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            context.progress(stage="deaf", step=0)
            time.sleep(60)
        case "dies of it":  # the first process of each name; those after it serve
            if _first_of_its_name(context):
                os.kill(os.getpid(), signal.SIGKILL)
            _until_stopped(context)
        case "silent with work":
            if _first_of_its_name(context):
                write_json(context.incarnation.pulse(context.role), {"busy": True})
                time.sleep(3600)
            write_json(context.incarnation.pulse(context.role), {"busy": False})
            _until_stopped(context)
        case "error in cleaning up":
            try:
                raise ValueError("what really happened")
            finally:
                raise RuntimeError("the cleaning up failed, too")
    return {}
