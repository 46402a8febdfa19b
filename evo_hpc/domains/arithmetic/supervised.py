"""The supervised warm-up of `arithmetic`: an endless stream of worked sums, clear of every held-out task.

A stated share of the targets holds a mistake, as real corpora do: the base policy then knows how to add and also how
to fail (forgotten carries, broken format, run-ons), which is what reinforcement learning has to change.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from evo_hpc.domains.arithmetic.config import DRAW_ORDER, ArithmeticConfig, pair_count
from evo_hpc.domains.arithmetic.scratchpad import ANSWER_MARK, STEP_END
from evo_hpc.domains.arithmetic.solution import carry_places, write_solution
from evo_hpc.domains.arithmetic.tasks import derive_seed, make_task, make_tasks
from evo_hpc.domains.base import DomainError

WARMUP_DIGITS = (1, 2, 3, 4)
MISTAKES = 0.0
# Relative frequencies of the mistakes. A forgotten carry costs the answer; the others cost the format as well.
MISTAKE_WEIGHTS = {"carry": 0.6, "separator": 0.2, "run_on": 0.2}
HELD_OUT = tuple(split for split in DRAW_ORDER if split != "train")

Example = tuple[tuple[dict[str, str], ...], str]


def supervised_examples(
    config: ArithmeticConfig, *, seed: int, digits: Sequence[int] = WARMUP_DIGITS, mistakes: float = MISTAKES
) -> Iterator[Example]:
    """Endless (prompt messages, target text) pairs; the end token is not part of the target.

    Digit counts are equally likely; `mistakes` is the share of targets with a mistake; the stream is determined by its
    arguments. No pair of a probe, dev or sealed task ever appears, in either order. Raises `DomainError` at the call,
    not later, if the held-out splits leave no sum of some digit count.
    """
    if not 0 <= mistakes <= 1:
        raise DomainError(f"mistakes is a share between 0 and 1, not {mistakes}")
    splits = make_tasks(config)
    tasks = [task for split in HELD_OUT for task in splits[split]]
    taken = Counter(task.attributes["digits"] for task in tasks)
    for count in digits:
        if taken[count] >= pair_count(count):
            raise DomainError(f"every sum with {count} digits is held out: no supervised example of that size is left")
    rng = random.Random(derive_seed("arithmetic-supervised", config.seed, seed))
    return _stream(rng, tuple(digits), mistakes, frozenset(task.task_id for task in tasks))


def spoil(rng: random.Random, a: int, b: int) -> str:
    """The response to `a+b` with one mistake."""
    places = carry_places(a, b)
    kinds = [kind for kind in MISTAKE_WEIGHTS if kind != "carry" or places]
    kind = rng.choices(kinds, [MISTAKE_WEIGHTS[name] for name in kinds])[0]
    if kind == "carry":
        return write_solution(a, b, forget=rng.choice(places))
    solution = write_solution(a, b)
    if kind == "separator":
        # The last separator is lost: the answer's mark runs into the step.
        return solution.replace(f"{STEP_END}{ANSWER_MARK}", ANSWER_MARK)
    # It does not stop: the answer comes again and again.
    return solution + f"{STEP_END}{ANSWER_MARK}{a + b}" * rng.randint(1, 3)


def _stream(
    rng: random.Random, digits: tuple[int, ...], mistakes: float, held_out: frozenset[str]
) -> Iterator[Example]:
    while True:
        count = rng.choice(digits)
        a, b = (rng.randrange(10 ** (count - 1), 10**count) for _ in range(2))
        task = make_task(a, b, "train")
        if task.task_id not in held_out:
            yield task.messages, spoil(rng, a, b) if rng.random() < mistakes else write_solution(a, b)
