"""The tree of versions on the terminal, and the same as plain records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text
from rich.tree import Tree

from evo_hpc.report.model import CampaignReport, VersionReport
from evo_hpc.report.words import one_line, percent, points

STYLE = {"base": "", "kept": "green", "pruned": "dim", "reverted": "red", "stopped early": "yellow", "open": "cyan"}
SIGN = {"base": "□", "kept": "●", "pruned": "×", "reverted": "▼", "stopped early": "■", "open": "○"}


@dataclass(frozen=True)
class LineageLine:
    """One version of the tree, in the order of a walk from the roots."""

    id: str
    depth: int
    """Below the first parent; a merge names its others."""
    parents: tuple[str, ...]
    merge_with: tuple[str, ...]
    standing: str
    verdict: str
    promoted: bool
    incumbent: bool
    avg_at_k: float | None
    """On dev."""
    over_base: float | None
    origin: str
    """What it changes against the first parent, or what it merges, in a few words."""
    hypothesis: str


def lineage_lines(report: CampaignReport) -> list[LineageLine]:
    """The tree, parents before their children, siblings in the order of their ids."""
    lines: list[LineageLine] = []

    def walk(version: VersionReport, depth: int) -> None:
        lines.append(_line(version, depth, report))
        for child in report.versions:
            if child.parents and child.parents[0] == version.id:
                walk(child, depth + 1)

    for root in report.versions:
        if not root.parents:
            walk(root, 0)
    return lines


def _line(version: VersionReport, depth: int, report: CampaignReport) -> LineageLine:
    return LineageLine(
        id=version.id, depth=depth, parents=tuple(version.parents), merge_with=tuple(version.parents[1:]), standing=version.standing,
        verdict=version.verdict, promoted=version.decision is not None and version.decision.promoted, incumbent=version.id == report.incumbent,
        avg_at_k=version.score.avg_at_k if version.score else None,
        over_base=version.over_base.difference if version.over_base and version.parents else None,
        origin=version.origin, hypothesis=version.version.hypothesis,
    )


def lineage_record(report: CampaignReport) -> dict[str, Any]:
    """For --json."""
    return {"campaign": report.name, "incumbent": report.incumbent, "versions": [asdict(line) for line in lineage_lines(report)]}


def lineage_view(report: CampaignReport) -> Tree:
    """For the terminal."""
    tree = Tree(Text(one_line(report.name), "bold"), guide_style="dim")
    branches = [tree]
    for line in lineage_lines(report):
        del branches[line.depth + 1 :]
        branches.append(branches[line.depth].add(_shown(line)))
    return tree


def _shown(line: LineageLine) -> Text:
    style = STYLE[line.standing]
    text = Text.assemble((f"{SIGN[line.standing]} ", style), (line.id, "bold"), f"  {percent(line.avg_at_k):>7}  ", (one_line(line.verdict), style))
    if line.over_base is not None:
        text.append(f"  {points(line.over_base)} over the base", "dim")
    if line.origin:
        text.append(f"  {line.origin}", "magenta" if line.merge_with else "")
    if line.incumbent:
        text.append("  ★ incumbent", "bold green")
    return text
