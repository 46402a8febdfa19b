"""Parquet in and out under an explicit schema; a damaged file is set aside, never read and never deleted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evo_hpc.store.atomic import StoreError, _explained, fsync_folder, temp_path
from evo_hpc.store.manifest import quarantine
from evo_hpc.store.schemas import METRIC, METRICS, STEP


class BadTable(StoreError):
    """A Parquet file that is torn, or whose schema is not the one it should have."""


def table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as a table of exactly `schema`. Raises BadTable on unknown or missing names, nulls and wrong types."""
    names = set(schema.names)
    for row in rows:
        if unknown := set(row) - names:
            raise BadTable(f"row with columns that the schema lacks: {', '.join(sorted(unknown))}")
    for field in schema:
        if not field.nullable and any(row.get(field.name) is None for row in rows):
            raise BadTable(f"column {field.name} may not be null")
    try:
        return pa.Table.from_pylist(list(rows), schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise BadTable(f"rows do not fit the schema: {error}") from error


def write_table(path: Path, rows: Sequence[Mapping[str, Any]] | pa.Table, schema: pa.Schema, *, durable: bool = True) -> None:
    """Write one Parquet file atomically (temp, fsync, rename). Raises StoreError when the filesystem refuses."""
    table = rows if isinstance(rows, pa.Table) else table_of(rows, schema)
    temp = temp_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temp.open("xb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temp, path)
        if durable:
            fsync_folder(path.parent)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise _explained(error, path) from error


def read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one Parquet file of `schema`.

    Raises BadTable: a torn file is first renamed to a quarantine name (its message says which); a file of another
    schema stays where it is.
    """
    try:
        file = pq.ParquetFile(path)
        found = file.schema_arrow
        _check_schema(path, found, schema)
        return file.read(columns=list(columns) if columns else None)
    except FileNotFoundError as error:
        raise BadTable(f"{path}: missing") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise BadTable(f"{path}: torn Parquet file ({error}); set aside as {quarantine(path).name}") from error


def _check_schema(path: Path, found: pa.Schema, wanted: pa.Schema) -> None:
    if found.equals(wanted, check_metadata=False):
        return
    version = (found.metadata or {}).get(b"evo_hpc.schema_version", b"none").decode()
    missing = [n for n in wanted.names if n not in found.names]
    extra = [n for n in found.names if n not in wanted.names]
    typed = [n for n in wanted.names if n in found.names and found.field(n).type != wanted.field(n).type]
    raise BadTable(f"{path}: another schema (its version: {version}); missing columns {missing}, unknown {extra}, "
                   f"other type {typed}")


def read_tables(paths: Iterable[Path], schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Several files of one schema, concatenated in the order given."""
    tables = [read_table(path, schema, columns) for path in paths]
    if not tables:
        return schema.empty_table().select(list(columns)) if columns else schema.empty_table()
    return pa.concat_tables(tables)


def metric_rows(where: Mapping[str, Any], step: int, values: Mapping[str, float]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One step's metrics in long and in wide form.

    where: campaign, version, attempt, incarnation. Raises BadTable on a name that `METRICS` does not list; a value
    that is not finite becomes null.
    """
    if unknown := set(values) - set(METRICS):
        raise BadTable(f"unknown metrics {sorted(unknown)}: list them in store/schemas.py")
    now = datetime.now(timezone.utc)
    clean = {name: float(v) if v is not None and math.isfinite(v) else None for name, v in values.items()}
    long = [
        {**where, "step": step, "name": name, "value": value, "unit": METRICS[name][0], "kind": METRICS[name][1], "time": now}
        for name, value in clean.items()
    ]
    return long, {**where, "step": step, "time": now, **clean}


__all__ = ["BadTable", "METRIC", "STEP", "metric_rows", "read_table", "read_tables", "table_of", "write_table"]
