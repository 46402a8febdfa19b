"""analyzer.yaml and the folder around it: what an analyzer reads, which numbers steer it, what it may find."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from evo_hpc.config.base import Config
from evo_hpc.errors import UserError
from evo_hpc.harness.templates import SQL, TEXT, TemplateProblem, check_template
from evo_hpc.lineage.findings import Severity
from evo_hpc.paths import AnalyzerPaths

Layer = Literal["score", "signal", "behaviour", "integrity", "optimisation"]
Input = Literal["steps", "train", "probe", "effective", "recipe", "read_back"]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Scalar = bool | int | float | str | None
ParameterValue = Scalar | list[Scalar] | dict[str, Scalar]

IGNORED = ("README.md", "__pycache__")
"""Names beside an analyzer's own files that count for nothing; so do names that begin with a dot."""


class BadAnalyzer(UserError):
    """An analyzer that cannot be used; the message has one line a problem, with the file and, where it is known, the line."""


class Parameter(Config):
    """A value that the templates and thresholds use."""

    value: ParameterValue
    """A number, a text, a list or a mapping."""
    about: str
    """What it does, for people."""


class Evidence(Config):
    """Which rows of the analyzer's table show a finding."""

    where: str = "true"
    """SQL condition on the table."""
    order: str | None = None
    """SQL order of the rows; null = as they stand."""
    limit: Annotated[int, Field(ge=1, le=100)] = 5
    """Rows at most."""


class FindingRule(Config):
    """When a measure is a finding."""

    id: Name
    """Bare; the full id is `analyzer.id`."""
    severity: Severity
    measure: Name
    """Bare name of a column of measures.sql.j2."""
    above: float | Name | None = None
    """The finding is made where the measure exceeds this number, or the parameter of this name."""
    below: float | Name | None = None
    """The finding is made where the measure falls short of this number, or the parameter of this name."""
    says: str
    """One sentence, a Jinja template; it gets value, threshold, measures, p, and with `each` the row."""
    each: bool = False
    """One finding for every row of the evidence, rather than one with them all."""
    evidence: Evidence | None = None
    """Null = no rows."""

    @model_validator(mode="after")
    def _one_side(self) -> FindingRule:
        if (self.above is None) == (self.below is None):
            raise ValueError("a finding has exactly one of `above` and `below`")
        if self.each and self.evidence is None:
            raise ValueError("a finding with `each` needs `evidence`, whose rows it is made for")
        return self


class AnalyzerManifest(Config):
    """`analyzer.yaml`."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    name: Name
    """Equal to the folder's name."""
    layer: Layer
    """What it looks at."""
    live: bool = False
    """Whether the watch runs it while a version trains."""
    question: str
    """What it answers, for people."""
    inputs: list[Input] = Field(min_length=1)
    """The tables that its SQL reads; it gets no others."""
    parameters: dict[Name, Parameter] = Field(default_factory=dict)
    """By name; `p.NAME` in templates."""
    findings: list[FindingRule] = Field(default_factory=list)
    """What it may find."""

    @model_validator(mode="after")
    def _thresholds(self) -> AnalyzerManifest:
        ids = [rule.id for rule in self.findings]
        if twice := sorted({each for each in ids if ids.count(each) > 1}):
            raise ValueError(f"findings of the same id: {', '.join(twice)}")
        for rule in self.findings:
            limit = rule.above if rule.above is not None else rule.below
            if not isinstance(limit, str):
                continue
            if limit not in self.parameters:
                near = difflib.get_close_matches(limit, list(self.parameters), n=1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                raise ValueError(f"finding `{rule.id}` has the threshold `{limit}`, which is no parameter{hint}")
            value = self.parameters[limit].value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"finding `{rule.id}` has the threshold `{limit}`, a parameter that is not a number")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """What templates see as `p`."""
        return {name: parameter.value for name, parameter in self.parameters.items()}

    def threshold(self, rule: FindingRule) -> float:
        """The number that a finding's measure is held against."""
        limit = rule.above if rule.above is not None else rule.below
        return float(self.values[limit]) if isinstance(limit, str) else float(limit or 0.0)


