"""The evaluation role: Avg@k of one or several policies and suites, or a shard of it, with a single engine start, every rollout a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, model_validator

from evo_hpc.config.base import Config
from evo_hpc.config.recipe import Reward
from evo_hpc.config.yaml_io import dump_tree
from evo_hpc.domains.base import SCORE, Task, get_domain, read_tasks, task_set_hash
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.errors import UserError
from evo_hpc.evaluation.chunks import Work, evaluation_identity, score_in_chunks
from evo_hpc.evaluation.epoch import epoch_components, epoch_of
from evo_hpc.evaluation.sealed import SEALED, SealedRead, hidden_ids, read_sealed_tasks, without_words
from evo_hpc.jobs.context import RoleContext
from evo_hpc.lineage.identity import policy_identity
from evo_hpc.rollout.engine import Engine, Sampling
from evo_hpc.rollout.exchange import read_probe
from evo_hpc.rollout.groups import Group, Sampler, longest_context, positions, reply_seconds
from evo_hpc.seeds import derive_seed
from evo_hpc.store.atomic import write_bytes
from evo_hpc.store.manifest import sha256

T = TypeVar("T")


class EvaluationSpec(Config):
    """One policy on one suite."""

    version: str
    policy: str
    """Policy folder, relative to the campaign."""
    policy_step: int
    suite: str
    system_prompt: str | None = None
    max_turns: int = Field(default=1, ge=1)


class EvaluateParams(Config):
    """What an evaluation job's spec holds."""

    evaluations: list[EvaluationSpec] = Field(min_length=1)
    sealed: SealedRead | None = None
    """The read under which the suite `sealed` may be evaluated."""
    shard: int = Field(default=0, ge=0)
    """Which of the shards this job is."""
    shards: int = Field(default=1, ge=1)
    """Into how many jobs the work is divided: task i of every suite is scored by shard i % shards."""

    @model_validator(mode="after")
    def _one_of_them(self) -> EvaluateParams:
        if self.shard >= self.shards:
            raise ValueError(f"shard {self.shard} of {self.shards}: they are numbered from 0")
        return self

    def part(self, items: Sequence[T]) -> Sequence[T]:
        """This job's part of what a suite has, in order."""
        return items[self.shard :: self.shards]


def tasks_of(context: RoleContext, params: EvaluateParams) -> dict[str, list[Task]]:
    """All tasks of every suite in the spec, whatever the shard. Raises SealedRefused where sealed ones may not be read."""
    suites = {spec.suite for spec in params.evaluations}
    tasks = {suite: read_tasks(context.campaign_paths.tasks(suite)) for suite in suites - {SEALED}}
    if SEALED in suites:
        policies = {spec.version: spec.policy for spec in params.evaluations if spec.suite == SEALED}
        tasks[SEALED] = read_sealed_tasks(context, params.sealed, policies)
    return tasks


def shown_names(suite: str, tasks: Sequence[Task]) -> tuple[list[str], dict[str, str]]:
    """The names under which all tasks of a suite are stored, in order; and those that hide sealed ones, by task id (else empty)."""
    hidden = hidden_ids(tasks) if suite == SEALED else {}
    return [hidden.get(task.task_id, task.task_id) for task in tasks], hidden


def work_of(context: RoleContext, params: EvaluateParams, spec: EvaluationSpec, tasks: Sequence[Task], policy: str, epoch: str) -> Work:
    """What this job scores of one suite. tasks: all of the suite; policy: the policy's identity."""
    names, _ = shown_names(spec.suite, tasks)
    identity = evaluation_identity(
        campaign=context.spec.campaign, version=spec.version, suite=spec.suite, policy=policy, policy_step=spec.policy_step, epoch=epoch,
        system_prompt=spec.system_prompt, max_turns=spec.max_turns, read=params.sealed.digest if params.sealed and spec.suite == SEALED else None,
    )
    return Work(
        version=spec.version, suite=spec.suite, identity=identity, tasks=tuple(params.part(names)), k=context.campaign.evaluation.samples_per_task,
        suite_tasks=len(tasks), shard=params.shard, shards=params.shards,
    )


def outputs_of(context: RoleContext, params: EvaluateParams) -> dict[str, Any]:
    """What the job made, once all of it is complete."""
    return {"evaluations": [
        {"version": spec.version, "suite": spec.suite, "folder": context.relative(context.incarnation.evaluation(spec.version, spec.suite))}
        for spec in params.evaluations
    ]}


def run(context: RoleContext) -> dict[str, Any]:
    """All evaluations of the spec, in order; what an earlier incarnation finished of them is taken over."""
    params = EvaluateParams.model_validate(context.spec.params)
    _Evaluator(context, params, tasks_of(context, params)).run()
    return outputs_of(context, params)


