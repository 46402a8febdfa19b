"""Laws of task files: round trip, order-independent hash, and one clear error for each hostile line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.domains.base import (
    Task,
    TaskError,
    read_tasks,
    task_set_hash,
    task_to_json,
    tasks_from_jsonl,
    tasks_to_jsonl,
)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
scalars = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), texts)
messages = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "user"]), texts)
tasks = st.builds(
    Task,
    task_id=texts.filter(bool),
    split=st.sampled_from(["train", "probe", "dev", "sealed"]),
    messages=st.lists(messages, min_size=1, max_size=3).map(tuple),
    answer=texts,
    attributes=st.dictionaries(texts, scalars, max_size=4),
)
task_sets = st.lists(tasks, max_size=6, unique_by=lambda task: task.task_id)

GOOD = {
    "task_id": "t1",
    "split": "dev",
    "messages": [{"role": "user", "content": "1+2"}],
    "answer": "3",
    "attributes": {"digits": 1},
}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


@given(task_sets)
def test_jsonl_round_trip(task_set: list[Task]) -> None:
    assert tasks_from_jsonl(tasks_to_jsonl(task_set).encode(), "f") == task_set


@given(task_sets, st.randoms(use_true_random=False))
def test_hash_ignores_order_but_no_content(task_set: list[Task], rng: random.Random) -> None:
    shuffled = list(task_set)
    rng.shuffle(shuffled)
    assert task_set_hash(shuffled) == task_set_hash(task_set)
    if task_set:
        assert task_set_hash(task_set[1:]) != task_set_hash(task_set)
        first = task_set[0]
        changed = Task(first.task_id, first.split, first.messages, first.answer + "0", first.attributes)
        assert task_set_hash([changed, *task_set[1:]]) != task_set_hash(task_set)


def test_hash_refuses_a_repeated_task() -> None:
    task = tasks_from_jsonl(line(), "f")[0]
    with pytest.raises(TaskError, match="'t1' occurs twice"):
        task_set_hash([task, task])


def test_hash_is_frozen() -> None:
    task = tasks_from_jsonl(line(), "f")[0]
    assert task_to_json(task) == (
        '{"answer":"3","attributes":{"digits":1},"messages":[{"content":"1+2","role":"user"}],"split":"dev",'
        '"task_id":"t1"}'
    )
    assert task_set_hash([task]) == "2f2b09e12d51338fc439c881aca1062b1a424642fd736f543dfd4a950d9b9b06"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"", "blank line"),
        (b"   ", "blank line"),
        (b"{", "not JSON"),
        (line()[:-5], "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "not readable as JSON"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not readable as JSON"),
        (line()[:-1] + b', "answer": "4"}', "a key occurs twice"),
        (line(extra=1), r"unknown \['extra'\]"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "answer"}).encode(), r"missing \['answer'\]"),
        (line(task_id=""), "task_id is empty"),
        (line(task_id=7), "task_id must be a string"),
        (line(task_id="\ud800"), "lone surrogate"),
        (line(answer=3), "answer must be a string"),
        (line(split="test"), "split 'test' is not one of"),
        (line(split=[]), "is not one of"),
        (line(messages=[]), "non-empty"),
        (line(messages="1+2"), "messages must be a list"),
        (line(messages=[{"role": "user"}]), "exactly the keys role and content"),
        (line(messages=[{"role": "root", "content": ""}]), "role 'root'"),
        (line(messages=[{"role": ["user"], "content": ""}]), "is not one of"),
        (line(messages=[{"role": "user", "content": None}]), "content must be a string"),
        (line(attributes=[]), "attributes must be a mapping"),
        (line(attributes={"x": True}), "not bool"),
        (line(attributes={"x": None}), "not NoneType"),
        (line(attributes={"x": 2**63}), "64 bits"),
        (line(attributes={"x": float("nan")}), "NaN is not JSON"),
        (line(attributes={"x": 1.0}).replace(b"1.0", b"1e999"), "only finite"),
        (line(), "'t1' was already used on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes, message: str) -> None:
    path = tmp_path / "a b;'.jsonl"
    path.write_bytes(line() + b"\n" + bad + b"\n")
    with pytest.raises(TaskError, match=message) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_line_separators_inside_strings_do_not_split_lines() -> None:
    task = Task("t", "dev", ({"role": "user", "content": "a\u2028b\x0bc\r\nd"},), "\x85", {})
    raw = json.dumps(json.loads(task_to_json(task)), ensure_ascii=False).encode()
    assert tasks_from_jsonl(raw + b"\n", "f") == tasks_from_jsonl(raw, "f") == [task]
