"""The tree on the terminal and its record say the same."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

from rich.console import Console

from evo_hpc.report.lineage_view import lineage_lines, lineage_record, lineage_view
from evo_hpc.report.words import percent
from tests.report.sample_report import sample, with_hostile_texts


def drawn(report: object) -> str:
    console = Console(width=200, file=StringIO(), highlight=False, markup=False, color_system=None)
    console.print(lineage_view(report))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_tree_and_the_record_agree() -> None:
    report = sample()
    text, record = drawn(report), json.loads(json.dumps(lineage_record(report)))
    lines = {line.split("v0", 1)[1][:3]: line for line in text.splitlines() if "v0" in line}
    assert record["incumbent"] == "v0007" and len(record["versions"]) == len(lines) == 8
    for version in record["versions"]:
        line = lines[version["id"][2:]]
        assert version["verdict"] in line and percent(version["avg_at_k"]) in line and version["origin"] in line
        assert version["incumbent"] == ("★ incumbent" in line)


def test_children_stand_below_their_first_parent_and_merges_name_the_other() -> None:
    lines = lineage_lines(sample())
    assert [(line.id, line.depth) for line in lines] == [
        ("v0000", 0), ("v0001", 1), ("v0002", 2), ("v0007", 3), ("v0003", 2), ("v0004", 2), ("v0005", 2), ("v0006", 2)]
    assert lines[3].merge_with == ("v0004",) and lines[3].origin == "merge with v0004" and lines[3].promoted


def test_hostile_text_does_not_steer_the_terminal() -> None:
    text = drawn(with_hostile_texts(sample(), "[red]x[/red]\x1b[2J\u202e"))
    assert "\x1b" not in text and "\u202e" not in text and "[red]x[/red]" in text


def test_a_decision_by_a_person_is_marked() -> None:
    report = sample()
    kept = next(v for v in report.versions if v.decision is not None)
    overruled = replace(kept, decision=kept.decision.model_copy(update={"by": "person"}))
    shown = drawn(replace(report, versions=tuple(overruled if v is kept else v for v in report.versions)))
    assert f"{kept.verdict} by hand" in shown and f"{kept.verdict} by hand" not in drawn(report)
