"""The process that runs analyzers: a request on stdin, an outcome on stdout, both JSON. No YAML, no campaign, no secrets."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evo_hpc.harness.database import BadSql, Database, open_inputs
from evo_hpc.harness.inputs import BadInputs
from evo_hpc.harness.manifest import AnalyzerManifest, FindingRule
from evo_hpc.harness.protocol import Outcome, Request
from evo_hpc.harness.templates import TemplateProblem, render_sql, render_text
from evo_hpc.lineage.findings import AnalyzerReport, Finding, Measure
from evo_hpc.paths import AnalysisPaths, AnalyzerPaths
from evo_hpc.store.atomic import StoreError, dump_json

REPORT_ROWS = 200
"""Rows of the table that report.md.j2 gets, at most."""
ERROR_SUFFIX = "__se"
"""A column of measures.sql.j2 with this ending is the standard error of the measure before it."""
_PR_SET_PDEATHSIG = 1


class _Problem(Exception):
    """An analyzer's own fault, with the place."""


def run(request: Request) -> Outcome:
    """Every analyzer of the request; what is wrong with any of them is said together."""
    try:
        tables = open_inputs(request.steps, request.train, request.probe, request.effective, request.up_to_step)
    except (BadInputs, StoreError) as error:
        return Outcome(state="bad_inputs", message=str(error))
    problems = []
    for folder, manifest in request.analyzers:
        database = Database({name: tables[name] for name in manifest.inputs})
        try:
            _Run(request, AnalyzerPaths(Path(folder)), manifest, database).run()
        except _Problem as problem:
            problems.append(f"analyzer {manifest.name}: {problem}")
        finally:
            database.close()
    return Outcome(state="bad_analyzer", message="\n".join(problems)) if problems else Outcome(state="done")


