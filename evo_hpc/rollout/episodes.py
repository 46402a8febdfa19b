"""Rollouts of one or more turns, many at once in one engine: each goes on as soon as its environment has answered."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from evo_hpc.domains.environment import Environment, OneTurn, Reply, ToolCall
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.rollout.records import Completion, Request, Sampling
from evo_hpc.seeds import derive_seed

_LOOK_SECONDS = 0.05
"""While nothing is being sampled, replies are waited for this long at a time."""


class Samples(Protocol):
    """What of an engine is used here."""

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None: ...
    def step(self) -> list[Completion]: ...
    def drop(self, request_ids: Sequence[str]) -> None: ...
    @property
    def unfinished(self) -> int: ...


@dataclass
class Episode:
    """One rollout: the token ids of the policy are those that the engine gave, never made again from text; those of the environment's
    messages stand between them and carry no loss."""

    name: str
    """Unique in the engine."""
    prompt_ids: tuple[int, ...]
    seed: int
    environment: Environment
    max_tokens: int
    """Token budget of all that follows the prompt, the environment's messages included."""
    max_turns: int = 1
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    """Per response token: 1 where the policy sampled it."""
    logprobs: list[float] = field(default_factory=list)
    """Per response token; 0 where the policy did not sample it."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """What was said after the prompt, in turn."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    turns: int = 0
    stop_reason: Literal["stop", "length", "turns", "error"] | None = None
    """Null while it goes on. `turns`: the environment would have gone on; `error`: it failed."""
    error: str | None = None
    """How the environment failed: no fault of the policy's."""
    weight_version: int = -1
    seconds: float = 0.0
    """In the engine, queueing included, over all turns."""
    reply_seconds: float = 0.0
    """In the environment."""

    @property
    def text(self) -> str:
        """The policy's latest response."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "assistant"), "")

    @property
    def said(self) -> str:
        """All of the policy's responses."""
        return "\n".join(m["content"] for m in self.messages if m["role"] == "assistant")

    def request(self) -> Request:
        """What the engine is asked for next."""
        name, seed = (self.name, self.seed) if not self.turns else (f"{self.name}/{self.turns}", derive_seed(self.seed, "turn", self.turns))
        return Request(name, (*self.prompt_ids, *self.response_ids), seed, self.max_tokens - len(self.response_ids))

    def take(self, completion: Completion, tokenizer: ChatTokenizer) -> None:
        """Add a response of the policy. One that the token budget cut off is the last."""
        assert self.weight_version in (-1, completion.weight_version), "an episode is sampled by one policy"
        self.weight_version = completion.weight_version
        self.turns += 1
        self.seconds += completion.seconds
        self.response_ids += completion.token_ids
        self.loss_mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()
        self.messages.append({"role": "assistant", "content": tokenizer.decode_response(completion.token_ids)})
        if completion.stop_reason == "length":
            self.stop_reason = "length"

    def hear(self, reply: Reply, tokenizer: ChatTokenizer) -> None:
        """Add the environment's answer, if the episode goes on after it: within its turns, and with room for one token at least."""
        self.tool_calls += reply.tool_calls
        if not reply.messages:
            self.stop_reason = "stop"
        elif self.turns >= self.max_turns:
            self.stop_reason = "turns"
        else:
            ids = tokenizer.encode_continuation(reply.messages)
            if len(self.response_ids) + len(ids) >= self.max_tokens:
                self.stop_reason = "length"
                return
            self.response_ids += ids
            self.loss_mask += [0] * len(ids)
            self.logprobs += [0.0] * len(ids)
            self.messages += [dict(message) for message in reply.messages]


@dataclass(frozen=True)
class _Answer:
    """What an environment has come to."""

    episode: Episode
    reply: Reply | None
    error: str | None
    seconds: float


