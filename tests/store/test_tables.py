"""Parquet under explicit schemas: round trips, older schemas, refusals; what cannot be read is left as it was."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evo_hpc.store.atomic import StoreError
from evo_hpc.store.schemas import METRIC, METRICS, ROLLOUT, SCHEMA_VERSION, STEP, TABLES
from evo_hpc.store.tables import BadTable, metric_rows, read_table, read_tables, table_of, write_table

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.parquet"))


def rollout(**changes: Any) -> dict[str, Any]:
    """A whole rollout row."""
    row: dict[str, Any] = {
        "campaign": "c", "version": "v0001", "suite": "train", "policy_step": 0, "trainer_step": 1, "task_id": "t", "group_id": "g",
        "sample": 0, "seed": 2**62, "turns": 1, "prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "logprobs": [-0.5],
        "text": "x", "messages": None, "tool_calls": [{"name": "run", "arguments": "{}", "ok": True, "seconds": 0.1}],
        "stop_reason": "stop", "reward": 1.0, "components": [("correct", 1.0)], "verifier_detail": None, "error_class": None,
        "weight_version": 0, "evaluator_epoch": None, "generate_seconds": 0.1, "verify_seconds": 0.0, "prompt_tokens": 2,
        "response_tokens": 1, "truncated": False, "trigrams_total": 0, "trigrams_unique": 0, "longest_token_run": 1,
        "tool_call_count": 1, "tool_error_count": 0, "domain_features": [], "task_attributes": [("digits", "3")],
        "advantage": None, "kept": None, "staleness": None,
    }
    return {**row, **changes}


def test_round_trip(tmp_path: Path) -> None:
    rows = [rollout(), rollout(sample=1, text="ünï\n\"", reward=None, error_class="verifier", advantage=0.5)]
    write_table(tmp_path / "a.parquet", rows, ROLLOUT)
    read = read_table(tmp_path / "a.parquet", ROLLOUT)
    assert read.schema.equals(ROLLOUT) and read.schema.metadata[b"evo_hpc.schema_version"] == str(SCHEMA_VERSION).encode()
    assert [r["text"] for r in read.to_pylist()] == [r["text"] for r in rows]
    assert read.to_pylist()[0]["components"] == [("correct", 1.0)]


def test_a_column_that_is_null_everywhere_keeps_its_type(tmp_path: Path) -> None:
    write_table(tmp_path / "nulls.parquet", [rollout(messages=None)], ROLLOUT)
    write_table(tmp_path / "text.parquet", [rollout(messages="[]")], ROLLOUT)
    both = read_tables([tmp_path / "nulls.parquet", tmp_path / "text.parquet"], ROLLOUT)
    assert both.column("messages").to_pylist() == [None, "[]"]


@pytest.mark.parametrize("row, message", [
    (rollout(surprise=1), "surprise"),
    ({k: v for k, v in rollout().items() if k != "seed"}, "seed may not be null"),
    (rollout(sample="three"), "do not fit"),
])
def test_rows_that_do_not_fit_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadTable, match=message):
        table_of([row], ROLLOUT)


def test_a_table_of_another_schema_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(BadTable, match="another schema"):
        write_table(tmp_path / "a.parquet", pa.table({"step": [1]}), STEP)
    assert list(tmp_path.iterdir()) == []


def refused(path: Path, message: str, schema: pa.Schema = ROLLOUT) -> None:
    """Reading `path` says `message`, names the file, and changes nothing."""
    before, names = path.read_bytes(), sorted(path.parent.iterdir())
    with pytest.raises(BadTable, match=message) as caught:
        read_table(path, schema)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before and sorted(path.parent.iterdir()) == names


def test_a_file_truncated_anywhere_is_refused_and_left_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_table(path, [rollout()], ROLLOUT)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        refused(path, "torn Parquet file.*COMPLETE.json lists it, remove that published folder")
    for length in range(len(whole) - 12, len(whole)):
        path.write_bytes(whole[:length])
        refused(path, "torn Parquet file")


@given(place=st.floats(0, 1, exclude_max=True), footer=st.booleans(), flip=st.integers(1, 255))
@settings(max_examples=150)
def test_a_flipped_byte_is_refused_or_changes_no_value(
    tmp_path_factory: pytest.TempPathFactory, place: float, footer: bool, flip: int
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "part.parquet"
    write_table(path, [rollout(), rollout(sample=1)], ROLLOUT)
    rows = read_table(path, ROLLOUT).to_pylist()
    damaged = bytearray(path.read_bytes())
    start = len(damaged) - 8 - int.from_bytes(damaged[-8:-4], "little")
    low, high = (start, len(damaged)) if footer else (0, start)
    damaged[low + int(place * (high - low))] ^= flip
    path.write_bytes(damaged)
    try:
        assert read_table(path, ROLLOUT).to_pylist() == rows
    except BadTable as error:
        assert str(path) in str(error)
    assert path.read_bytes() == damaged and list(path.parent.iterdir()) == [path]


def test_without_file_descriptors_a_healthy_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_table(path, [rollout()], ROLLOUT)
    read_table(path, ROLLOUT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(StoreError, match="Too many open files.*ulimit -n") as caught:
            read_table(path, ROLLOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(caught.value, BadTable)
    assert list(tmp_path.iterdir()) == [path] and read_table(path, ROLLOUT).num_rows == 1


@pytest.mark.parametrize("name, message", [
    ("absent", "missing"), ("file/below", "missing"), ("n" * 300, "cannot be read .File name too long"),
    pytest.param("closed", "not readable .Permission denied.*owner and mode",
                 marks=pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")),
])
def test_what_the_filesystem_does_not_give_is_no_torn_file(tmp_path: Path, name: str, message: str) -> None:
    for file, mode in (("file", 0o600), ("closed", 0)):
        write_table(tmp_path / file, [rollout()], ROLLOUT)
        (tmp_path / file).chmod(mode)
    with pytest.raises(StoreError, match=message) as caught:
        read_table(tmp_path / name, ROLLOUT)
    assert not isinstance(caught.value, BadTable)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["closed", "file"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_files_of_earlier_versions_stay_readable(path: Path) -> None:
    table, version = path.stem.split("-")
    schema, written = TABLES[table], pq.read_schema(path)
    assert written.metadata[b"evo_hpc.schema_version"] == version.encode()
    assert set(written.names) <= set(schema.names)
    read = read_table(path, schema)
    assert read.schema.equals(schema)
    rows, golden = read.to_pylist(), json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps([{name: row[name] for name in written.names} for row in rows], default=str)) == golden
    assert all(row[name] is None for row in rows for name in set(schema.names) - set(written.names))


def test_every_table_and_version_has_a_golden_file() -> None:
    assert {path.stem for path in GOLDEN} == {f"{table}-{v}" for table in TABLES for v in range(1, SCHEMA_VERSION + 1)}


def grown(schema: pa.Schema, place: int, *fields: pa.Field) -> pa.Schema:
    """`schema` with columns added before the one at `place`."""
    return pa.schema([*list(schema)[:place], *fields, *list(schema)[place:]], metadata=schema.metadata)


def test_new_nullable_columns_come_back_as_nulls_in_the_order_of_today(tmp_path: Path) -> None:
    write_table(tmp_path / "old.parquet", [rollout(), rollout(sample=1)], ROLLOUT)
    kinds = [pa.field("novelty", pa.float64()), pa.field("notes", pa.map_(pa.string(), pa.list_(pa.int32())))]
    today = grown(ROLLOUT, 4, *kinds)
    write_table(tmp_path / "new.parquet", [rollout(novelty=0.5, notes=[("a", [1])])], today)
    both = read_tables([tmp_path / "old.parquet", tmp_path / "new.parquet"], today)
    assert both.schema.equals(today)
    assert both.column("novelty").to_pylist() == [None, None, 0.5]
    assert both.column("notes").to_pylist() == [None, None, [("a", [1])]]
    some = read_table(tmp_path / "old.parquet", today, ["sample", "novelty", "task_id"])
    assert some.to_pylist() == [{"novelty": None, "task_id": "t", "sample": i} for i in (0, 1)]
    assert some.column_names == ["novelty", "task_id", "sample"]
    assert read_table(tmp_path / "old.parquet", today, ["novelty"]).to_pylist() == [{"novelty": None}] * 2
    assert read_tables([], today, ["sample", "novelty"]).column_names == ["novelty", "sample"]


def test_a_column_order_of_the_past_is_put_right(tmp_path: Path) -> None:
    past = pa.schema(list(reversed(list(METRIC))), metadata=METRIC.metadata)
    where = {"campaign": "c", "version": "v0001", "attempt": 0, "incarnation": 0}
    rows = metric_rows(where, 3, {"loss": 0.5})[0]
    write_table(tmp_path / "a.parquet", rows, past)
    read = read_table(tmp_path / "a.parquet", METRIC)
    assert read.schema.equals(METRIC) and read.to_pylist() == rows


def test_a_missing_column_that_may_not_be_null_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", [rollout()], ROLLOUT)
    today = grown(ROLLOUT, 0, pa.field("origin", pa.string(), nullable=False))
    refused(tmp_path / "a.parquet", r"missing columns \['origin'\], unknown \[\]", today)


def test_nulls_where_none_may_be_are_refused(tmp_path: Path) -> None:
    loose = pa.schema([field.with_nullable(True) for field in ROLLOUT], metadata=ROLLOUT.metadata)
    write_table(tmp_path / "a.parquet", [rollout()], loose)
    assert read_table(tmp_path / "a.parquet", ROLLOUT).schema.equals(ROLLOUT)
    write_table(tmp_path / "a.parquet", [rollout(seed=None)], loose)
    refused(tmp_path / "a.parquet", "nulls in column seed")


def test_unknown_columns_and_other_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "old.parquet"
    pq.write_table(pa.table({"task_id": [1], "extra": ["x"]}), path)
    refused(path, r"missing columns \['campaign', .*unknown \['extra'\], other type \['task_id'\]")
    with pytest.raises(BadTable, match="no such columns in the schema: surprise"):
        read_table(path, ROLLOUT, ["surprise"])


def test_a_newer_version_is_refused_naming_both(tmp_path: Path) -> None:
    newer = ROLLOUT.with_metadata({**ROLLOUT.metadata, b"evo_hpc.schema_version": b"%d" % (SCHEMA_VERSION + 1)})
    write_table(tmp_path / "a.parquet", [rollout()], newer)
    refused(tmp_path / "a.parquet", f"schema version {SCHEMA_VERSION + 1}, newer than version {SCHEMA_VERSION}")


def test_another_table_is_refused_even_when_its_columns_fit(tmp_path: Path) -> None:
    where = {"campaign": "c", "version": "v0001", "attempt": 0, "incarnation": 0}
    wide = metric_rows(where, 3, {"loss": 0.5})[1]
    write_table(tmp_path / "a.parquet", [wide], STEP.with_metadata({**STEP.metadata, b"evo_hpc.table": b"probe"}))
    refused(tmp_path / "a.parquet", "a table of probe, where one of step should be", STEP)


def test_metrics_in_both_forms() -> None:
    where = {"campaign": "c", "version": "v0001", "attempt": 0, "incarnation": 0}
    long, wide = metric_rows(where, 3, {"loss": 0.5, "grad_norm": math.nan})
    assert table_of(long, METRIC).num_rows == 2
    assert [(r["name"], r["value"], r["unit"]) for r in long] == [("loss", 0.5, "1"), ("grad_norm", None, "1")]
    assert table_of([wide], STEP).column("loss").to_pylist() == [0.5]
    assert set(METRICS) <= set(STEP.names)
    with pytest.raises(BadTable, match="surprise"):
        metric_rows(where, 3, {"surprise": 1.0})
