"""Rendering of analyzers' templates: SQL, into which values go as bound parameters only, and text for people.

Nothing is run when a template is checked: constant folding is off, since a template may come from an agent.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_BOUND = "bound values"
_OUTPUT = re.compile(r"\{\{.*?\}\}")


class TemplateProblem(Exception):
    """A template that cannot be compiled or rendered; `line` is 1-based, null where it is not known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class _SqlText:
    """What `bind` and `ident` made: the only output that a SQL template may have."""

    def __init__(self, text: str) -> None:
        self._text = text  # with an underscore: templates cannot take it out


@pass_context
def _bind(context: Context, value: Any) -> _SqlText:
    if isinstance(value, _SqlText):
        raise TypeError("this has been through `bind` or `ident` already")
    if not isinstance(value, str | int | float | list | tuple | dict | None):
        raise TypeError(f"`bind` takes numbers, texts, lists and mappings, not `{value}`")  # of what is undefined, `{value}` raises and says so
    bound = context[_BOUND]
    name = f"b{len(bound)}"
    bound[name] = value
    return _SqlText(f"${name}")


def _ident(name: Any) -> _SqlText:
    if not isinstance(name, str) or not name or "\0" in name:
        raise TypeError(f"`ident` takes a name, not {name!r}")
    return _SqlText('"' + name.replace('"', '""') + '"')


@pass_context  # which also keeps Jinja from running it on constants at compile time
def _only_sql(_: Context, value: Any) -> str:
    if isinstance(value, _SqlText):
        return value._text
    raise TypeError(f"{value!r} would go into the SQL as it stands; write `| bind` for a value, `| ident` for the name of a column or table")


@pass_context
def _as_it_is(_: Context, value: Any) -> Any:
    return value


def _number(value: Any, digits: int = 3) -> str:
    """A number for people; `–` for nothing."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def _percent(value: Any, digits: int = 0) -> str:
    """A fraction in percent; `–` for nothing."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def _environment(finalize: Any) -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, finalize=finalize, optimized=False, autoescape=False, keep_trailing_newline=True,
    )


SQL = _environment(_only_sql)
"""For query.sql.j2, measures.sql.j2 and the evidence of findings."""
SQL.filters.update(bind=_bind, ident=_ident)
TEXT = _environment(_as_it_is)
"""For report.md.j2 and what findings say."""
TEXT.filters.update(number=_number, percent=_percent)


def check_template(environment: ImmutableSandboxedEnvironment, source: str, name: str) -> Any:
    """Compile a template, without running any of it. Raises TemplateProblem."""
    try:
        return environment.compile(source, name, name)
    except TemplateSyntaxError as error:  # also an unknown filter or test
        raise TemplateProblem(error.message or "not a valid template", error.lineno) from error
    except RecursionError as error:
        raise TemplateProblem("nested too deeply") from error


def render_text(source: str, name: str, values: Mapping[str, Any]) -> str:
    """A text for people. Raises TemplateProblem."""
    return _render(TEXT, source, name, values)


def render_sql(source: str, name: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """SQL, and the values bound in it. Raises TemplateProblem."""
    bound: dict[str, Any] = {}
    return _render(SQL, source, name, {**values, _BOUND: bound}), bound


def _render(environment: ImmutableSandboxedEnvironment, source: str, name: str, values: Mapping[str, Any]) -> str:
    code = check_template(environment, source, name)
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    try:
        return template.render(values)
    except MemoryError as error:
        raise TemplateProblem("takes more memory than an analyzer may have") from error
    except (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        raise TemplateProblem(str(error) or type(error).__name__, lines[-1] if lines else None) from error


def template_line(source: str, rendered: str, line: int) -> int | None:
    """The template's line that the `line`-th of the rendered text came from; null where that is not certain."""
    lines, wanted = source.splitlines(), rendered.splitlines()
    if not 1 <= line <= len(wanted):
        return None
    fits = [
        number for number, text in enumerate(lines, start=1)
        if text.strip() and re.fullmatch(".*".join(map(re.escape, _OUTPUT.split(text))), wanted[line - 1])
    ]
    return line if line in fits else fits[0] if len(fits) == 1 else None