class Episodes:
    """Those that are under way in an engine. Each environment answers in a thread of its own, so that a slow one holds up its own
    episode only; one that fails, or does not answer within `reply_seconds`, ends it as an error."""

    def __init__(self, engine: Samples, tokenizer: ChatTokenizer, sampling: Sampling, reply_seconds: float = math.inf) -> None:
        self._engine, self._tokenizer, self._sampling, self._reply_seconds = engine, tokenizer, sampling, reply_seconds
        self._sampled: dict[str, Episode] = {}
        """By the name of the request that is in the engine."""
        self._waiting: dict[str, tuple[Episode, float]] = {}
        """By the episode's name: those whose environment was asked, and when."""
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self.went_on = False
        """Whether the last step sampled anything, or heard of an environment."""

    @property
    def unfinished(self) -> int:
        """Episodes that are not over."""
        return len(self._sampled) + len(self._waiting)

    def add(self, episodes: Iterable[Episode]) -> None:
        """Begin episodes, beside those that are under way. Raises RequestError before any is begun."""
        requests = {(request := episode.request()).request_id: (request, episode) for episode in episodes}
        self._engine.add([request for request, _ in requests.values()], self._sampling)
        self._sampled |= {name: episode for name, (_, episode) in requests.items()}

    def step(self) -> list[Episode]:
        """One token more of each that is being sampled, and what the environments have said meanwhile; returns those that are over."""
        over = []
        self.went_on = self._engine.unfinished > 0
        for completion in self._engine.step() if self.went_on else []:
            episode = self._sampled.pop(completion.request_id)
            episode.take(completion, self._tokenizer)
            if episode.stop_reason is None and isinstance(episode.environment, OneTurn):
                episode.hear(Reply(), self._tokenizer)
            if episode.stop_reason is not None:
                over.append(episode)
            else:
                self._ask(episode)
        if self._waiting:
            over += self._go_on(self._heard(_LOOK_SECONDS if not self._engine.unfinished and not over else 0.0))
        return over

    def drop(self, episodes: Iterable[Episode]) -> None:
        """Give episodes up; what they have sampled is lost. An environment that is still answering is not waited for."""
        gone = {id(episode) for episode in episodes}
        names = [name for name, episode in self._sampled.items() if id(episode) in gone]
        self._engine.drop(names)
        for name in names:
            del self._sampled[name]
        self._waiting = {name: each for name, each in self._waiting.items() if id(each[0]) not in gone}

    def _ask(self, episode: Episode) -> None:
        self._waiting[episode.name] = (episode, time.monotonic())
        threading.Thread(target=_answer, args=(episode, episode.text, self._answers), name=f"environment of {episode.name}", daemon=True).start()

    def _heard(self, seconds: float) -> list[_Answer]:
        """The answers that are there, waited for so long; and those that never came in time. What was given up meanwhile is passed over."""
        found: list[_Answer] = []
        try:
            found.append(self._answers.get(timeout=seconds) if seconds else self._answers.get_nowait())
            while True:
                found.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        now = time.monotonic()
        found = [each for each in found if self._waiting.get(each.episode.name, (None, 0.0))[0] is each.episode]
        answered = {each.episode.name for each in found}
        found += [
            _Answer(episode, None, f"no answer within {self._reply_seconds:g} s", now - asked)
            for name, (episode, asked) in self._waiting.items() if name not in answered and now - asked > self._reply_seconds
        ]
        for each in found:
            del self._waiting[each.episode.name]
        return found

    def _go_on(self, answers: list[_Answer]) -> list[Episode]:
        over, more = [], []
        for each in answers:
            self.went_on = True
            each.episode.reply_seconds += each.seconds
            if each.reply is None:
                each.episode.stop_reason, each.episode.error = "error", each.error
            else:
                each.episode.hear(each.reply, self._tokenizer)
            (more if each.episode.stop_reason is None else over).append(each.episode)
        if more:
            self.add(more)
        return over


def _answer(episode: Episode, text: str, answers: queue.SimpleQueue[_Answer]) -> None:
    started = time.perf_counter()
    reply, error = None, None
    try:
        reply = episode.environment.reply(text)
    except Exception as failed:  # whatever it is: the episode's group is dropped and counted, and the worker goes on
        error = f"{type(failed).__name__}: {failed}"
    answers.put(_Answer(episode, reply, error, time.perf_counter() - started))


def turn_columns(episode: Episode) -> dict[str, Any]:
    """What a rollout's row says of its turns (store/schemas.py ROLLOUT)."""
    calls = episode.tool_calls
    return {
        "turns": episode.turns,
        "tool_calls": [{"name": c.name, "arguments": c.arguments, "ok": c.ok, "seconds": c.seconds} for c in calls],
        "tool_call_count": len(calls), "tool_error_count": sum(not c.ok for c in calls),
    }
