"""Tasks: the record, its strict JSON-lines form, and the hash of a task set."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from evo_hpc.errors import UserError

SPLITS = ("train", "probe", "dev", "sealed")
ROLES = ("system", "user", "assistant", "tool")


class TaskError(UserError):
    """A task, or a file of tasks, is not what it must be."""


@dataclass(frozen=True)
class Task:
    """One problem with a verifiable answer.

    `messages` are chat messages with exactly a role and a content; `attributes` are scalars for filters and analyzers.
    Raises `TaskError` for any value that could not be stored and read back unchanged.
    """

    task_id: str
    split: str
    messages: tuple[dict[str, str], ...]
    answer: str
    attributes: dict[str, int | float | str]

    def __post_init__(self) -> None:
        _text("task_id", self.task_id)
        if not self.task_id:
            raise TaskError("task_id is empty")
        _text("answer", self.answer)
        if self.split not in SPLITS:
            raise TaskError(f"split {self.split!r} is not one of {', '.join(SPLITS)}")
        if not isinstance(self.messages, tuple) or not self.messages:
            raise TaskError("messages must be a non-empty sequence of chat messages")
        for i, message in enumerate(self.messages):
            _check_message(i, message)
        if not isinstance(self.attributes, dict):
            raise TaskError("attributes must be a mapping of names to scalars")
        for name, value in self.attributes.items():
            _text("attribute name", name)
            _check_attribute(name, value)


def _text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TaskError(f"{what} must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(f"{what} holds a lone surrogate at character {error.start}: not storable as UTF-8") from None


def _check_message(index: int, message: object) -> None:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise TaskError(f"messages[{index}] must have exactly the keys role and content")
    if message["role"] not in ROLES:
        raise TaskError(f"messages[{index}].role {message['role']!r} is not one of {', '.join(ROLES)}")
    _text(f"messages[{index}].content", message["content"])


def _check_attribute(name: str, value: object) -> None:
    if isinstance(value, str):
        return _text(f"attribute {name!r}", value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TaskError(f"attribute {name!r} must be an int, float or string, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"attribute {name!r} is {value}: only finite numbers can be stored")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise TaskError(f"attribute {name!r} does not fit in 64 bits")
    return None


def task_to_json(task: Task) -> str:
    """Canonical JSON of a task: one line, sorted keys, ASCII, no spaces."""
    return json.dumps(asdict(task), sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def tasks_to_jsonl(tasks: Iterable[Task]) -> str:
    """JSON lines of `tasks`, in their order."""
    return "".join(task_to_json(task) + "\n" for task in tasks)


def tasks_from_jsonl(data: bytes, where: str) -> list[Task]:
    """Tasks of a JSON-lines file's content. Raises `TaskError` naming `where` and the line for the first bad line."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            task = _task_from_line(line)
        except TaskError as error:
            raise TaskError(f"{where}:{number}: {error}") from None
        if task.task_id in seen:
            raise TaskError(f"{where}:{number}: task_id {task.task_id!r} was already used on line {seen[task.task_id]}")
        seen[task.task_id] = number
        tasks.append(task)
    return tasks


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a JSON-lines file. Raises `TaskError` (file:line) for content, `OSError` for the file itself."""
    return tasks_from_jsonl(path.read_bytes(), str(path))


def task_set_hash(tasks: Iterable[Task]) -> str:
    """SHA-256 (hex) of a set of tasks: independent of their order. Raises `TaskError` if a task_id occurs twice."""
    lines: dict[str, str] = {}
    for task in tasks:
        if task.task_id in lines:
            raise TaskError(f"task_id {task.task_id!r} occurs twice in one task set")
        lines[task.task_id] = task_to_json(task)
    return hashlib.sha256("\n".join(sorted(lines.values())).encode("ascii")).hexdigest()


def _task_from_line(line: bytes) -> Task:
    if not line.strip():
        raise TaskError("blank line: remove it")
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except TaskError:
        raise
    except UnicodeDecodeError as error:
        raise TaskError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise TaskError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"not readable as JSON: {error}") from None
    if not isinstance(record, dict):
        raise TaskError(f"must be a JSON object, not {type(record).__name__}")
    expected = {field.name for field in fields(Task)}
    if set(record) != expected:
        missing, extra = sorted(expected - set(record)), sorted(set(record) - expected)
        raise TaskError(f"wrong keys: missing {missing}, unknown {ascii(extra)}")
    if not isinstance(record["messages"], list):
        raise TaskError("messages must be a list")
    return Task(**{**record, "messages": tuple(record["messages"])})


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise TaskError("a key occurs twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise TaskError(f"{name} is not JSON")
