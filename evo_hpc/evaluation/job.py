"""The evaluation role: Avg@k of one or several policies and suites with a single engine start, every rollout a row."""

from __future__ import annotations

import shutil
import time
from typing import Any

from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.config.recipe import Reward
from evo_hpc.config.yaml_io import dump_tree
from evo_hpc.domains.base import SCORE, Task, get_domain, read_tasks, task_set_hash
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.errors import UserError
from evo_hpc.evaluation.epoch import epoch_components, epoch_of
from evo_hpc.evaluation.scores import summarise
from evo_hpc.evaluation.sealed import SEALED, SealedRead, hidden_ids, read_sealed_tasks, without_words
from evo_hpc.jobs.context import RoleContext
from evo_hpc.lineage.identity import policy_identity
from evo_hpc.paths import COMPLETE, EVALUATION_PART
from evo_hpc.rollout.engine import Engine, Sampling
from evo_hpc.rollout.exchange import read_probe
from evo_hpc.rollout.groups import Group, Sampler, longest_context, positions
from evo_hpc.seeds import derive_seed
from evo_hpc.store.atomic import write_bytes
from evo_hpc.store.manifest import complete, link_or_copy, read_complete, sha256
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import write_table


class EvaluationSpec(Config):
    """One policy on one suite."""

    version: str
    policy: str
    """Policy folder, relative to the campaign."""
    policy_step: int
    suite: str
    system_prompt: str | None = None


class EvaluateParams(Config):
    """What an evaluation job's spec holds."""

    evaluations: list[EvaluationSpec] = Field(min_length=1)
    sealed: SealedRead | None = None
    """The read under which the suite `sealed` may be evaluated."""


def tasks_of(context: RoleContext, params: EvaluateParams) -> dict[str, list[Task]]:
    """Tasks of every suite in the spec. Raises SealedRefused where sealed ones may not be read."""
    suites = {spec.suite for spec in params.evaluations}
    tasks = {suite: read_tasks(context.campaign_paths.tasks(suite)) for suite in suites - {SEALED}}
    if SEALED in suites:
        policies = {spec.version: spec.policy for spec in params.evaluations if spec.suite == SEALED}
        tasks[SEALED] = read_sealed_tasks(context, params.sealed, policies)
    return tasks


def run(context: RoleContext) -> dict[str, Any]:
    """All evaluations of the spec, in order; those that an earlier incarnation finished are taken over."""
    params = EvaluateParams.model_validate(context.spec.params)
    done = [spec for spec in params.evaluations if _carry_over(context, spec)]
    todo = [spec for spec in params.evaluations if spec not in done]
    if todo:
        _Evaluator(context, todo, tasks_of(context, params)).run()
    folders = [context.incarnation.evaluation(spec.version, spec.suite) for spec in params.evaluations]
    return {"evaluations": [
        {"version": spec.version, "suite": spec.suite, "folder": context.relative(folder)}
        for spec, folder in zip(params.evaluations, folders, strict=True)
    ]}


def _carry_over(context: RoleContext, spec: EvaluationSpec) -> bool:
    """Whether an earlier incarnation of this attempt has finished this evaluation; its files are then linked here."""
    for earlier in context.job.incarnations():
        source = earlier.evaluation(spec.version, spec.suite)
        if earlier.number < context.incarnation.number and (source / COMPLETE).exists():
            read_complete(source, hashes=True)
            target = context.incarnation.evaluation(spec.version, spec.suite)
            for name in (EVALUATION_PART, COMPLETE):
                link_or_copy(source / name, target / name)
            return True
    return False


