"""YAML in and out: comments kept, every error with file and line, the nearest key suggested for a mistyped one."""

from __future__ import annotations

import difflib
import functools
import io
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from evo_hpc.errors import UserError

M = TypeVar("M", bound=BaseModel)


class ConfigError(UserError):
    """A YAML file that cannot be used; the message has one line a problem, each with file:line."""


def _yaml() -> YAML:
    yaml = YAML(typ="rt")
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.allow_duplicate_keys = False
    return yaml


def load_tree(path: Path) -> CommentedMap:
    """The file as a tree that remembers comments and lines. Raises ConfigError."""
    return _parse(path, _read(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; write it, or copy one from campaigns/demo or another version") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def parse(text: str) -> Any:
    """The tree of a text. Raises YAMLError."""
    return _yaml().load(text)


def _parse(path: Path, text: str) -> CommentedMap:
    try:
        tree = parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = (error.problem or error.context or "not valid YAML").split("\n")[0]
        raise ConfigError(f"{path}:{line}: {problem}") from error
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({error})") from error
    if not isinstance(tree, CommentedMap):
        raise ConfigError(f"{path}:1: expected keys and values, found {'an empty file' if tree is None else 'a list' if isinstance(tree, list) else 'a single value'}")
    return tree


def load_model(path: Path, model: type[M]) -> M:
    """The file validated as `model`. Raises ConfigError with one line a problem."""
    text = _read(path)
    if not (known := _known(model, text)):
        known.append(_validated(path, model, text))
    return known[0]


@functools.lru_cache(maxsize=4096)  # by content, whichever file has it: hundreds of versions share a recipe
def _known(model: type[M], text: str) -> list[M]:
    """Where the model that a text was found to be is kept; empty before that."""
    return []


def _validated(path: Path, model: type[M], text: str) -> M:
    tree = _parse(path, text)
    try:
        return model.model_validate(plain(tree))
    except ValidationError as error:
        raise ConfigError(explain(path, model, error)) from error


def explain(path: Path, model: type[BaseModel], error: ValidationError, inside: tuple[str, ...] = ()) -> str:
    """One line a problem, with the file's lines; `inside` is where in the file the validated part lies."""
    tree = load_tree(path)
    return "\n".join(_explain(path, tree, model, problem, inside) for problem in error.errors())


def plain(node: Any) -> Any:
    """Plain dicts, lists and scalars of a tree, without ruamel's types."""
    if isinstance(node, dict):
        return {str(k): plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [plain(v) for v in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def dump_tree(tree: Any) -> bytes:
    """YAML text of a tree (comments and all) or of plain values."""
    buffer = io.BytesIO()
    _yaml().dump(tree if isinstance(tree, CommentedMap) else plain(tree), buffer)
    return buffer.getvalue()


def dump_model(model: BaseModel) -> bytes:
    """YAML text of a model, every field, in the order of its definition."""
    return dump_tree(model.model_dump(mode="json"))


def _explain(path: Path, tree: CommentedMap, model: type[BaseModel], problem: Any, inside: tuple[str, ...]) -> str:
    location = list(problem["loc"])
    full = [*inside, *location]
    line, dotted = line_of(tree, full), ".".join(str(part) for part in full) or "the file"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known here: {', '.join(known)}" if known else ""
        return f"{path}:{line}: unknown key `{dotted}`{hint}"
    if problem["type"] == "missing":
        return f"{path}:{line}: `{dotted}` is missing"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = f" (found {given!r})" if isinstance(given, (str, int, float, bool)) or given is None else ""
    return f"{path}:{line}: `{dotted}`: {message}{shown}"


def line_of(tree: Any, location: list[Any]) -> int:
    """1-based line of the deepest part of `location` that the file has."""
    node, line = tree, 1
    for part in location:
        if isinstance(node, CommentedMap) and part in node:
            line = node.lc.key(part)[0] + 1
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line = node.lc.item(part)[0] + 1
        else:
            break
        node = node[part]
    return line


def _known_keys(model: type[BaseModel], location: list[Any]) -> list[str]:
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue  # an item of a list of models
        fields = getattr(current, "model_fields", {})
        if part not in fields:
            return []
        current = _model_in(fields[part].annotation)
    return list(getattr(current, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
