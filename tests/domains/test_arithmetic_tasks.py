"""Tasks and supervised examples of `arithmetic`: disjoint, balanced, determined by their configuration."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from itertools import chain, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from evo_hpc.domains.arithmetic.config import ArithmeticConfig, pair_count
from evo_hpc.domains.arithmetic.solution import carry_places, write_solution
from evo_hpc.domains.arithmetic.supervised import spoil, supervised_examples
from evo_hpc.domains.arithmetic.tasks import carry_count, draw_pairs, make_tasks, unrank_pair
from evo_hpc.domains.base import DomainError, Task, get_domain, task_set_hash

configs = st.builds(
    ArithmeticConfig,
    seed=st.integers(0, 2**64),
    digits=st.lists(st.integers(2, 5), min_size=1, max_size=3, unique=True).map(tuple),
    train=st.integers(1, 300),
    probe=st.integers(0, 40),
    dev=st.integers(0, 40),
    sealed=st.integers(0, 40),
)


def unordered(task: Task) -> frozenset[int]:
    return frozenset(int(number) for number in task.messages[0]["content"].split("+"))


@settings(max_examples=40)
@given(configs)
def test_splits_never_overlap_and_have_the_sizes_asked_for(config: ArithmeticConfig) -> None:
    splits = make_tasks(config)
    assert {split: len(tasks) for split, tasks in splits.items()} == {
        split: config.size(split) for split in ("train", "probe", "dev", "sealed")
    }
    everything = list(chain.from_iterable(splits.values()))
    assert len({unordered(task) for task in everything}) == len(everything)
    assert len({task.task_id for task in everything}) == len(everything)
    for split, tasks in splits.items():
        counts = Counter(task.attributes["digits"] for task in tasks)
        assert {task.split for task in tasks} <= {split}
        assert set(counts) <= set(config.digits)
        assert max(counts.values(), default=0) - min((counts[d] for d in config.digits), default=0) <= 1


@settings(max_examples=25)
@given(configs)
def test_task_content(config: ArithmeticConfig) -> None:
    for task in chain.from_iterable(make_tasks(config).values()):
        a, b = (int(number) for number in task.messages[0]["content"].split("+"))
        assert task.answer == str(a + b)
        assert len(str(a)) == len(str(b)) == task.attributes["digits"]
        assert task.attributes["carries"] == carry_count(b, a)


def test_a_larger_train_split_leaves_held_out_tasks_alone() -> None:
    small, large = make_tasks(ArithmeticConfig(train=10)), make_tasks(ArithmeticConfig(train=5000))
    for split in ("probe", "dev", "sealed"):
        assert small[split] == large[split]
    assert small["train"] == large["train"][:10]


@pytest.mark.parametrize("digits", [1, 2])
def test_every_pair_exists_exactly_once(digits: int) -> None:
    smallest, total = 10 ** (digits - 1), pair_count(digits)
    ranked = [unrank_pair(index, smallest) for index in range(total)]
    assert all(smallest <= low <= high < 10**digits for low, high in ranked)
    assert len(set(ranked)) == total
    drawn = [tuple(sorted(pair)) for pair in draw_pairs(3, digits)]
    assert sorted(drawn) == sorted(ranked) != drawn


def test_unrank_stays_exact_for_large_indices() -> None:
    assert unrank_pair(pair_count(6) - 1, 100_000) == (999_999, 999_999)
    assert unrank_pair(pair_count(6) - 900_000, 100_000) == (100_000, 999_999)


def test_carries() -> None:
    assert [carry_count(a, b) for a, b in [(123, 456), (999, 1), (555, 555), (5, 5), (190, 19)]] == [0, 3, 3, 1, 1]


def test_exactly_all_tasks_can_be_asked_for() -> None:
    splits = make_tasks(ArithmeticConfig(digits=(1,), train=20, probe=5, dev=10, sealed=10))
    assert len(set(map(unordered, chain.from_iterable(splits.values())))) == 45


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"digits": (1,), "train": 21, "probe": 5, "dev": 10, "sealed": 10}, "46 tasks with 1 digits.*only 45"),
        ({"digits": (3, 3)}, "may be listed once"),
        ({"digits": ()}, "at least 1 item"),
        ({"digits": (0,)}, "greater than or equal to 1"),
        ({"digits": (7,)}, "less than or equal to 6"),
        ({"train": 0}, "at least one task"),
        ({"dev": -1}, "greater than or equal to 0"),
        ({"test": 5}, "Extra inputs"),
    ],
)
def test_impossible_configurations_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ArithmeticConfig(**values)


def test_tasks_and_examples_are_the_same_in_every_process() -> None:
    code = (
        "from itertools import chain, islice; from evo_hpc.domains.base import *;"
        "from evo_hpc.domains.arithmetic.supervised import supervised_examples as examples;"
        "d = get_domain('arithmetic'); c = d.config_type(seed=5, train=64);"
        "print(task_set_hash(chain.from_iterable(d.make_tasks(c).values())), d.identity()['verifier_sha256'],"
        "[t for _, t in islice(examples(c, seed=1), 3)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("0", "4242")
    }
    assert len(outputs) == 1
    domain = get_domain("arithmetic")
    here = task_set_hash(chain.from_iterable(domain.make_tasks(ArithmeticConfig(seed=5, train=64)).values()))
    assert outputs.pop().decode().startswith(f"{here} {domain.identity()['verifier_sha256']} ")


def test_the_seed_matters() -> None:
    first, second = (make_tasks(ArithmeticConfig(seed=seed)) for seed in (0, 1))
    assert all(first[split] != second[split] for split in first)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_supervised_examples_avoid_held_out_pairs(task_seed: int, stream_seed: int) -> None:
    # 45 pairs with one digit, 40 of them held out: a leak would show at once.
    config = ArithmeticConfig(seed=task_seed, digits=(1,), train=5, probe=10, dev=10, sealed=20)
    splits = make_tasks(config)
    held_out = {unordered(task) for split in ("probe", "dev", "sealed") for task in splits[split]}
    shown = [
        frozenset(int(n) for n in messages[0]["content"].split("+"))
        for messages, _ in islice(supervised_examples(config, seed=stream_seed, digits=(1,)), 100)
    ]
    assert not held_out & set(shown)
    assert len(set(shown)) == 5


def judge(messages: tuple[dict[str, str], ...], target: str) -> dict[str, float]:
    a, b = (int(n) for n in messages[0]["content"].split("+"))
    task = Task("t", "train", messages, str(a + b), {})
    return get_domain("arithmetic").verify(task, target, truncated=False).components


def test_supervised_examples_cover_the_digit_counts_and_are_correct() -> None:
    counts: Counter[int] = Counter()
    for messages, target in islice(supervised_examples(ArithmeticConfig(), seed=0, mistakes=0.0), 400):
        counts[messages[0]["content"].index("+")] += 1
        assert judge(messages, target) == {"correct": 1.0, "format": 1.0}
    assert set(counts) == {1, 2, 3, 4} and min(counts.values()) > 60


def test_the_stated_share_of_supervised_examples_holds_mistakes_of_every_kind() -> None:
    stream = supervised_examples(ArithmeticConfig(), seed=0, mistakes=0.5)
    verdicts = Counter(tuple(judge(*example).values()) for example in islice(stream, 1000))
    assert 450 < 1000 - verdicts[1.0, 1.0] < 550
    # forgotten carries; lost separators; run-ons
    assert verdicts[0.0, 1.0] > verdicts[1.0, 0.0] > 50 and verdicts[0.0, 0.0] > 50


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 1000))
def test_a_spoilt_solution_never_gets_full_marks(a: int, b: int, seed: int) -> None:
    text = spoil(random.Random(seed), a, b)
    assert judge(({"role": "user", "content": f"{a}+{b}"},), text) != {"correct": 1.0, "format": 1.0}


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_carry_places_are_as_many_as_the_carries(a: int, b: int) -> None:
    assert len(carry_places(a, b)) == carry_count(a, b)
    for place in carry_places(a, b):
        assert write_solution(a, b, forget=place) != write_solution(a, b)


def test_supervised_examples_refuse_when_nothing_is_left() -> None:
    config = ArithmeticConfig(digits=(3, 1), train=1, probe=30, dev=30, sealed=30)
    with pytest.raises(DomainError, match="every sum with 1 digits is held out"):
        supervised_examples(config, seed=0)


def test_supervised_examples_refuse_an_impossible_share() -> None:
    with pytest.raises(DomainError, match="between 0 and 1"):
        supervised_examples(ArithmeticConfig(), seed=0, mistakes=1.5)