class _Evaluator:
    """One engine for all evaluations that are left."""

    def __init__(self, context: RoleContext, todo: list[EvaluationSpec], tasks: dict[str, list[Task]]) -> None:
        self.context, self.todo, self.tasks = context, todo, tasks
        self.evaluation = context.campaign.evaluation
        self.total = sum(len(self.tasks[spec.suite]) * self.evaluation.samples_per_task for spec in todo)
        self.finished, self.tokens, self.sampled_seconds = 0, 0, 0.0
        context.progress(stage="starting the engine", step=0, steps=self.total)
        self.loaded = context.resolve(todo[0].policy)
        self.tokenizer = ChatTokenizer.from_folder(self.loaded)
        profile = context.cluster.engine
        longest = max(
            longest_context(self.tokenizer, self.tasks[spec.suite], spec.system_prompt, self.evaluation.max_response_tokens, positions(self.loaded))
            for spec in todo
        )
        self.engine = Engine(
            self.loaded, weight_version=todo[0].policy_step, max_model_len=longest, kv_cache_bytes=profile.kv_cache_mib << 20,
            dtype=profile.dtype, threads=profile.threads, seed=self.evaluation.seed,
        )
        write_bytes(context.incarnation.effective(context.role), dump_tree({**self.engine.effective_config(), "start_seconds": context.seconds()}))

    def run(self) -> None:
        for spec in self.todo:
            self.context.raise_if_stopped()
            self._load(spec)
            self._evaluate(spec)

    def _load(self, spec: EvaluationSpec) -> None:
        """Put the spec's policy into the engine, verified by the probe that was published with it."""
        folder = self.context.resolve(spec.policy)
        if folder == self.loaded:
            return
        probe = read_probe(folder)
        if probe is None:
            raise UserError(f"{folder}: has no probe to verify a reload with; evaluate this policy in a job of its own")
        self.engine.reload(folder, spec.policy_step, probe_ids=probe.token_ids, probe_logprobs=probe.array())
        self.loaded, self.tokenizer = folder, ChatTokenizer.from_folder(folder)

    def _evaluate(self, spec: EvaluationSpec) -> None:
        domain = get_domain(self.context.campaign.domain.name)
        tasks, evaluation = self.tasks[spec.suite], self.evaluation
        components = epoch_components(
            suite=spec.suite, task_set=task_set_hash(tasks), evaluation=evaluation, campaign_seed=self.context.campaign.seed,
            verifier=domain.identity(), template=self.tokenizer.chat_template, tokenizer=sha256(self.loaded / "tokenizer.json"),
            stop_token_ids=self.tokenizer.eos_ids,
            engine=self.engine.identity(), score=SCORE,
        )
        epoch = epoch_of(components)
        sampling = Sampling(evaluation.temperature, evaluation.top_p, evaluation.max_response_tokens, self.tokenizer.eos_ids)
        sampler = Sampler(self.engine, self.tokenizer, domain, sampling, Reward(weights={SCORE: 1.0}), spec.system_prompt)
        hidden = hidden_ids(tasks) if spec.suite == SEALED else {}
        shown = [hidden.get(task.task_id, task.task_id) for task in tasks]  # what an error of the engine may name
        groups = [Group(name, task, self._seeds(spec.suite, task)) for name, task in zip(shown, tasks, strict=True)]
        common = {
            "campaign": self.context.spec.campaign, "version": spec.version, "suite": spec.suite,
            "policy_step": spec.policy_step, "trainer_step": None, "evaluator_epoch": epoch,
        }
        began, before = time.perf_counter(), self.finished
        rows = sampler.rows(groups, common, lambda n: self._finished_one(spec, before + n))
        self.finished = before + len(rows)
        self.tokens += sum(row["response_tokens"] for row in rows)
        self.sampled_seconds += time.perf_counter() - began
        if hidden:
            rows = [without_words(row, hidden) for row in rows]
        self.context.check_claim()
        folder = self.context.incarnation.evaluation(spec.version, spec.suite)
        shutil.rmtree(folder, ignore_errors=True)
        write_table(folder / EVALUATION_PART, rows, ROLLOUT)
        summary = summarise(rows, shown, evaluation.samples_per_task)
        complete(folder, {
            "version": spec.version, "suite": spec.suite, "policy": spec.policy, "policy_step": spec.policy_step,
            "policy_identity": policy_identity(self.loaded), "device": self.engine.effective_config()["device"], "epoch": epoch, "epoch_components": components, **summary,
        })
        self._show(spec, self.finished, score=summary["avg_at_k"])

    def _seeds(self, suite: str, task: Task) -> tuple[int, ...]:
        """The same for every version: paired versions meet the same random numbers."""
        seed = (self.context.campaign.seed, self.evaluation.seed, "evaluate", suite, task.task_id)
        return tuple(derive_seed(*seed, sample) for sample in range(self.evaluation.samples_per_task))

    def _finished_one(self, spec: EvaluationSpec, finished: int) -> None:
        self.context.raise_if_stopped()  # the engine drops what is left; nothing of this suite is written
        self._show(spec, finished)

    def _show(self, spec: EvaluationSpec, finished: int, score: float | None = None) -> None:
        rate = self.tokens / self.sampled_seconds if self.sampled_seconds else None
        self.context.progress(
            stage=f"evaluating {spec.version} on {spec.suite}", step=finished, tokens_per_second=round(rate) if rate else None,
            **({"score": round(score, 4)} if score is not None else {}),
        )
