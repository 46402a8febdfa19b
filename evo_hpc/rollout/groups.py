"""Samples groups of rollouts and verifies them: tasks in, rollout rows (store/schemas.py ROLLOUT) out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Reward
from evo_hpc.domains.base import Domain, Task, Verdict, text_features
from evo_hpc.domains.environment import environment_of
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.errors import UserError
from evo_hpc.rollout.episodes import Episode, Episodes, Samples, turn_columns
from evo_hpc.rollout.records import Sampling
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


def reply_seconds(cluster: Cluster) -> float:
    """What an environment may take for one answer: less than what a job may take without a sign of life."""
    return 0.8 * 60 * cluster.stall_minutes


@dataclass
class Sampler:
    """An engine with all that turns its tokens into rows."""

    engine: Samples
    tokenizer: ChatTokenizer
    domain: Domain
    sampling: Sampling
    reward: Reward
    system_prompt: str | None = None
    max_turns: int = 1
    reply_seconds: float = math.inf
    """What an environment may take for one answer."""
    under_way: Episodes = field(init=False)

    def __post_init__(self) -> None:
        self.under_way = Episodes(self.engine, self.tokenizer, self.sampling, self.reply_seconds)

    def rows(
        self, groups: Sequence[Group], common: Mapping[str, Any], on_finish: Callable[[int], None] | None = None
    ) -> list[dict[str, Any]]:
        """One row a rollout, in the order of groups and samples.

        common: campaign, version, suite, policy_step, trainer_step, evaluator_epoch. `on_finish` is called with the
        number of rollouts finished so far.
        """
        episodes, finished = self.episodes(groups), 0
        self.under_way.add(episodes)
        try:
            while self.under_way.unfinished:
                for _ in self.under_way.step():
                    finished += 1
                    if on_finish is not None:
                        on_finish(finished)
        finally:  # after an error or a stop the engine stays usable
            self.under_way.drop(episodes)
        return self.verified(groups, episodes, common)

    def episodes(self, groups: Sequence[Group]) -> list[Episode]:
        """One a rollout, in the order of groups and samples."""
        prompts = {g.group_id: tuple(self.tokenizer.encode_prompt(messages_of(g.task, self.system_prompt))) for g in groups}
        return [
            Episode(
                f"{group.group_id}/{sample}", prompts[group.group_id], seed, environment_of(self.domain, group.task), self.sampling.max_tokens,
                self.max_turns,
            )
            for group in groups for sample, seed in enumerate(group.seeds)
        ]

    def verified(self, groups: Sequence[Group], episodes: Sequence[Episode], common: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of `groups` from their `episodes`, which are over, in the same order."""
        each = iter(episodes)
        return [self._row(group, sample, seed, next(each), common) for group in groups for sample, seed in enumerate(group.seeds)]

    def _row(self, group: Group, sample: int, seed: int, episode: Episode, common: Mapping[str, Any]) -> dict[str, Any]:
        ids, truncated = episode.response_ids, episode.stop_reason == "length"
        started = time.perf_counter()
        verdict = Verdict({}, "", episode.error) if episode.error else episode.environment.verdict(episode.text, truncated=truncated)
        seconds = time.perf_counter() - started
        reward = None if verdict.error else total_reward(
            self.reward, verdict.components, truncated=truncated, tokens=len(ids), max_tokens=self.sampling.max_tokens,
        )
        return {
            **common,
            "task_id": group.task.task_id, "group_id": group.group_id, "sample": sample, "seed": seed,
            "prompt_ids": list(episode.prompt_ids), "response_ids": ids, "loss_mask": episode.loss_mask,
            "logprobs": episode.logprobs, "text": self.tokenizer.decode_response(ids),
            "messages": json.dumps(episode.messages, ensure_ascii=False) if self.max_turns > 1 else None,
            "stop_reason": episode.stop_reason, "reward": reward, "components": list(verdict.components.items()),
            "verifier_detail": verdict.detail or verdict.error,
            "error_class": "environment" if episode.error else "verifier" if verdict.error else None,
            "weight_version": episode.weight_version,
            "generate_seconds": episode.seconds, "verify_seconds": seconds + episode.reply_seconds,
            "prompt_tokens": len(episode.prompt_ids), "response_tokens": len(ids), "truncated": truncated,
            **turn_columns(episode), **text_features(ids),
            "domain_features": [(name, float(value)) for name, value in self.domain.features(episode.said).items()],
            "task_attributes": [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in group.task.attributes.items()],
            "advantage": None, "kept": None, "staleness": None,
        }
