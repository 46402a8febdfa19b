"""What a harness found in a version, on disk: the analysis of a finished one, the watch over one in training."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evo_hpc.errors import UserError
from evo_hpc.harness.harness import Harness
from evo_hpc.harness.inputs import Inputs
from evo_hpc.harness.manifest import Analyzer
from evo_hpc.harness.runner import analyse
from evo_hpc.lineage.findings import AnalyzerReport, Citation, Finding, Measure, cite
from evo_hpc.lineage.identity import digest
from evo_hpc.paths import COMPLETE, AnalysisPaths, VersionPaths
from evo_hpc.store.atomic import StoreError
from evo_hpc.store.manifest import content, publish_folder, quarantine, read_complete, sha256

PROBE = "probe"
_LOOK = "Restore it: a look at a run that has ended is not taken again"


class BadAnalysis(UserError):
    """An analysis on disk that is damaged, of another version, or of results that are no longer there."""


class StaleAnalysis(BadAnalysis):
    """An analysis of results that the version no longer has: removed, or made again with another outcome."""


@dataclass(frozen=True)
class Reports:
    """The analyzers' reports on one version, in a published folder."""

    version: str
    harness: str
    folder: Path
    reports: Mapping[str, AnalyzerReport]
    """By analyzer, in order of names."""
    meta: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """How long the analyzers took."""
        return self.meta["seconds"]

    @property
    def measures(self) -> dict[str, Measure]:
        """By full name: `analyzer.measure`."""
        return {f"{name}.{bare}": measure for name, report in self.reports.items() for bare, measure in report.measures.items()}

    @property
    def findings(self) -> list[Finding]:
        """Of all analyzers, in order."""
        return [finding for report in self.reports.values() for finding in report.findings]

    def citations(self, root: Path) -> list[Citation]:
        """The findings as evidence; sources are relative to `root`, the campaign."""
        return [
            cite(finding, self.version, AnalysisPaths(self.folder / name).findings.relative_to(root).as_posix())
            for name, report in self.reports.items() for finding in report.findings
        ]

    def paths(self, analyzer: str) -> AnalysisPaths:
        """Where one analyzer's table and report are."""
        return AnalysisPaths(self.folder / analyzer)


@dataclass(frozen=True)
class Analysis(Reports):
    """Of a finished version."""

    @property
    def inputs_digest(self) -> str:
        """Identity of the tables that were read."""
        return self.meta["inputs_digest"]


@dataclass(frozen=True)
class WatchLook(Reports):
    """Of a training run up to a step."""

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def run(self) -> str:
        """Identity of the training run (lineage/identity.py) that it looked at."""
        return self.meta["run"]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The table parts that it read, as the run described them."""
        return self.meta["parts"]

    @property
    def stop_on(self) -> list[str]:
        """The futility rule as it was then."""
        return self.meta["stop_on"]

    @property
    def futile(self) -> list[str]:
        """Findings that are in the futility rule."""
        return self.meta["futile"]


def version_inputs(version: VersionPaths) -> Inputs:
    """What analyzers read of a finished version: its training run and its evaluation on probe, as far as there are any.

    Raises BadAnalysis where one of the folders is damaged.
    """
    train = [version.train / name for name in _listed(version.train)]
    probe = [version.evaluation(PROBE) / name for name in _listed(version.evaluation(PROBE))]
    return Inputs(
        steps=tuple(path for path in train if path.parent == version.steps and path.suffix == ".parquet"),
        train=tuple(path for path in train if path.parent == version.rollouts and path.suffix == ".parquet"),
        probe=tuple(path for path in probe if path.suffix == ".parquet"),
        effective=version.effective_yaml if version.effective_yaml in train else None,
    )


def inputs_digest(version: VersionPaths) -> str:
    """Identity of what version_inputs gives, by the hashes in the completion records. Raises BadAnalysis."""
    wanted = version_inputs(version)
    paths = {*wanted.steps, *wanted.train, *wanted.probe, *((wanted.effective,) if wanted.effective else ())}
    folders = (version.train, version.evaluation(PROBE))
    return digest(sorted(
        ((folder / name).relative_to(version.root).as_posix(), hashed)
        for folder in folders for name, hashed in _listed(folder).items() if folder / name in paths
    ))


def _listed(folder: Path) -> dict[str, str]:
    """Names and hashes of a published folder's files, in order of names; empty where there is no folder."""
    if not folder.exists():
        return {}
    try:
        return {file["name"]: file["sha256"] for file in sorted(read_complete(folder)["files"], key=lambda file: file["name"])}
    except (StoreError, KeyError, TypeError) as error:
        raise BadAnalysis(f"{folder}: cannot be analysed, it is damaged ({error}). Remove the folder: it is made again") from error