class _Evaluator:
    """One engine for all evaluations of a job."""

    def __init__(self, context: RoleContext, params: EvaluateParams, tasks: dict[str, list[Task]]) -> None:
        self.context, self.params, self.tasks = context, params, tasks
        self.evaluation = context.campaign.evaluation
        self.total = sum(len(params.part(tasks[spec.suite])) * self.evaluation.samples_per_task for spec in params.evaluations)
        self.finished, self.tokens, self.sampled_seconds = 0, 0, 0.0
        context.progress(stage="starting the engine", step=0, steps=self.total)
        first = params.evaluations[0]
        self.loaded = context.resolve(first.policy)
        self.tokenizer = ChatTokenizer.from_folder(self.loaded)
        profile = context.cluster.engine
        # Of whole suites, and also of what is finished: the engine is the same for every shard and incarnation.
        longest = max(
            longest_context(self.tokenizer, tasks[spec.suite], spec.system_prompt, self.evaluation.max_response_tokens, positions(self.loaded))
            for spec in params.evaluations
        )
        self.engine = Engine(
            self.loaded, weight_version=first.policy_step, max_model_len=longest, kv_cache_bytes=profile.kv_cache_mib << 20,
            dtype=profile.dtype, threads=profile.threads, seed=self.evaluation.seed, tensor_parallel=profile.tensor_parallel,
        )
        write_bytes(context.incarnation.effective(context.role), dump_tree({**self.engine.effective_config(), "start_seconds": context.seconds()}))

    def run(self) -> None:
        for spec in self.params.evaluations:
            self.context.raise_if_stopped()
            self._evaluate(spec)

    def _load(self, spec: EvaluationSpec) -> None:
        """Put the spec's policy into the engine, verified by the probe that was published with it."""
        folder = self.context.resolve(spec.policy)
        if folder == self.loaded:
            return
        probe = read_probe(folder)
        if probe is None:
            raise UserError(f"{folder}: has no probe to verify a reload with; evaluate this policy in a job of its own")
        self.engine.reload(
            folder, spec.policy_step, probe_ids=probe.token_ids, probe_logprobs=probe.array(), tolerance=probe.tolerance, by_mean=probe.by_mean,
        )
        self.loaded, self.tokenizer = folder, ChatTokenizer.from_folder(folder)

    def _evaluate(self, spec: EvaluationSpec) -> None:
        policy = self.context.resolve(spec.policy)
        components, identity = self._epoch_components(spec, policy), policy_identity(policy)
        work = work_of(self.context, self.params, spec, self.tasks[spec.suite], identity, epoch_of(components))
        summary = score_in_chunks(self.context, work, {
            "version": spec.version, "suite": spec.suite, "policy": spec.policy, "policy_step": spec.policy_step, "policy_identity": identity,
            "device": self.engine.effective_config()["device"], "epoch": epoch_of(components), "epoch_components": components,
        }, lambda chunk, before: self._sample(spec, epoch_of(components), chunk, before))
        self.finished += len(work.tasks) * work.k
        self._show(spec, self.finished, score=summary["avg_at_k"])

    def _epoch_components(self, spec: EvaluationSpec, policy: Path) -> dict[str, str]:
        tokenizer = self.tokenizer if policy == self.loaded else ChatTokenizer.from_folder(policy)
        return epoch_components(
            suite=spec.suite, task_set=task_set_hash(self.tasks[spec.suite]), evaluation=self.evaluation, campaign_seed=self.context.campaign.seed,
            verifier=get_domain(self.context.campaign.domain.name).identity(), template=tokenizer.chat_template,
            tokenizer=sha256(policy / "tokenizer.json"), stop_token_ids=tokenizer.eos_ids, engine=self.engine.identity(), score=SCORE,
        )

    def _sample(self, spec: EvaluationSpec, epoch: str, chunk: range, before: int) -> list[dict[str, Any]]:
        """The rows of one chunk of this job's tasks; `before`: rollouts of this evaluation that were finished before."""
        self._load(spec)
        self._show(spec, self.finished + before)
        evaluation = self.evaluation
        names, hidden = shown_names(spec.suite, self.tasks[spec.suite])
        tasks, names = self.params.part(self.tasks[spec.suite]), self.params.part(names)
        sampling = Sampling(evaluation.temperature, evaluation.top_p, evaluation.max_response_tokens, self.tokenizer.eos_ids)
        sampler = Sampler(
            self.engine, self.tokenizer, get_domain(self.context.campaign.domain.name), sampling, Reward(weights={SCORE: 1.0}), spec.system_prompt,
            spec.max_turns, reply_seconds(self.context.cluster),
        )
        # An error of the engine may name a group: by the name that is shown.
        groups = [Group(names[i], tasks[i], self._seeds(spec.suite, tasks[i])) for i in chunk]
        common = {
            "campaign": self.context.spec.campaign, "version": spec.version, "suite": spec.suite,
            "policy_step": spec.policy_step, "trainer_step": None, "evaluator_epoch": epoch,
        }
        began = time.perf_counter()
        rows = sampler.rows(groups, common, lambda n: self._finished_one(spec, self.finished + before + n))
        self.tokens += sum(row["response_tokens"] for row in rows)
        self.sampled_seconds += time.perf_counter() - began
        return [without_words(row, hidden) for row in rows] if hidden else rows

    def _seeds(self, suite: str, task: Task) -> tuple[int, ...]:
        """The same for every version: paired versions meet the same random numbers."""
        seed = (self.context.campaign.seed, self.evaluation.seed, "evaluate", suite, task.task_id)
        return tuple(derive_seed(*seed, sample) for sample in range(self.evaluation.samples_per_task))

    def _finished_one(self, spec: EvaluationSpec, finished: int) -> None:
        self.context.raise_if_stopped()  # the engine drops what is left; nothing of this chunk is written
        self._show(spec, finished)

    def _show(self, spec: EvaluationSpec, finished: int, score: float | None = None) -> None:
        rate = self.tokens / self.sampled_seconds if self.sampled_seconds else None
        self.context.progress(
            stage=f"evaluating {spec.version} on {spec.suite}", step=finished, tokens_per_second=round(rate) if rate else None,
            **({"score": round(score, 4)} if score is not None else {}),
        )
