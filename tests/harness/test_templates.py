"""Values reach SQL as bound parameters only, names as quoted identifiers only, and errors name the template's line."""

from __future__ import annotations

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.harness.templates import TemplateProblem, render_sql, render_text, template_line

HOSTILE = "'; DROP TABLE steps; --\n\"$b0 {{ p }}"


def test_values_are_bound_and_names_quoted() -> None:
    p = {"x": [1, 2], "n": 'a"b', "on": True}
    sql, bound = render_sql("SELECT {{ p.x | bind }}, {{ p.n | ident }} {% if p.on %}-- on{% endif %}", "t", {"p": p})
    assert sql == 'SELECT $b0, "a""b" -- on' and bound == {"b0": [1, 2]}


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1) | st.just(HOSTILE))
def test_any_text_comes_back_as_it_went_in(text: str) -> None:
    sql, bound = render_sql("SELECT {{ p.x | bind }} AS {{ p.x | ident }}", "t", {"p": {"x": text}})
    relation = duckdb.sql(sql, params=bound)
    assert relation.columns == [text] and relation.fetchall() == [(text,)]


@pytest.mark.parametrize("source", [
    "{{ p.x }}", "{{ 1 }}", "{{ 'a' }}", "{{ (p.x | bind) ~ '' }}", "{{ [p.x | bind] | join(',') }}", "{{ p.x | bind | string }}",
    "{{ (p.x | bind)._text }}", "{% macro m() %}{{ p.x }}{% endmacro %}{{ m() }}", "{{ p.x | bind | bind }}", "{{ p.x | safe }}",
    "{{ p | ident }}", "{{ p.nosuch | bind }}", "{{ p.items() | bind }}",
])
def test_nothing_goes_into_sql_as_it_stands(source: str) -> None:
    with pytest.raises(TemplateProblem):
        render_sql("SELECT 1\n" + source, "t", {"p": {"x": "1; SELECT 2"}})


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}", "{{ p.__class__ }}", "{% include '/etc/passwd' %}", "{{ p.update(x=1) }}", "{{ p.pop('x') }}",
])
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(TemplateProblem):
        render_text(source, "t", {"p": {"x": 1}})


def test_an_error_has_the_line() -> None:
    with pytest.raises(TemplateProblem, match="no attribute 'nosuch'") as caught:
        render_text("a\n{% for i in [1] %}\n{{ measures.nosuch }}{% endfor %}", "t", {"measures": {}})
    assert caught.value.line == 3
    with pytest.raises(TemplateProblem, match=r"\| bind") as caught:
        render_sql("a\nb\n{{ 1 }}", "t", {})
    assert caught.value.line == 3


def test_numbers_for_people() -> None:
    text = "{{ a | number }} {{ b | number }} {{ c | number }} {{ d | percent(1) }} {{ c | percent }} {{ e | number }}"
    assert render_text(text, "t", {"a": 0.01234, "b": 48.0, "c": None, "d": 0.755, "e": 12345}) == "0.0123 48 – 75.5 % – 12,345"


def test_a_rendered_line_is_traced_to_the_template() -> None:
    source = "SELECT\n{% for c in p.c %}\n{{ c | ident }},\n{% endfor %}\nnosuch + {{ p.x | bind }}\nFROM steps"
    rendered, _ = render_sql(source, "t", {"p": {"c": ["a", "b"], "x": 1}})
    line = rendered.splitlines().index("nosuch + $b0") + 1
    assert template_line(source, rendered, line) == 5 and line != 5
    assert template_line("a\na\na", "a\na", 2) == 2
    assert template_line("{{ x }}\n{{ y }}", "p\n\nq", 3) is None
