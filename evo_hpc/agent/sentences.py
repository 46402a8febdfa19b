"""Sentences of rules: Jinja in a sandbox, from a fixed set of names; a name that is not there is an error, never a blank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evo_hpc.errors import UserError
from evo_hpc.lineage.findings import Citation

NAMES = ("field", "before", "after", "measures", "findings", "because")
"""What a sentence may speak of: the field and its two values, the incumbent's measures (name -> value) and findings
(id -> citation), and the texts of the findings that the rule's conditions named."""


class BadSentence(UserError):
    """A template that does not compile, or that speaks of something that is not there."""


def shown(value: Any) -> Any:
    """A recipe's value as people read it: floats to 4 digits, null as `unset`."""
    return "unset" if value is None else f"{value:.4g}" if isinstance(value, float) else value


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=shown, autoescape=False)
    environment.filters["percent"] = lambda value: f"{100 * value:.3g} %"
    environment.filters["points"] = lambda value: f"{100 * value:.1f} points"
    return environment


def render(template: str, names: Mapping[str, Any]) -> str:
    """The sentence, in one line. Raises BadSentence."""
    try:
        text: str = _environment().from_string(template).render(names)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise BadSentence(f"{template!r}: {error}") from error
    return " ".join(text.split())


def check(template: str, *, field: str, before: Any, after: Any) -> None:
    """Try a sentence on example values, and look at the branches that the example does not take. Raises BadSentence."""
    environment = _environment()
    try:
        unknown = sorted(meta.find_undeclared_variables(environment.parse(template)) - {*NAMES, *environment.globals})
    except TemplateError as error:
        raise BadSentence(f"{template!r}: {error}") from error
    if unknown:
        raise BadSentence(f"{template!r}: {', '.join(unknown)} unknown; a sentence may use {', '.join(NAMES)}")
    sentence = render(template, {
        "field": field, "before": before, "after": after, "measures": _Any(0.5), "findings": _Any(_EXAMPLE), "because": _EXAMPLE.text,
    })
    if not sentence:
        raise BadSentence("an empty sentence")


class _Any(Mapping[str, Any]):
    """Has every key."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: str) -> Any:
        return self._value

    def __iter__(self) -> Iterator[str]:
        return iter(("analyzer.example",))

    def __len__(self) -> int:
        return 1


_EXAMPLE = Citation(
    finding="analyzer.example", version="v0001", severity="warning", value=0.5, threshold=0.3, text="Half of the groups are dead.",
    source="findings.json",
)
