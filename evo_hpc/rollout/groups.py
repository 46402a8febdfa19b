"""Samples groups of rollouts and verifies them: tasks in, rollout rows (store/schemas.py ROLLOUT) out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evo_hpc.config.recipe import Reward
from evo_hpc.domains.base import Domain, Task, text_features
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.errors import UserError
from evo_hpc.rollout.engine import Completion, Engine, Request, Sampling
from evo_hpc.rollout.reward import total_reward
from evo_hpc.store.atomic import read_json


class ContextError(UserError):
    """Prompts and responses do not fit into the model's context."""


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt: one seed a sample."""

    group_id: str
    task: Task
    seeds: tuple[int, ...]


def messages_of(task: Task, system_prompt: str | None) -> list[dict[str, str]]:
    """The chat that the policy is given."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, *({**m} for m in task.messages)]


def positions(folder: Path) -> int | None:
    """Positions that a model folder's config.json allows; null when it does not say."""
    value = read_json(folder / "config.json").get("max_position_embeddings")
    return None if value is None else int(value)


def longest_context(
    tokenizer: ChatTokenizer, tasks: Iterable[Task], system_prompt: str | None, max_response_tokens: int, positions: int | None
) -> int:
    """Tokens that an engine must hold for any of `tasks`: the longest prompt, a full response, one to spare where it fits.

    Raises ContextError when the model has fewer positions than that.
    """
    longest = max(len(tokenizer.encode_prompt(messages_of(task, system_prompt))) for task in tasks)
    needed = longest + max_response_tokens
    if positions is not None and needed > positions:
        raise ContextError(f"the longest prompt ({longest} tokens) and max_response_tokens ({max_response_tokens}) need {needed} "
                           f"positions, the model has {positions}; lower max_response_tokens or shorten the prompt")
    return needed + (positions is None or needed < positions)


@dataclass
class Sampler:
    """An engine with all that turns its tokens into rows."""

    engine: Engine
    tokenizer: ChatTokenizer
    domain: Domain
    sampling: Sampling
    reward: Reward
    system_prompt: str | None = None

    def rows(
        self, groups: Sequence[Group], common: Mapping[str, Any], on_finish: Callable[[int], None] | None = None
    ) -> list[dict[str, Any]]:
        """One row a rollout, in the order of groups and samples.

        common: campaign, version, suite, policy_step, trainer_step, evaluator_epoch. `on_finish` is called with the
        number of rollouts finished so far.
        """
        prompts = {g.group_id: tuple(self.tokenizer.encode_prompt(messages_of(g.task, self.system_prompt))) for g in groups}
        requests = [
            Request(f"{group.group_id}/{sample}", prompts[group.group_id], seed)
            for group in groups for sample, seed in enumerate(group.seeds)
        ]
        finished = 0

        def count(_: Completion) -> None:
            nonlocal finished
            finished += 1
            if on_finish is not None:
                on_finish(finished)

        done = iter(self.engine.generate(requests, self.sampling, count))
        return [
            self._row(group, sample, seed, prompts[group.group_id], next(done), common)
            for group in groups for sample, seed in enumerate(group.seeds)
        ]

    def _row(
        self, group: Group, sample: int, seed: int, prompt: tuple[int, ...], completion: Completion, common: Mapping[str, Any]
    ) -> dict[str, Any]:
        ids = list(completion.token_ids)
        text = self.tokenizer.decode_response(ids)
        truncated = completion.stop_reason == "length"
        started = time.perf_counter()
        verdict = self.domain.verify(group.task, text, truncated=truncated)
        seconds = time.perf_counter() - started
        reward = None if verdict.error else total_reward(
            self.reward, verdict.components, truncated=truncated, tokens=len(ids), max_tokens=self.sampling.max_tokens,
        )
        return {
            **common,
            "task_id": group.task.task_id, "group_id": group.group_id, "sample": sample, "seed": seed,
            "turns": 1, "prompt_ids": list(prompt), "response_ids": ids, "loss_mask": [1] * len(ids),
            "logprobs": completion.logprobs.tolist(), "text": text, "messages": None, "tool_calls": [],
            "stop_reason": completion.stop_reason, "reward": reward, "components": list(verdict.components.items()),
            "verifier_detail": verdict.detail, "error_class": "verifier" if verdict.error else None,
            "weight_version": completion.weight_version,
            "generate_seconds": completion.seconds, "verify_seconds": seconds,
            "prompt_tokens": len(prompt), "response_tokens": len(ids), "truncated": truncated,
            "tool_call_count": 0, "tool_error_count": 0, **text_features(ids),
            "domain_features": [(name, float(value)) for name, value in self.domain.features(text).items()],
            "task_attributes": [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in group.task.attributes.items()],
            "advantage": None, "kept": None, "staleness": None,
        }
