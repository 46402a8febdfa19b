"""The report as one self-contained HTML page, and the writing of both reports."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from evo_hpc.assets import asset_dir
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.report.curves_figure import curve_figures, trained
from evo_hpc.report.layout import place
from evo_hpc.report.lineage_figure import lineage_figure
from evo_hpc.report.markdown import render_markdown
from evo_hpc.report.model import STANDINGS, CampaignReport
from evo_hpc.report.record import read_report_record
from evo_hpc.report.render import environment, shared
from evo_hpc.report.score_figure import difference_figure, score_figure
from evo_hpc.report.svg import mark
from evo_hpc.store.atomic import write_bytes


def render_html(report: CampaignReport) -> str:
    """The page; the same record gives the same bytes."""
    page = environment(autoescape=True).get_template("report.html.j2")
    cells = place({v.id: v.parents for v in report.versions})
    return page.render(
        **shared(report), css=Markup((asset_dir("templates") / "report" / "report.css").read_text(encoding="utf-8")), mark=mark,
        lineage=lineage_figure(report) if report.versions else None, tree_columns=1 + max((cell.column for cell in cells.values()), default=0),
        scores=score_figure(report), differences=difference_figure(report), curves=curve_figures(report), runs=trained(report),
        stopped=any(v.stopped_early for v in report.versions), shown_standings=[s for s in STANDINGS if s in {v.standing for v in report.versions}],
    )


def write_report(paths: CampaignPaths, out: Path | None) -> CampaignReport:
    """Read a campaign, at any moment of it, and write its HTML and Markdown reports to `out`, or to its own reports folder.

    Each file is replaced in one step, and left alone where nothing has changed. Raises UserError where the campaign or `out` is the user's to mend, StoreError when the
    filesystem refuses.
    """
    folder = out if out is not None else paths.reports
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, where the folder of the reports belongs; remove it, or give another folder with --out")
    report = read_report_record(paths)
    # What a file said may hold half a surrogate pair, which no encoding takes; `visible` has made it readable by now.
    for name, text in ((paths.report_html.name, render_html(report)), (paths.report_markdown.name, render_markdown(report))):
        if not (folder / name).is_file() or (folder / name).read_bytes() != text.encode():
            write_bytes(folder / name, text.encode())
    return report
