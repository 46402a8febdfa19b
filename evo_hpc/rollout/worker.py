"""The rollout role of a training job: an engine that follows the trainer's weights and answers its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import dump_tree
from evo_hpc.domains.base import Task, get_domain, read_tasks
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.jobs.context import RoleContext
from evo_hpc.rollout.doorbell import SILENT, Doorbell
from evo_hpc.rollout.engine import Engine, Sampling
from evo_hpc.rollout.errors import ModelFolderError
from evo_hpc.rollout.exchange import (
    BatchRequest,
    Requests,
    claim_batch,
    newest_published,
    published,
    read_probe,
    read_request,
    unanswered,
    unwanted,
    wait_for,
)
from evo_hpc.rollout.groups import Sampler, longest_context, positions, reply_seconds
from evo_hpc.rollout.in_flight import Batch, Pulse
from evo_hpc.store.atomic import StoreError, write_bytes
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import write_table

_CANCEL_EVERY = 64
"""Engine steps between looks at whether batches in the engine are still wanted."""


def run(context: RoleContext) -> dict[str, Any]:
    """Serve batches until the job ends: the launcher stops this role when the trainer is done."""
    recipe = Recipe.model_validate(context.spec.params["recipe"])
    init = context.resolve(context.spec.params["init"])
    bell = Doorbell.connect(context.exchange, context.role)
    tasks = {task.task_id: task for task in read_tasks(context.campaign_paths.tasks("train"))}
    profile = context.cluster.engine
    tokenizer = ChatTokenizer.from_folder(init)
    longest = longest_context(
        tokenizer, tasks.values(), recipe.tool_use.system_prompt, recipe.rollout.max_response_tokens, positions(init)
    )
    engine = Engine(
        init, weight_version=-1, max_model_len=longest, kv_cache_bytes=profile.kv_cache_mib << 20,
        dtype=profile.dtype, threads=profile.threads, seed=recipe.seed, tensor_parallel=profile.tensor_parallel,
    )
    sampler = Sampler(
        engine, tokenizer, get_domain(context.campaign.domain.name),
        Sampling(recipe.rollout.temperature, 1.0, recipe.rollout.max_response_tokens, tokenizer.eos_ids),
        recipe.reward, recipe.tool_use.system_prompt, recipe.tool_use.max_turns, reply_seconds(context.cluster),
    )
    sampling = {**asdict(sampler.sampling), "stop_token_ids": list(tokenizer.eos_ids)}
    effective = {**engine.effective_config(), "start_seconds": context.seconds(), "sampling": sampling, "workers": profile.workers}
    write_bytes(context.incarnation.effective(context.role), dump_tree(effective))
    share = -(-recipe.rollout.groups_asked // profile.workers) * recipe.rollout.group_size
    Serving(context, sampler, tasks, share, bell).run()


class Serving:
    """Takes batches and answers them: several at a time in the engine, as long as they are of the same weights."""

    def __init__(self, context: RoleContext, sampler: Sampler, tasks: Mapping[str, Task], share: int, bell: Doorbell = SILENT) -> None:
        """share: a further batch is taken while fewer rollouts than this are being sampled: one worker's part of a step."""
        self.context, self.sampler, self.tasks, self.share, self.bell = context, sampler, tasks, share, bell
        self.exchange, self.engine, self.under_way = context.exchange, sampler.engine, sampler.under_way
        self.requests = Requests(self.exchange, bell)
        self.redo = unanswered(self.exchange, context.role)
        self.active: list[Batch] = []
        self.pulse = Pulse(context.incarnation.pulse(context.role))
        self.steps = 0

    def run(self) -> NoReturn:
        """Ends by raising Stopped, or what the engine raises. A stop takes effect at the next token: what was sampled of a batch is
        dropped, and sampled again after a resume."""
        while True:
            self.context.raise_if_stopped()
            while self.under_way.unfinished < self.share and self._take():
                pass
            if self.active:
                self._sample()
            else:
                self.pulse.idle()
                self._wait(lambda: bool(self.redo) or self.requests.next() is not None)

    def _wait(self, ready: Callable[[], bool]) -> None:
        wait_for(ready, self.context.raise_if_stopped, self.bell)

    def _take(self) -> bool:
        """Put one more batch into the engine; False when there is none, or it must wait until the engine is empty."""
        number = self.redo[0] if self.redo else self.requests.next()
        if number is None:
            return False
        request = None if unwanted(self.exchange, number, self.bell) else read_request(self.exchange, number)
        if request is not None:
            version = self._weights(request)
            if self.active and version != self.engine.weight_version:
                return False
            if self.redo or claim_batch(self.exchange, number, self.context.role):
                self.pulse.busy()
                self._begin(request, version)
        if self.redo:
            self.redo.pop(0)
        else:
            self.requests.passed(number)
        return True

    def _weights(self, request: BatchRequest) -> int:
        newest = newest_published(self.exchange, self.bell) if request.newest else None
        return max(request.weight_version, -1 if newest is None else newest)

    def _begin(self, request: BatchRequest, version: int) -> None:
        """Sample a batch, unless it is over since it was looked at (its claim is the last of it to go) or while its weights are loaded."""
        while not unwanted(self.exchange, request.number, self.bell):
            if self.engine.weight_version == version:
                batch = Batch.of(request, self.tasks, self.sampler)
                self.under_way.add(batch.episodes)
                self.active.append(batch)
                return
            try:
                self._wait(lambda: published(self.exchange, version, self.bell) or self._overtaken(request, version))
                self._load(version)
            except (StoreError, OSError, ModelFolderError):  # removed while it was read, by a trainer that has gone on?
                if not self._overtaken(request, version):
                    raise
                version = self._weights(request)

    def _overtaken(self, request: BatchRequest, version: int) -> bool:
        return self._weights(request) != version or unwanted(self.exchange, request.number, self.bell)

    def _load(self, version: int) -> None:
        """Bring the engine to published weights, verified against the trainer's own log-probabilities."""
        folder = self.exchange.policy(version)
        probe = read_probe(folder)
        assert probe is not None, f"{folder}: the trainer publishes each policy with a probe"
        error = self.engine.reload(
            folder, version, probe_ids=probe.token_ids, probe_logprobs=probe.array(), tolerance=probe.tolerance, by_mean=probe.by_mean,
        )
        write_bytes(self.exchange.seen(version, self.context.role), f"{error}\n".encode(), durable=False)

    def _sample(self) -> None:
        """One token more of all, and what that completes."""
        if self.under_way.step():
            self.context.raise_if_stopped()
        if self.under_way.went_on:  # an environment that does not answer is no sign of life
            self.pulse.busy()
        for batch in [batch for batch in self.active if batch.is_complete]:
            self._answer(batch)
        self.steps += 1
        if self.steps % _CANCEL_EVERY == 0:
            for batch in [batch for batch in self.active if unwanted(self.exchange, batch.request.number, self.bell)]:
                self.under_way.drop(batch.episodes)
                self.active.remove(batch)

    def _answer(self, batch: Batch) -> None:
        common = {
            "campaign": self.context.spec.campaign, "version": self.context.spec.owner, "suite": "train",
            "policy_step": self.engine.weight_version, "trainer_step": batch.request.step, "evaluator_epoch": None,
        }
        rows = self.sampler.verified(batch.groups, batch.episodes, common)
        self.active.remove(batch)
        path = self.exchange.rollouts(batch.request.number)
        if not unwanted(self.exchange, batch.request.number, self.bell):
            write_table(path, rows, ROLLOUT, durable=False)
            self.bell.ring(path)
