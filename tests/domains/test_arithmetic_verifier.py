"""Laws of the verifier: total, strict, and blind to everything but the text."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evo_hpc.domains.arithmetic.scratchpad import composed_answer, read_response, step_errors
from evo_hpc.domains.arithmetic.solution import write_solution
from evo_hpc.domains.arithmetic.tasks import make_task
from evo_hpc.domains.base import Task, get_domain

DOMAIN = get_domain("arithmetic")
TASK = make_task(134, 528, "dev")
SOLUTION = "4+8=12;3+2+1=6;1+5=6;#662"
numbers = st.integers(0, 10**8)
near_text = st.text("0123456789+=;#1 ", max_size=60)
any_text = st.one_of(st.text(), near_text, st.text(st.characters(categories=["Cs", "Nd"])))


def score(text: str, *, truncated: bool = False, task: Task = TASK) -> tuple[float, float]:
    verdict = DOMAIN.verify(task, text, truncated=truncated)
    assert verdict.error is None
    return verdict.components["correct"], verdict.components["format"]


def test_the_written_solution() -> None:
    assert write_solution(134, 528) == SOLUTION
    assert DOMAIN.verify(TASK, SOLUTION, truncated=False).detail == ""


@given(any_text, st.booleans())
@example("#" + "9" * 100_000, False)
@example("+".join("9" * 5000 for _ in range(3)) + "=1;#" + "9" * 5000, False)
@example(";" * 10_000 + "#", True)
@example("٤+٨=12;#662", False)
def test_any_text_gets_a_verdict_and_features(text: str, truncated: bool) -> None:
    verdict = DOMAIN.verify(TASK, text, truncated=truncated)
    assert verdict.error is None
    assert tuple(verdict.components) == DOMAIN.component_names
    assert set(verdict.components.values()) <= {0.0, 1.0}
    assert verdict.detail.isascii() and len(verdict.detail) < 1000
    assert bool(verdict.detail) == (verdict.components != {"correct": 1.0, "format": 1.0})
    found = DOMAIN.features(text)
    assert tuple(found) == DOMAIN.feature_names
    assert 0 <= found["correct_step_share"] <= 1
    assert -1 <= found["first_wrong_step"] < max(1, found["steps"])
    assert (found["first_wrong_step"] == -1) == (found["correct_step_share"] == 1 or found["steps"] == 0)


@given(numbers, numbers)
def test_a_correct_solution_always_scores_one(a: int, b: int) -> None:
    task, text = make_task(a, b, "dev"), write_solution(a, b)
    assert score(text, task=task) == (1.0, 1.0)
    assert score(text, truncated=True, task=task) == (0.0, 0.0)
    found = DOMAIN.features(text)
    assert found["steps"] == max(len(str(a)), len(str(b)))
    assert (found["correct_step_share"], found["first_wrong_step"], found["carry_errors"]) == (1.0, -1, 0)
    assert (found["answers"], found["answer_follows_steps"]) == (1, 1)


@given(numbers, numbers, st.one_of(numbers.map(str), st.text("0123456789 +-.#;", max_size=12)))
def test_a_changed_answer_never_scores(a: int, b: int, answer: str) -> None:
    task, solution = make_task(a, b, "dev"), write_solution(a, b)
    if answer != task.answer:
        text = solution[: solution.index("#") + 1] + answer
        assert score(text, task=task)[0] == 0.0


@given(st.text(min_size=1, max_size=5))
def test_anything_after_the_answer_spoils_it(tail: str) -> None:
    assert score(SOLUTION + tail) == (0.0, 0.0) or (tail.isdigit() and score(SOLUTION + tail) == (0.0, 1.0))


@pytest.mark.parametrize(
    ("text", "expected", "detail"),
    [
        ("", (0, 0), "no answer"),
        ("#662", (1, 0), "no scratch-pad step"),
        ("4+8=12;3+2=5;1+5=6;#662", (1, 1), ""),
        ("4+8=12;3+2=5;1+5=6;#652", (0, 1), "answered '652', expected 662; step 1 is wrong"),
        ("4+8=12;#0662", (0, 0), "the answer is not a number: '0662'"),
        ("4+8=12;#662#662", (0, 0), "2 answers"),
        ("4+8=12;#662 ", (0, 0), "not a number"),
        ("4+8=12;#662\n", (0, 0), "not a number"),
        ("4+8=12;#+662", (0, 0), "not a number"),
        ("4+8=12;#６６２", (0, 0), "not a number"),
        ("4+8=12#662", (1, 0), "between the last step and the answer: '4+8=12'"),
        ("4+8=12;;#662", (1, 0), "step 1 is not in the grammar: ''"),
        ("4+8+2=14;#662", (1, 0), "step 0 is not in the grammar"),
        ("4+8=012;#662", (1, 0), "step 0 is not in the grammar"),
        ("4+8=20;#662", (1, 0), "step 0 is not in the grammar"),
        ("14+8=12;#662", (1, 0), "step 0 is not in the grammar"),
        ("4+8=12;#", (0, 0), "not a number: ''"),
        ("4+8=12;#662<user>", (0, 0), "not a number"),
        ("\ud800;#662", (1, 0), "not in the grammar: '\\ud800'"),
    ],
)
def test_rules(text: str, expected: tuple[int, int], detail: str) -> None:
    assert score(text) == expected
    assert detail in DOMAIN.verify(TASK, text, truncated=False).detail


def test_truncation_is_said() -> None:
    assert DOMAIN.verify(TASK, "4+8=12;3+", truncated=True).detail == "truncated; no answer"
    assert DOMAIN.verify(TASK, SOLUTION, truncated=True).detail == "truncated"


def test_a_broken_task_is_the_verifiers_error_not_the_models() -> None:
    for answer in ("", "0662", "six", "-1"):
        verdict = DOMAIN.verify(Task("t", "dev", TASK.messages, answer, {}), SOLUTION, truncated=False)
        assert verdict.components == {} and "is not a number" in str(verdict.error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, 0.0, -1, 0, 0, 0)),
        ("4+8=12;3+2=5;1+5=6;#652", (3, 2 / 3, 1, 1, 1, 1)),
        ("4+8=13;3+2+1=6;1+5=6;#662", (3, 2 / 3, 0, 0, 1, 0)),
        ("4+4=8;3+2+1=6;#68", (2, 1 / 2, 1, 1, 1, 1)),
        ("4+8=12;x;3+2+1=6", (1, 1.0, -1, 0, 0, 0)),
        ("9+9=18;#18#18", (1, 1.0, -1, 0, 2, 0)),
    ],
)
def test_features(text: str, expected: tuple[float, ...]) -> None:
    assert tuple(DOMAIN.features(text).values()) == expected


@given(numbers, numbers)
def test_steps_spell_the_answer(a: int, b: int) -> None:
    steps = read_response(write_solution(a, b)).steps
    assert composed_answer(steps) == str(a + b)
    assert not any(step_errors(steps))


def test_huge_texts_take_linear_time() -> None:
    start = time.perf_counter()
    for text in ("1+1=2;" * 40_000 + "#2", "9" * 300_000, "#" * 300_000, "1+" * 100_000 + "#" + "1" * 100_000):
        score(text)
        DOMAIN.features(text)
    assert time.perf_counter() - start < 10


def test_identity_names_the_verifier_source() -> None:
    identity = DOMAIN.identity()
    assert identity["domain"] == "arithmetic" and identity["version"] == "1"
    assert len(identity["verifier_sha256"]) == 64