class _Run:
    """One analyzer over the inputs."""

    def __init__(self, request: Request, paths: AnalyzerPaths, manifest: AnalyzerManifest, database: Database) -> None:
        self.request, self.paths, self.manifest, self.database = request, paths, manifest, database
        self.p = manifest.values

    def run(self) -> None:
        table = self._select(self.paths.query)
        self.database.add("result", table)
        measures = self._measures(self._select(self.paths.measures))
        values = {name: measure.value for name, measure in measures.items()}
        findings = [found for rule in self.manifest.findings for found in self._findings(rule, values)]
        report = AnalyzerReport(
            analyzer=self.manifest.name, layer=self.manifest.layer, version=self.request.version, up_to_step=self.request.up_to_step,
            measures=measures, findings=findings, rows=table.num_rows,
        )
        text = self._render(self.paths.report, self.paths.report.read_text(encoding="utf-8"), {
            "rows": [_plain(row) for row in table.slice(0, REPORT_ROWS).to_pylist()], "measures": values, "findings": findings,
            "errors": {name: measure.se for name, measure in measures.items()},
            "p": self.p, "version": self.request.version, "up_to_step": self.request.up_to_step, "manifest": self.manifest,
        })
        self._write(table, report, text)

    def _select(self, template: Path) -> pa.Table:
        sql = ""
        try:
            sql, bound = render_sql(template.read_text(encoding="utf-8"), str(template), {"p": self.p})
            return self.database.select(sql, bound)
        except TemplateProblem as problem:
            raise _Problem(_place(template, problem)) from problem
        except BadSql as error:
            raise _Problem(error.where(template, sql)) from error

    def _measures(self, table: pa.Table) -> dict[str, Measure]:
        path, names = self.paths.measures, table.column_names
        if table.num_rows != 1:
            raise _Problem(f"{path}: gives {table.num_rows} rows; measures are exactly one row")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _Problem(f"{path}: two columns are called {', '.join(twice)}")
        if wrong := [f"{field.name} ({field.type})" for field in table.schema if not _numeric(field.type)]:
            raise _Problem(f"{path}: measures are numbers, these are not: {', '.join(wrong)}")
        row = {name: _plain(value) for name, value in table.to_pylist()[0].items()}
        if alone := [n for n in row if n.endswith(ERROR_SUFFIX) and n.removesuffix(ERROR_SUFFIX) not in row]:
            raise _Problem(f"{path}: {alone[0]} is the standard error of no measure; call it after a column, with {ERROR_SUFFIX} behind")
        for rule in self.manifest.findings:
            if rule.measure not in row or rule.measure.endswith(ERROR_SUFFIX):
                raise _Problem(f"{self.paths.manifest}: finding `{rule.id}` rests on `{rule.measure}`, which {path.name} does not give; "
                               f"it gives {', '.join(n for n in row if not n.endswith(ERROR_SUFFIX))}")
        return {
            name: Measure(value=value, se=row.get(name + ERROR_SUFFIX)) for name, value in row.items() if not name.endswith(ERROR_SUFFIX)
        }

    def _findings(self, rule: FindingRule, values: Mapping[str, float | None]) -> list[Finding]:
        value, threshold = values[rule.measure], self.manifest.threshold(rule)
        if self.request.dry:
            self._says(rule, threshold, threshold, dict.fromkeys(values, 1.0), dict.fromkeys(self._columns()) if rule.each else None)
            self._evidence(rule)
        if value is None or not (value > threshold if rule.above is not None else value < threshold):
            return []
        rows = self._evidence(rule)
        return [
            Finding(
                id=f"{self.manifest.name}.{rule.id}", severity=rule.severity, measure=f"{self.manifest.name}.{rule.measure}", value=value,
                above=threshold if rule.above is not None else None, below=threshold if rule.below is not None else None,
                text=self._says(rule, value, threshold, values, row), evidence=shown,
            )
            for row, shown in ([(row, [row]) for row in rows] if rule.each else [(None, rows)])
        ]

    def _columns(self) -> list[str]:
        return self.database.select("SELECT * FROM result LIMIT 0", {}).column_names

    def _says(self, rule: FindingRule, value: float, threshold: float, values: Mapping[str, float | None], row: Mapping[str, Any] | None) -> str:
        given = {"value": value, "threshold": threshold, "measures": values, "p": self.p, **({"row": row} if row is not None else {})}
        try:
            return " ".join(render_text(rule.says, rule.id, given).split())
        except TemplateProblem as problem:
            raise _Problem(f"{self.paths.manifest}: `says` of finding `{rule.id}`: {problem}") from problem

    def _evidence(self, rule: FindingRule) -> list[dict[str, Any]]:
        if rule.evidence is None:
            return []
        try:
            where, first = render_sql(rule.evidence.where, rule.id, {"p": self.p})
            rows = self.database.select(f"SELECT * FROM result WHERE (\n{where}\n)", first)
            self.database.add("shown", rows)
            order, bound = render_sql(rule.evidence.order or "", rule.id, {"p": self.p})
            ordered = f"SELECT * FROM shown\n{f'ORDER BY {order}' if order.strip() else ''}\nLIMIT {rule.evidence.limit}"
            return [_plain(row) for row in self.database.select(ordered, bound).to_pylist()]
        except (TemplateProblem, BadSql) as error:
            raise _Problem(f"{self.paths.manifest}: `evidence` of finding `{rule.id}`: {error}") from error

    def _render(self, path: Path, source: str, values: Mapping[str, Any]) -> str:
        try:
            return render_text(source, str(path), values)
        except TemplateProblem as problem:
            raise _Problem(_place(path, problem)) from problem

    def _write(self, table: pa.Table, report: AnalyzerReport, text: str) -> None:
        out = AnalysisPaths(Path(self.request.out) / self.manifest.name)
        out.root.mkdir()
        try:
            pq.write_table(table, out.table, compression="zstd", write_page_checksum=True)
            out.findings.write_bytes(dump_json(report.model_dump(mode="json")))
            out.report.write_text(text, encoding="utf-8")
        except pa.ArrowException as error:
            raise _Problem(f"{self.paths.query}: its table cannot be stored ({' '.join(str(error).split())}); cast the column") from error
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise _Problem(f"{self.paths.root}: writes a file of more than {self.request.file_bytes >> 20} MiB; aggregate more") from error


def _place(path: Path, problem: TemplateProblem) -> str:
    return f"{path}:{problem.line}: {problem}" if problem.line else f"{path}: {problem}"


def _numeric(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)


def _plain(value: Any) -> Any:
    """A value as JSON has it; what is not a finite number is null."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _limit(request: Request) -> None:
    """Before anything of an analyzer is run: end with the parent, and stay within the request's limits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request.parent:
        sys.exit("who asked is gone")
    for what, limit in (
        (resource.RLIMIT_CPU, request.cpu_seconds), (resource.RLIMIT_AS, request.memory_bytes),
        (resource.RLIMIT_FSIZE, request.file_bytes), (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))


def main() -> None:
    """One request. A failure of this process itself ends it with a traceback and a code that is not zero."""
    request = Request.model_validate_json(sys.stdin.buffer.read())
    _limit(request)
    pa.set_cpu_count(1)
    json.dump(run(request).model_dump(), sys.stdout)


if __name__ == "__main__":
    main()
