"""Writing sums in the scratch-pad grammar, right or with a slip. Scores nothing, so it is no part of the verifier."""

from __future__ import annotations

from itertools import zip_longest

from evo_hpc.domains.arithmetic.scratchpad import ANSWER_MARK, STEP_END


def write_solution(a: int, b: int, *, forget: int | None = None) -> str:
    """The response to `a+b`; with `forget`, the carry due in that step (0 = units) is forgotten.

    The rest follows from the slip, the answer too. `forget` equal to the number of steps forgets the leading 1 that
    the last carry gives the answer.
    """
    steps: list[str] = []
    digits, carry = "", 0
    for place, (x, y) in enumerate(zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0")):
        carry = 0 if place == forget else carry
        value = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={value}{STEP_END}")
        digits, carry = f"{value % 10}{digits}", value // 10
    leading = "1" if carry and forget != len(steps) else ""
    return f"{''.join(steps)}{ANSWER_MARK}{(leading + digits).lstrip('0') or '0'}"


def carry_places(a: int, b: int) -> list[int]:
    """Steps of `a+b` in which a carry is due; the number of steps stands for the answer's leading 1."""
    places, carry = [], 0
    pairs = list(zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0"))
    for place, (x, y) in enumerate(pairs, start=1):
        carry = (int(x) + int(y) + carry) // 10
        if carry:
            places.append(place)
    return places
