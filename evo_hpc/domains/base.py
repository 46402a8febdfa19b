"""The interface of a domain (tasks, verifier, features, identity) and the registry of domains. Never imports torch."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evo_hpc.config.base import Config
from evo_hpc.domains.features import text_features
from evo_hpc.domains.task import (
    SPLITS,
    Task,
    TaskError,
    read_tasks,
    task_set_hash,
    task_to_json,
    tasks_from_jsonl,
    tasks_to_jsonl,
)
from evo_hpc.errors import UserError

__all__ = [
    "SCORE",
    "SPLITS",
    "Domain",
    "DomainError",
    "Task",
    "TaskError",
    "Verdict",
    "get_domain",
    "read_tasks",
    "source_hash",
    "task_set_hash",
    "task_to_json",
    "tasks_from_jsonl",
    "tasks_to_jsonl",
    "text_features",
]

SCORE = "correct"
"""The component that every domain's verifier gives and that a version is scored by: 1 for a right answer, else 0."""

_DOMAINS = {"arithmetic": ("evo_hpc.domains.arithmetic.domain", "Arithmetic")}


class DomainError(UserError):
    """A domain does not exist, or cannot do what its configuration asks for."""


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of one response.

    `components` holds every component of the domain, or nothing when `error` is set: then the verifier itself failed
    and the rollout must not be scored. `detail` says, for people, why a component is not 1.
    """

    components: dict[str, float]
    detail: str
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.error is None) != bool(self.components):
            raise ValueError("a verdict has either components or an error")
        if not all(math.isfinite(value) for value in self.components.values()):
            raise ValueError(f"reward components must be finite: {self.components}")


class Domain(Protocol):
    """Tasks with verifiable rewards. Implementations are stateless: any process may verify any rollout."""

    name: str
    version: str
    component_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    config_type: type[Config]

    def make_tasks(self, config: Any) -> dict[str, list[Task]]:
        """Tasks of every split, disjoint, determined by `config` (an instance of `config_type`) alone."""

    def verify(self, task: Task, text: str, *, truncated: bool) -> Verdict:
        """Judges a response: `text` without its end token; `truncated` when the token budget ended it. Never raises."""

    def features(self, text: str) -> dict[str, int | float]:
        """Behaviour of a response, under exactly `feature_names`, whatever the text."""

    def identity(self) -> dict[str, str]:
        """What makes two scores comparable on the verifier's side: part of the evaluator epoch."""


def get_domain(name: str) -> Domain:
    """The domain called `name`. Raises `DomainError` naming the known ones and the nearest."""
    if name not in _DOMAINS:
        near = difflib.get_close_matches(name, _DOMAINS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DomainError(f"unknown domain {name!r}: known are {', '.join(sorted(_DOMAINS))}{hint}")
    module, cls = _DOMAINS[name]
    domain: Domain = getattr(importlib.import_module(module), cls)()
    return domain


def source_hash(*files: str) -> str:
    """SHA-256 (hex) of source files, by name and content, independent of where they are installed."""
    digest = hashlib.sha256()
    for path in sorted((Path(file) for file in files), key=lambda path: path.name):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()
