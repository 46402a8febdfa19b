"""What a policy talks with during a rollout: an environment that answers each of its responses until the episode is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from evo_hpc.domains.base import Domain, DomainError, Verdict
from evo_hpc.domains.task import Task


@dataclass(frozen=True)
class ToolCall:
    """One use of a tool; `arguments` is the text that the policy gave."""

    name: str
    arguments: str
    ok: bool
    seconds: float


@dataclass(frozen=True)
class Reply:
    """What the environment says to a response."""

    messages: Sequence[dict[str, str]] = ()
    """Messages that come next in the chat; none: the episode is over."""
    tool_calls: Sequence[ToolCall] = field(default=())


class Environment(Protocol):
    """One episode of a task; used by one thread at a time, and may take its time."""

    def reply(self, text: str) -> Reply:
        """Answers a response (`text` without its end token) that came to its own end."""

    def verdict(self, text: str, *, truncated: bool) -> Verdict:
        """Judges the episode after its last response, `text`; `truncated` when the token budget ended it. Never raises."""


@runtime_checkable
class MultiTurn(Protocol):
    """A domain whose tasks are worked on in several turns."""

    def environment(self, task: Task) -> Environment:
        """A new episode of a task."""


class OneTurn:
    """The environment of a domain without turns: over after the first response, which the domain's verifier judges."""

    def __init__(self, domain: Domain, task: Task) -> None:
        self._domain, self._task = domain, task

    def reply(self, text: str) -> Reply:
        """Nothing: the episode is over."""
        return Reply()

    def verdict(self, text: str, *, truncated: bool) -> Verdict:
        """The domain's."""
        return self._domain.verify(self._task, text, truncated=truncated)


def environment_of(domain: Domain, task: Task) -> Environment:
    """A new episode of a task of `domain`."""
    return domain.environment(task) if isinstance(domain, MultiTurn) else OneTurn(domain, task)


def check_turns(domain: Domain, max_turns: int) -> None:
    """Raise DomainError where a recipe asks for turns that a domain does not have."""
    if max_turns > 1 and not isinstance(domain, MultiTurn):
        raise DomainError(f"tool_use.max_turns is {max_turns}, but the tasks of domain {domain.name} are answered in one turn; set it to 1")