@dataclass(frozen=True)
class Analyzer:
    """A folder whose manifest and templates have been read."""

    paths: AnalyzerPaths
    manifest: AnalyzerManifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def finding_ids(self) -> tuple[str, ...]:
        """In full: `analyzer.finding`."""
        return tuple(f"{self.name}.{rule.id}" for rule in self.manifest.findings)


def files_of(folder: Path) -> list[Path]:
    """What counts in an analyzer's folder, in order of names. Raises BadAnalyzer on a folder inside it."""
    found = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.name not in IGNORED)
    if inner := [path for path in found if not path.is_file()]:
        raise BadAnalyzer(f"{inner[0]}: an analyzer's folder holds files only; remove it")
    return found


def load_analyzer(folder: Path) -> Analyzer:
    """Read an analyzer and check the syntax of its templates; nothing of it is run here.

    Raises BadAnalyzer, with the file and line.
    """
    from evo_hpc.config.yaml_io import ConfigError, load_model  # here, since the process that runs analyzers reads no YAML

    paths = AnalyzerPaths(folder)
    needed = (paths.manifest, paths.query, paths.measures, paths.report)
    present = files_of(folder)
    if paths.code in present:
        raise BadAnalyzer(f"{paths.code}: analyzers in Python are not supported yet, as there is no sandbox to run them in; write {paths.query.name}")
    if missing := [path.name for path in needed if path not in present]:
        raise BadAnalyzer(f"{folder}: missing {', '.join(missing)}; an analyzer is {', '.join(path.name for path in needed)}")
    if strange := [path for path in present if path not in needed]:
        raise BadAnalyzer(f"{strange[0]}: not part of an analyzer, which is {', '.join(path.name for path in needed)} (and README.md); remove it")
    try:
        manifest = load_model(paths.manifest, AnalyzerManifest)
    except ConfigError as error:
        raise BadAnalyzer(str(error)) from error
    if manifest.name != paths.name:
        line = _line(paths.manifest, ("name",))
        raise BadAnalyzer(f"{paths.manifest}:{line}: `name` is {manifest.name!r}, the folder is {paths.name!r}; they must be equal")
    problems = [problem for path in needed[1:] if (problem := _syntax(path, SQL if path != paths.report else TEXT))]
    problems += _manifest_templates(paths, manifest)
    if problems:
        raise BadAnalyzer("\n".join(problems))
    return Analyzer(paths, manifest)


def _line(path: Path, location: tuple[str | int, ...]) -> int:
    """1-based line of a key in a YAML file that has been read before."""
    from evo_hpc.config.yaml_io import line_of, load_tree

    return line_of(load_tree(path), list(location))


def _syntax(path: Path, kind: Any) -> str | None:
    try:
        check_template(kind, path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        return f"{path}: not a text file in UTF-8"
    except TemplateProblem as problem:
        return f"{path}:{problem.line}: {problem}" if problem.line else f"{path}: {problem}"
    return None


def _manifest_templates(paths: AnalyzerPaths, manifest: AnalyzerManifest) -> list[str]:
    problems = []
    for index, rule in enumerate(manifest.findings):
        texts: Mapping[tuple[str, ...], tuple[Any, str | None]] = {
            ("says",): (TEXT, rule.says),
            ("evidence", "where"): (SQL, rule.evidence.where if rule.evidence else None),
            ("evidence", "order"): (SQL, rule.evidence.order if rule.evidence else None),
        }
        for location, (kind, text) in texts.items():
            try:
                if text is not None:
                    check_template(kind, text, rule.id)
            except TemplateProblem as problem:
                line = _line(paths.manifest, ("findings", index, *location))
                problems.append(f"{paths.manifest}:{line}: {'.'.join(location)} of finding `{rule.id}`: {problem}")
    return problems
