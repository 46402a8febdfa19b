"""The verifier and the behaviour features of `arithmetic`: pure functions of a task and a text."""

from __future__ import annotations

from evo_hpc.domains.arithmetic.scratchpad import (
    Reading,
    carry_errors,
    composed_answer,
    excerpt,
    is_number,
    read_response,
    step_errors,
)
from evo_hpc.domains.base import Task, Verdict

COMPONENTS = ("correct", "format")
FEATURES = (
    "steps",
    "correct_step_share",
    "first_wrong_step",
    "carry_errors",
    "answers",
    "answer_follows_steps",
)


def verify(task: Task, text: str, *, truncated: bool) -> Verdict:
    """Scores a response: `correct` and `format`, each 0 or 1.

    `correct`: the model stopped, and gave one answer, and all that follows its mark is the sum, character by character
    (no leading zero, sign, space or second answer, even a repeated right one). The scratch-pad does not count.
    `format`: the model stopped, and the whole text is in the grammar, true or not; the number of steps is free.
    """
    if not is_number(task.answer):
        return Verdict({}, "", error=f"task {task.task_id!r}: its answer {excerpt(task.answer)} is not a number")
    reading = read_response(text)
    correct = not truncated and reading.answers == (task.answer,)
    well_formed = not truncated and reading.problem is None
    detail = _detail(reading, task.answer, truncated=truncated, correct=correct)
    return Verdict({"correct": float(correct), "format": float(well_formed)}, detail)


def features(text: str) -> dict[str, int | float]:
    """Behaviour of a response, read from the text alone.

    `correct_step_share` is 0 without steps; `first_wrong_step` counts from 0 and is -1 if none is wrong;
    `answer_follows_steps` is 1 if there is one answer and it is the number that the steps spell.
    """
    reading = read_response(text)
    wrong = step_errors(reading.steps)
    return {
        "steps": len(wrong),
        "correct_step_share": wrong.count(False) / len(wrong) if wrong else 0.0,
        "first_wrong_step": wrong.index(True) if True in wrong else -1,
        "carry_errors": carry_errors(reading.steps),
        "answers": len(reading.answers),
        "answer_follows_steps": int(bool(wrong) and reading.answers == (composed_answer(reading.steps),)),
    }


def _detail(reading: Reading, answer: str, *, truncated: bool, correct: bool) -> str:
    reasons = ["truncated"] if truncated else []
    if reading.problem:
        reasons.append(reading.problem)
    if not correct and len(reading.answers) == 1 and reading.answers[0] != answer:
        reasons.append(f"answered {excerpt(reading.answers[0])}, expected {answer}")
    wrong = step_errors(reading.steps)
    if not correct and True in wrong:
        reasons.append(f"step {wrong.index(True)} is wrong")
    return "; ".join(reasons)
