"""The scratch-pad grammar, and how any text is read by it.

    response = step ";" { step ";" } "#" answer        step = digit "+" digit [ "+1" ] "=" value

One step a decimal place, from the units; `+1` is the carry of the step before; value is 0..19 without leading zeros.
134+528 is written `4+8=12;3+2+1=6;1+5=6;#662`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP_END = ";"
ANSWER_MARK = "#"

# [0-9] and not \d, which would accept every Unicode digit.
_STEP = re.compile(r"([0-9])\+([0-9])(\+1)?=(1?[0-9])")
_NUMBER = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class Step:
    """One decimal place: `x + y + carry = value`, as written (possibly wrong)."""

    x: int
    y: int
    carry: int
    value: int


@dataclass(frozen=True)
class Reading:
    """A response, read: the well-formed steps, what follows each answer mark, and the first break of the grammar."""

    steps: tuple[Step, ...]
    answers: tuple[str, ...]
    problem: str | None


def read_response(text: str) -> Reading:
    """Reads any text in time linear in its length; never raises and never converts an unbounded number."""
    scratch, *answers = text.split(ANSWER_MARK)
    pieces = scratch.split(STEP_END)
    matches = [_STEP.fullmatch(piece) for piece in pieces[:-1]]
    steps = tuple(Step(int(m[1]), int(m[2]), 1 if m[3] else 0, int(m[4])) for m in matches if m)
    return Reading(steps, tuple(answers), _problem(pieces, matches, answers))


def is_number(text: str) -> bool:
    """Whether `text` is a non-negative integer in ASCII digits, without leading zeros, sign or spaces."""
    return _NUMBER.fullmatch(text) is not None


def step_errors(steps: tuple[Step, ...]) -> list[bool]:
    """For each step, whether it is wrong: its sum, or a carry that is not the one of the step before."""
    carries = [0, *(step.value // 10 for step in steps)]
    return [s.carry != c or s.x + s.y + s.carry != s.value for s, c in zip(steps, carries)]


def carry_errors(steps: tuple[Step, ...]) -> int:
    """How many steps dropped a carry or invented one."""
    carries = [0, *(step.value // 10 for step in steps)]
    return sum(step.carry != carry for step, carry in zip(steps, carries))


def composed_answer(steps: tuple[Step, ...]) -> str:
    """The number that the steps' values spell, most significant digit first; empty for no steps."""
    if not steps:
        return ""
    digits = "".join(str(step.value % 10) for step in steps)[::-1]
    leading = "1" if steps[-1].value >= 10 else ""
    return (leading + digits).lstrip("0") or "0"


def _problem(pieces: list[str], matches: list[re.Match[str] | None], answers: list[str]) -> str | None:
    for index, match in enumerate(matches):
        if match is None:
            return f"step {index} is not in the grammar: {excerpt(pieces[index])}"
    if not answers:
        return "no answer"
    if len(answers) > 1:
        return f"{len(answers)} answers"
    if pieces[-1]:
        return f"text between the last step and the answer: {excerpt(pieces[-1])}"
    if not matches:
        return "no scratch-pad step"
    if not is_number(answers[0]):
        return f"the answer is not a number: {excerpt(answers[0])}"
    return None


def excerpt(text: str, limit: int = 40) -> str:
    """`text` quoted for a message: ASCII (model output may hold anything), cut to `limit` characters."""
    return ascii(text[:limit]) + (f"... ({len(text)} characters)" if len(text) > limit else "")
