"""The DuckDB that an analyzer's SQL runs in: its inputs as tables, no file, no extension, no setting within reach."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset

from evo_hpc.harness.inputs import BadInputs
from evo_hpc.harness.templates import template_line
from evo_hpc.lineage.effective import EffectiveRow, read_back
from evo_hpc.store.schemas import ROLLOUT, STEP
from evo_hpc.store.tables import read_table

TOKENS = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "messages")
"""Columns of rollouts that analyzers do not get: they read features."""
FEATURES = pa.schema([field for field in ROLLOUT if field.name not in TOKENS])
EFFECTIVE = pa.schema([("role", pa.string()), ("field", pa.string()), ("value", pa.string())])
READ_BACK = pa.schema([
    ("name", pa.string()), ("asked", pa.string()), ("place", pa.string()), ("ran_with", pa.string()), ("same", pa.bool_()),
])
MEMORY_MIB = 1024

_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)
_NO_TABLE = re.compile(r"Table with name (\w+) does not exist")
_SETTINGS = {
    "threads": 1,  # sums of floats come out the same every time
    "memory_limit": f"{MEMORY_MIB}MB", "temp_directory": "", "python_enable_replacements": False,
    "autoinstall_known_extensions": False, "autoload_known_extensions": False, "allow_community_extensions": False,
}


class BadSql(Exception):
    """A query that was refused or failed; `line` is 1-based in the SQL as rendered, null where it is not known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line

    def where(self, template: Path, rendered: str) -> str:
        """The place in the template, as far as it is known."""
        if self.line is None:
            return f"{template}: {self}"
        line = template_line(template.read_text(encoding="utf-8"), rendered, self.line)
        if line:
            return f"{template}:{line}: {self}"
        return f"{template}: in line {self.line} of the SQL it renders to (`{rendered.splitlines()[self.line - 1].strip()}`): {self}"


Tables = Mapping[str, Any]
"""By name: Arrow tables, and datasets that are read as a query needs them."""


def open_inputs(
    steps: Sequence[str], train: Sequence[str], probe: Sequence[str], effective: Sequence[EffectiveRow], up_to_step: int | None
) -> Tables:
    """All tables that analyzers may name, rows of later steps left out; probe speaks of the last step and is then empty.

    Raises BadInputs on rows of another suite, BadTable on files of another schema.
    """
    for suite, files in (("train", train), ("probe", probe)):
        for file in files:
            _check_suite(Path(file), suite)
    for file in steps:
        read_table(Path(file), STEP, ["step"])
    rows = [dict(zip(EFFECTIVE.names, row, strict=True)) for row in effective]
    configuration = pa.Table.from_pylist(rows, schema=EFFECTIVE)
    recipe = [{"field": row["field"], "value": row["value"]} for row in rows if row["role"] == "recipe"]
    return {
        "steps": _table(steps, STEP, "step", up_to_step), "train": _table(train, FEATURES, "trainer_step", up_to_step),
        "probe": _table(probe if up_to_step is None else (), FEATURES, "policy_step", None),
        "read_back": pa.Table.from_pylist([asdict(setting) for setting in read_back(effective)], schema=READ_BACK),
        "effective": configuration, "recipe": pa.Table.from_pylist(recipe, schema=pa.schema(list(EFFECTIVE)[1:])),
    }


def _check_suite(file: Path, suite: str) -> None:
    found = read_table(file, ROLLOUT, ["suite"]).column("suite").unique().to_pylist()
    if wrong := sorted(set(found) - {suite}):
        raise BadInputs(f"{file}: rollouts of {', '.join(map(repr, wrong))} where only those of {suite!r} may be; analyzers never read dev or sealed")


def _table(files: Sequence[str], schema: pa.Schema, step: str, up_to_step: int | None) -> Any:
    if not files:
        return schema.empty_table()
    options = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    data = pyarrow.dataset.dataset(list(files), schema=schema, format=pyarrow.dataset.ParquetFileFormat(default_fragment_scan_options=options))
    return data if up_to_step is None else data.filter(pyarrow.dataset.field(step) <= up_to_step)


class Database:
    """One analyzer's own DuckDB. Tables come in as Arrow data, so the SQL needs no file, and may open none."""

    def __init__(self, tables: Tables) -> None:
        self._connection = duckdb.connect(":memory:", config=_SETTINGS)
        for setting in ("enable_external_access = false", "lock_configuration = true"):
            self._connection.execute(f"SET {setting}")
        for name, table in tables.items():
            self.add(name, table)

    def add(self, name: str, table: Any) -> None:
        """Give the SQL one more table."""
        self._connection.register(name, table)

    def select(self, sql: str, bound: Mapping[str, Any]) -> pa.Table:
        """The result of one SELECT. Raises BadSql on anything else, and where DuckDB refuses or fails."""
        try:
            statements = self._connection.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise BadSql("has to be one SELECT, and nothing else" if statements else "is empty")
            return self._connection.sql(sql, params=dict(bound)).to_arrow_table()
        except duckdb.OutOfMemoryException as error:  # DuckDB's own advice is about settings, which are locked
            raise BadSql("takes more memory than an analyzer may have; aggregate more, or select fewer columns and rows") from error
        except duckdb.Error as error:
            message = self._with_line(sql, bound, str(error))
            found = _LINE.search(message)
            text = " ".join(message[: found.start() if found else None].split())
            if missing := _NO_TABLE.search(text):
                text = f"there is no table {missing[1]} here; a table must be named in `inputs` of analyzer.yaml"
            raise BadSql(text, int(found[1]) if found else None) from error
        except (pa.ArrowException, MemoryError) as error:
            raise BadSql(" ".join(str(error).split()) or "takes more memory than an analyzer may have") from error

    def _with_line(self, sql: str, bound: Mapping[str, Any], message: str) -> str:
        """The same error from DuckDB's other interface, which alone names the line."""
        if _LINE.search(message):
            return message
        try:
            self._connection.execute(sql, dict(bound)).fetchone()
        except duckdb.Error as error:
            return str(error)
        return message

    def close(self) -> None:
        self._connection.close()