def run_analysis(
    version: VersionPaths, harness: Harness, inputs: Inputs, *, timeout_seconds: float = 300, while_waiting: Callable[[], None] | None = None
) -> Analysis:
    """Analyse a finished version and publish what was found, at once; an analysis that is there already is read.

    `inputs` as version_inputs gives them. Raises BadAnalyzer, BadInputs and BadAnalysis, which are the user's to mend,
    and AnalysisFailed.
    """
    if (found := read_analysis(version, harness.id)) is not None:
        return found
    make_analysis(version, harness, inputs, version.analysis(harness.id), timeout_seconds=timeout_seconds, while_waiting=while_waiting)
    made = read_analysis(version, harness.id)
    assert made is not None
    return made


def make_analysis(
    version: VersionPaths, harness: Harness, inputs: Inputs, folder: Path, *, timeout_seconds: float = 300,
    while_waiting: Callable[[], None] | None = None,
) -> None:
    """Analyse a finished version and make `folder` of what was found, at once. Raises as run_analysis does."""
    identity = inputs_digest(version)
    _check_hashes(version, inputs)
    _publish(
        folder, harness.analyzers(), inputs, version=version.id, up_to_step=None, timeout_seconds=timeout_seconds,
        while_waiting=while_waiting, meta=lambda reports: {
            "version": version.id, "harness": harness.id, "harness_digest": harness.digest, "inputs_digest": identity,
        },
    )


def publish_analysis(version: VersionPaths, harness_id: str, made: Path) -> None:
    """Publish what `make_analysis` made elsewhere, in place of one of results that the version no longer has. Doing it again changes nothing.

    Raises StoreError when `made` is damaged.
    """
    meta, final = read_complete(made, hashes=True)["meta"], version.analysis(harness_id)
    try:
        read_analysis(version, harness_id)
    except StaleAnalysis:
        quarantine(final)
    publish_folder(final, {path.relative_to(made).as_posix(): path for path in content(made)}, meta)


def _check_hashes(version: VersionPaths, inputs: Inputs) -> None:
    """What is analysed is what was committed, to the byte."""
    listed = {folder / name: hashed for folder in (version.train, version.evaluation(PROBE)) for name, hashed in _listed(folder).items()}
    for path in (*inputs.steps, *inputs.train, *inputs.probe, *((inputs.effective,) if inputs.effective else ())):
        if path not in listed:
            raise BadAnalysis(f"{path}: no file of what {version.id} has published; an analysis is of published results only")
        if sha256(path) != listed[path]:
            raise BadAnalysis(f"{path}: content differs from the hash in its {COMPLETE}; restore it, or remove the folder: it is made again")


def read_analysis(version: VersionPaths, harness_id: str) -> Analysis | None:
    """What a harness found in a version; None where it has not looked.

    Raises BadAnalysis when it is damaged or of another version, StaleAnalysis when it is of results that are no longer there.
    """
    folder = version.analysis(harness_id)
    if not folder.exists():
        return None
    found = Analysis(**_read(folder, version, {"version", "harness", "harness_digest", "inputs_digest", "seconds"}))
    if found.harness != harness_id:
        raise BadAnalysis(f"{folder}: made by {found.harness}; remove the folder: the version is analysed again")
    if found.inputs_digest != inputs_digest(version):
        raise StaleAnalysis(f"{folder}: made of other results than {version.id} has now; remove the folder: the version is analysed again")
    return found


