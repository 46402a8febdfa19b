"""What the HTML and the Markdown report share: the templates' environment, the words for every number, and what is shown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evo_hpc import __version__
from evo_hpc.assets import asset_dir
from evo_hpc.lineage.findings import Finding
from evo_hpc.report import words
from evo_hpc.report.curves_figure import series_class
from evo_hpc.report.model import SCHEMA_VERSION, CampaignReport, Score, VersionReport
from evo_hpc.report.summary import cautions, gaps, inert, score_lines, summary
from evo_hpc.report.svg import standing_class


def shared(report: CampaignReport) -> dict[str, Any]:
    return {
        "report": report, "summary": summary(report), "gaps": gaps(report), "cautions": cautions(report), "score_lines": score_lines(report),
        "inert": inert(report), "any_analysis": any(v.analyses for v in report.versions), "shell_folder": words.shell_word(report.folder),
        "probe_lines": [v for v in report.versions if "probe" in v.scores], "schema_version": SCHEMA_VERSION, "package_version": __version__,
    }


def environment(*, autoescape: bool) -> Environment:
    made = Environment(
        loader=FileSystemLoader(asset_dir("templates") / "report"), autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, finalize=_finalize,
    )
    made.filters.update(_FILTERS)
    return made


def _finalize(value: Any) -> Any:
    """Nothing for null, and control characters made visible in whatever a file said."""
    if value is None or isinstance(value, Markup):
        return value if value is not None else ""
    return words.visible(value) if isinstance(value, str) else value


def _pair(words_of: Callable[[float | None, float | None], str], ends: tuple[float, float]) -> str:
    return words_of(*ends)


def _score_interval(score: Score) -> str:
    return f"{words.percent_interval(score.ci_low, score.ci_high)}, n = {score.n_tasks} × {score.k}"


def _proposer(version: VersionReport) -> str:
    who = {"agent": "by the agent", "person": "by a person", "campaign": "by the campaign"}[version.version.author]
    return who + (f", rule {version.version.rule}" if version.version.rule else "")


def _threshold(finding: Finding) -> str:
    return f"above {words.number(finding.above)}" if finding.above is not None else f"below {words.number(finding.below)}"


_FILTERS: dict[str, Callable[..., Any]] = {
    "percent": words.percent, "points": words.points, "number": words.number, "alpha": words.alpha, "moment": words.moment,
    "duration": words.duration, "field_value": words.field_value, "change_words": words.change_words, "prediction": words.prediction_words,
    "observed": words.observed_words, "points_interval": partial(_pair, words.points_interval),
    "percent_interval": partial(_pair, words.percent_interval), "score_interval": _score_interval, "proposer": _proposer, "threshold": _threshold,
    "standing_class": standing_class, "series_class": series_class,
}
