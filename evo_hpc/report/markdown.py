"""The report as GitHub-flavoured Markdown, with the numbers of the page."""

from __future__ import annotations

import re
from typing import Any

from evo_hpc.report.curves_figure import PANELS, points_of, trained
from evo_hpc.report.lineage_view import lineage_lines
from evo_hpc.report.model import CampaignReport, VersionReport
from evo_hpc.report.render import environment, shared
from evo_hpc.report.words import NONE, number, one_line

_SPECIAL = re.compile(r"[\\`*_|~$]|](?=[(\[:])|(?<=:)/(?=/)|(?<=www)\.")


def render_markdown(report: CampaignReport) -> str:
    """The text; the same record gives the same bytes."""
    made = environment(autoescape=False)
    made.filters.update(md=markdown_text, code=markdown_code)
    text = made.get_template("report.md.j2").render(
        **shared(report), scores=any(v.score for v in report.versions), tree_lines=lineage_lines(report), curve_titles=[p.title for p in PANELS],
        curve_rows=[_curve_row(v) for v in trained(report)],
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def markdown_text(text: str) -> str:
    """Text from a file as literal text: one line, nothing in it is markup, a link or a mention."""
    safe = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\g<0>", safe)


def markdown_code(text: str) -> str:
    """A code span that its content cannot leave, and that a table cell can hold."""
    return f"`{one_line(str(text)).replace('`', chr(0x02CB)).replace('|', chr(0xA6)) or ' '}`"


def _curve_row(version: VersionReport) -> dict[str, Any]:
    assert version.curves is not None
    cells = []
    for panel in PANELS:
        found = points_of(version.curves, panel)
        cells.append(f"{number(found[0][1], 3)} → {number(found[-1][1], 3)}" if found else NONE)
    return {"id": version.id, "steps": version.curves.steps[-1], "stopped": version.stopped_early is not None, "cells": cells}
