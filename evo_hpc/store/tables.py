"""Parquet in and out under an explicit schema: files of older schemas are read, damaged ones refused and left alone."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evo_hpc.paths import COMPLETE
from evo_hpc.store.atomic import StoreError, _explained, fsync_folder, temp_path
from evo_hpc.store.schemas import METRIC, METRICS, SCHEMA_VERSION, STEP, TABLE_KEY, VERSION_KEY


class BadTable(StoreError):
    """Rows or a Parquet file that do not fit the schema, or a torn file."""


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
    """Write one Parquet file atomically (temp, fsync, rename), of exactly `schema`.

    Raises BadTable on rows that do not fit it, StoreError when the filesystem refuses.
    """
    table = rows if isinstance(rows, pa.Table) else table_of(rows, schema)
    if not table.schema.equals(schema):
        raise BadTable(f"{path}: a table of another schema than the one to write")
    table = table.replace_schema_metadata(schema.metadata)  # readers go by the table's name and version
    temp = temp_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temp.open("xb") as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
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
    """Read one Parquet file as a table of `schema`, or of its `columns`, in the order of `schema`.

    A file of an older schema is taken: nullable columns that it lacks come back as nulls. Nothing is ever renamed
    here, since a reader does not own what it reads. Raises BadTable when the file is torn, of another table, of a
    newer schema version, or has other columns; StoreError when the filesystem fails to give it.
    """
    if unknown := set(columns or ()) - set(schema.names):
        raise BadTable(f"no such columns in the schema: {', '.join(sorted(unknown))}")
    names = [name for name in schema.names if not columns or name in columns]
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_schema(path, file.schema_arrow, schema)
            present = set(file.schema_arrow.names)
            found = file.read(columns=[name for name in names if name in present])
            found.validate()
            length = file.metadata.num_rows
    except OSError as error:
        if error.errno is not None:
            raise _unreadable(error, path) from error
        raise _torn(error, path) from error  # how pyarrow reports thrift, codec and page errors
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        raise _torn(error, path) from error
    except MemoryError as error:
        raise StoreError(f"{path}: not enough memory to read it ({error})") from error
    return _conform(path, found, pa.schema([schema.field(name) for name in names], metadata=schema.metadata), length)


def _torn(error: Exception, path: Path) -> BadTable:
    return BadTable(f"{path}: torn Parquet file ({' '.join(str(error).split())}). Where a {COMPLETE} lists it, remove that "
                    "published folder: it is published again from the job that made it, or made again.")


def _unreadable(error: OSError, path: Path) -> StoreError:
    reason = os.strerror(error.errno or 0)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StoreError(f"{path}: cannot be opened ({reason}). Raise the limit (`ulimit -n`) and run again; the file is "
                          "as it was.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StoreError(f"{path}: not readable ({reason}). Check the owner and mode of the file and its folders.")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return StoreError(f"{path}: missing ({reason})")
    return StoreError(f"{path}: cannot be read ({reason}). See whether this filesystem is well, then run again; the file is "
                      "as it was.")


def _check_schema(path: Path, found: pa.Schema, wanted: pa.Schema) -> None:
    """Raise BadTable unless a file of schema `found` can be read as `wanted`."""
    said, today = found.metadata or {}, wanted.metadata or {}
    version = said.get(VERSION_KEY, b"none").decode(errors="replace")
    if said.get(TABLE_KEY, today.get(TABLE_KEY)) != today.get(TABLE_KEY):
        raise BadTable(f"{path}: a table of {said[TABLE_KEY].decode(errors='replace')}, "
                       f"where one of {today.get(TABLE_KEY, b'none').decode()} should be")
    if version.isdecimal() and int(version) > SCHEMA_VERSION:
        raise BadTable(f"{path}: schema version {version}, newer than version {SCHEMA_VERSION}, the newest that this installation "
                       "reads; use the evo-hpc that wrote it, or a later one")
    missing = [f.name for f in wanted if f.name not in found.names and not f.nullable]
    extra = [n for n in found.names if n not in wanted.names or found.names.count(n) > 1]
    typed = [f.name for f in wanted if f.name in found.names and f.name not in extra and found.field(f.name).type != f.type]
    if missing or extra or typed:
        raise BadTable(f"{path}: another schema (its version: {version}); missing columns {missing}, unknown {extra}, "
                       f"other type {typed}")


def _conform(path: Path, found: pa.Table, schema: pa.Schema, length: int) -> pa.Table:
    arrays = []
    for field in schema:
        if field.name not in found.column_names:
            arrays.append(pa.nulls(length, field.type))
        elif not field.nullable and found.column(field.name).null_count:
            raise BadTable(f"{path}: nulls in column {field.name}, which may not be null")
        else:
            arrays.append(found.column(field.name))
    return pa.table(arrays, schema=schema)


def read_tables(paths: Iterable[Path], schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Several files of one schema, concatenated in the order given."""
    tables = [read_table(path, schema, columns) for path in paths]
    if not tables:
        empty = schema.empty_table()
        return empty.select([name for name in schema.names if name in columns]) if columns else empty
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
