"""Parquet under explicit schemas: round trips, refusals, torn files set aside."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.store.schemas import METRIC, METRICS, ROLLOUT, STEP
from evo_hpc.store.tables import BadTable, metric_rows, read_table, read_tables, table_of, write_table


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
    assert read.schema.equals(ROLLOUT) and read.schema.metadata[b"evo_hpc.schema_version"] == b"1"
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


@given(cut=st.integers(min_value=0, max_value=400))
def test_a_truncated_file_is_set_aside_never_read(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    path = folder / "part.parquet"
    write_table(path, [rollout()], ROLLOUT)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 1 - cut])
    with pytest.raises(BadTable, match="torn Parquet file.*part.parquet.quarantined-0"):
        read_table(path, ROLLOUT)
    assert not path.exists()
    assert (folder / "part.parquet.quarantined-0").read_bytes() == whole[: len(whole) - 1 - cut]


def test_another_schema_is_named_and_left_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "old.parquet"
    pq.write_table(pa.table({"task_id": [1], "extra": ["x"]}), path)
    with pytest.raises(BadTable, match=r"unknown \['extra'\], other type \['task_id'\]"):
        read_table(path, ROLLOUT)
    assert path.exists()


def test_metrics_in_both_forms() -> None:
    where = {"campaign": "c", "version": "v0001", "attempt": 0, "incarnation": 0}
    long, wide = metric_rows(where, 3, {"loss": 0.5, "grad_norm": math.nan})
    assert table_of(long, METRIC).num_rows == 2
    assert [(r["name"], r["value"], r["unit"]) for r in long] == [("loss", 0.5, "1"), ("grad_norm", None, "1")]
    assert table_of([wide], STEP).column("loss").to_pylist() == [0.5]
    assert set(METRICS) <= set(STEP.names)
    with pytest.raises(BadTable, match="surprise"):
        metric_rows(where, 3, {"surprise": 1.0})