def run_watch(
    version: VersionPaths, harness: Harness, inputs: Inputs, *, step: int, run: str, stop_on: Collection[str], parts: Sequence[Mapping[str, Any]],
    timeout_seconds: float = 300, while_waiting: Callable[[], None] | None = None,
) -> WatchLook:
    """Let the live analyzers look at a training run up to `step`, and publish what they found, at once.

    `inputs` are the files of `parts`, which make up the run so far and are kept with what was found. A look at this
    step that is there already is read. Raises as run_analysis does.
    """
    folder = version.watch(step)
    if not folder.exists():
        _publish(
            folder, harness.analyzers(live=True), inputs, version=version.id, up_to_step=step, timeout_seconds=timeout_seconds,
            while_waiting=while_waiting, meta=lambda reports: {
                "version": version.id, "step": step, "run": run, "harness": harness.id, "stop_on": sorted(stop_on),
                "parts": [dict(part) for part in parts],
                "futile": [finding.id for report in reports for finding in report.findings if finding.id in stop_on],
            },
        )
    return _read_watch(version, step, folder)


def read_watches(version: VersionPaths) -> list[WatchLook]:
    """All looks at the training run, the earliest step first. Raises BadAnalysis."""
    return [_read_watch(version, step, folder) for step, folder in version.watches()]


def _read_watch(version: VersionPaths, step: int, folder: Path) -> WatchLook:
    found = WatchLook(**_read(folder, version, {"version", "step", "run", "harness", "stop_on", "parts", "futile", "seconds"}, _LOOK))
    if found.step != step:
        raise BadAnalysis(f"{folder}: a look at step {found.step}; remove the folder")
    return found


def _publish(
    final: Path, analyzers: Sequence[Analyzer], inputs: Inputs, *, version: str, up_to_step: int | None, timeout_seconds: float,
    while_waiting: Callable[[], None] | None, meta: Callable[[list[AnalyzerReport]], dict[str, Any]],
) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evo-analysis-") as scratch:
        out = Path(scratch)
        reports = analyse(
            analyzers, inputs, out, version=version, up_to_step=up_to_step, timeout_seconds=timeout_seconds, while_waiting=while_waiting,
        )
        files = {path.relative_to(out).as_posix(): path for path in content(out)}
        publish_folder(final, files, {**meta(reports), "seconds": round(time.monotonic() - began, 3)})


def _read(folder: Path, version: VersionPaths, keys: set[str], remade: str = "Remove the folder: it is made again") -> dict[str, Any]:
    try:
        record = read_complete(folder)
        meta = record["meta"]
        if not keys <= set(meta):
            raise BadAnalysis(f"{folder}: its {COMPLETE} does not say {', '.join(sorted(keys - set(meta)))}. {remade}")
        if meta["version"] != version.id:
            raise BadAnalysis(f"{folder}: belongs to {meta['version']}, not to {version.id}; a copied version starts without it: remove it here")
        reports = {}
        for file in sorted(record["files"], key=lambda file: file["name"]):
            path = folder / file["name"]
            paths = AnalysisPaths(path.parent)
            if path != paths.findings:
                continue
            if sha256(path) != file["sha256"]:
                raise BadAnalysis(f"{path}: edited after it was written. {remade}")
            report = AnalyzerReport.model_validate_json(path.read_bytes())
            if (report.analyzer, report.version) != (paths.root.name, version.id):
                raise BadAnalysis(f"{path}: a report of {report.analyzer} on {report.version}. {remade}")
            reports[report.analyzer] = report
    except (StoreError, ValidationError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise BadAnalysis(f"{folder}: damaged ({error}). {remade}") from error
    return {"version": version.id, "harness": meta["harness"], "folder": folder, "reports": reports, "meta": meta}
