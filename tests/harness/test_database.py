"""What the SQL of an analyzer can reach: its inputs, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evo_hpc.harness.database import TOKENS, BadSql, Database, open_inputs
from evo_hpc.harness.inputs import BadInputs
from evo_hpc.harness.manifest import load_analyzer
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import BadTable, write_table
from tests.harness.data import group, rollout, run_here, step_row, write_analyzer, write_inputs

STEPS = [step_row(1), step_row(2, score_mean=0.75)]


@pytest.fixture
def database(tmp_path: Path) -> Database:
    inputs = write_inputs(tmp_path, steps=STEPS)
    effective = [("recipe", "optimizer.lr", "5e-05"), ("trainer", "threads", "2")]
    return Database(open_inputs([str(path) for path in inputs.steps], [], [], effective, None))


def test_all_tables_are_there_and_typed(database: Database) -> None:
    row = database.select(
        "SELECT (SELECT max(score_mean) FROM steps) AS a, (SELECT count(*) FROM train WHERE components['correct'] > 0) AS b, "
        "(SELECT count(*) FROM probe WHERE task_attributes['digits'] = '3') AS c, (SELECT string_agg(role, ',' ORDER BY role) FROM effective) AS d, "
        "(SELECT max(value::DOUBLE) FROM recipe) AS e", {},
    ).to_pylist()
    assert row == [{"a": 0.75, "b": 0, "c": 0, "d": "recipe,trainer", "e": 5e-05}]


def test_tokens_are_not_among_the_columns(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, train=group("t0", [1, 0], 1))
    tables = open_inputs([], [str(path) for path in inputs.train], [], [], None)
    columns = Database(tables).select("SELECT * FROM train", {}).column_names
    assert columns == [name for name in ROLLOUT.names if name not in TOKENS] and "response_tokens" in columns


@pytest.mark.parametrize("sql", [
    "SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM read_text('/etc/passwd')", "SELECT * FROM '/etc/passwd'", "SELECT * FROM glob('/*')",
    "SELECT * FROM read_parquet('{steps}')", "SELECT * FROM parquet_metadata('{steps}')", "COPY (SELECT 1) TO '{out}'", "EXPORT DATABASE '{out}'",
    "ATTACH '{out}'", "SET threads = 4", "SET enable_external_access = true", "RESET memory_limit",
    "INSTALL httpfs", "LOAD httpfs", "PRAGMA version",
    "CREATE TABLE x AS SELECT 1", "DROP VIEW steps", "SELECT 1; SELECT 2", "CALL pragma_version()", "", "-- nothing",
    "SELECT * FROM enable_logging(storage='file', storage_path='{out}')", "SELECT getenv('HOME')",
    "SELECT * FROM query('COPY (SELECT 1) TO ''{out}''')",
])
def test_nothing_but_a_select_from_the_inputs(database: Database, tmp_path: Path, sql: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadSql):
        database.select(sql.format(steps=tmp_path / "steps.parquet", out=out), {})
    assert not out.exists()


def test_python_variables_are_no_tables(database: Database) -> None:
    rows = pq.ParquetFile  # noqa: F841
    with pytest.raises(BadSql):
        database.select("SELECT * FROM rows", {})


def test_a_table_that_is_not_declared_is_not_there(tmp_path: Path) -> None:
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine", query="SELECT 1 AS score_mean\nFROM probe"))
    outcome = run_here(analyzer, write_inputs(tmp_path, steps=STEPS), tmp_path / "out")
    assert outcome.state == "bad_analyzer" and "query.sql.j2:2: " in outcome.message and "probe" in outcome.message


def test_rows_of_later_steps_and_probe_are_left_out(tmp_path: Path) -> None:
    inputs = write_inputs(
        tmp_path, steps=STEPS, train=[*group("t0", [1, 0], 1), *group("t0", [1, 0, 1], 2)], probe=[rollout("t0", 0, 1, suite="probe")],
    )
    count = "SELECT (SELECT count(*) FROM steps) AS s, (SELECT count(*) FROM train) AS t, (SELECT count(*) FROM probe) AS p"
    files = [[str(path) for path in paths] for paths in (inputs.steps, inputs.train, inputs.probe)]
    assert Database(open_inputs(*files, [], 1)).select(count, {}).to_pylist() == [{"s": 1, "t": 2, "p": 0}]
    assert Database(open_inputs(*files, [], None)).select(count, {}).to_pylist() == [{"s": 2, "t": 5, "p": 1}]


@pytest.mark.parametrize(("place", "suite"), [("probe", "dev"), ("train", "dev"), ("probe", "sealed"), ("probe", "train"), ("train", "probe")])
def test_rollouts_of_another_suite_are_refused(tmp_path: Path, place: str, suite: str) -> None:
    rows = [rollout("t0", 0, 1, suite=place, step=1), rollout("t0", 1, 1, suite=suite, step=1)]
    inputs = write_inputs(tmp_path, **{place: rows})
    files = {"train": [], "probe": [], place: [str(path) for path in getattr(inputs, place)]}
    with pytest.raises(BadInputs, match=f"rollouts of '{suite}'.*never read dev"):
        open_inputs([], files["train"], files["probe"], [], None)
    with pytest.raises(BadInputs):  # not even where the watch would not look at it
        open_inputs([], files["train"], files["probe"], [], 5)


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", group("t0", [1, 0], 1), ROLLOUT, durable=False)
    with pytest.raises(BadTable):
        open_inputs([str(tmp_path / "a.parquet")], [], [], [], None)


def test_files_under_hostile_names_are_read(hostile_path: Path) -> None:
    inputs = write_inputs(hostile_path / "*[a]?", steps=STEPS, train=group("t0", [1, 0], 1))
    tables = open_inputs([str(path) for path in inputs.steps], [str(path) for path in inputs.train], [], [], None)
    assert Database(tables).select("SELECT count(*) AS n FROM steps, train", {}).to_pylist() == [{"n": 4}]


def test_errors_have_the_line(database: Database) -> None:
    with pytest.raises(BadSql, match="nosuch") as caught:
        database.select("SELECT\n  step,\n  nosuch\nFROM steps", {})
    assert caught.value.line == 3 and "LINE" not in str(caught.value)
