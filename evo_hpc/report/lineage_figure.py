"""The tree of versions as a picture: cards with score and verdict, changes in words on the edges, merges with both parents."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from markupsafe import Markup

from evo_hpc.report.layout import Place, place
from evo_hpc.report.model import CampaignReport, VersionReport
from evo_hpc.report.svg import coordinate, element, mark, picture, standing_class, text
from evo_hpc.report.words import change_words, count, percent, points

CARD_WIDTH, CARD_HEIGHT = 152.0, 54.0
ROW, MARGIN, TOP = 76.0, 12.0, 22.0
LETTER, MOST_LETTERS = 6.9, 30
"""Width of a letter on an edge, and how many fit at most."""
LANE = 6.0
"""Distance of two tracks that edges turn in."""
Corners = Mapping[str, tuple[float, float]]


def corners(report: CampaignReport, cells: Mapping[str, Place]) -> dict[str, tuple[float, float]]:
    """Upper left corner of each version's card; the gap before a column is as wide as the longest words on its edges."""
    columns = 1 + max((cell.column for cell in cells.values()), default=0)
    lanes = max((cell.lane for cell in cells.values()), default=0)
    gaps = [0.0] + [
        46 + LANE * lanes + LETTER * max(_letters(edge_words(v)) for v in report.versions if cells[v.id].column == column) for column in range(1, columns)
    ]
    starts = [MARGIN + sum(gaps[: column + 1]) + column * CARD_WIDTH for column in range(columns)]
    return {name: (starts[cell.column], TOP + cell.row * ROW) for name, cell in cells.items()}


def lineage_figure(report: CampaignReport) -> Markup:
    """The picture, as wide and high as its tree needs."""
    cells = place({v.id: v.parents for v in report.versions}, report.incumbent)
    placed = corners(report, cells)
    width = MARGIN + CARD_WIDTH + max((x for x, _ in placed.values()), default=0.0)
    height = ROW + max((y for _, y in placed.values()), default=0.0)
    told = "; ".join(
        f"{v.id}, {v.verdict}" + (f", from {' and '.join(v.parents)}" if v.parents else "")
        + (f", {percent(v.score.avg_at_k)} on dev" if v.score else "")
        for v in report.versions
    )
    parts = [_edges(version, placed, cells[version.id].lane) for version in report.versions]
    parts += [_card(version, placed, report.incumbent) for version in report.versions]
    return picture("lineage", width, height, f"The tree of {count(len(report.versions), 'version')}", told, parts, "lineage")


def edge_words(version: VersionReport) -> str:
    """What stands on the edge to a version: fields by their last part where the whole is too long, cut where that is too."""
    words = version.origin
    if _letters(words) > MOST_LETTERS and len(version.parents) == 1:
        words = change_words(version.first_changes, short=True)
    return shortened(words, MOST_LETTERS)


def shortened(words: str, width: int) -> str:
    """Cut to `width` letters, where wide ones count twice."""
    if _letters(words) <= width:
        return words
    words = words[:width]
    while _letters(words) > width - 1:
        words = words[:-1]
    return words.rstrip() + "…"


def _letters(words: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in words)


def _card(version: VersionReport, placed: Corners, incumbent: str | None) -> Markup:
    x, y = placed[version.id]
    score = version.score
    parts = [
        element("title", f"{version.id}: {version.verdict}. {version.version.hypothesis}"),
        element("rect", x=x, y=y, width=CARD_WIDTH, height=CARD_HEIGHT, rx=8.0, class_="card"),
        mark(version.standing, x + 17, y + 18), text(x + 32, y + 23, version.id, "id"),
        text(x + CARD_WIDTH - 10, y + 23, percent(score.avg_at_k) if score else "no score", "score" if score else "none", "end"),
        text(x + 32, y + 43, shortened(version.verdict, 16), "verdict"),
    ]
    if version.over_base is not None and version.parents:
        parts.append(text(x + CARD_WIDTH - 10, y + 43, points(version.over_base.difference), "delta", "end"))
    if version.id == incumbent:
        parts.append(text(x + 2, y - 6, "★ incumbent", "incumbent"))
    class_ = f"node {standing_class(version.standing)}{' the-incumbent' if version.id == incumbent else ''}"
    return element("g", Markup("").join(parts), class_=class_)


def _edges(version: VersionReport, placed: Corners, lane: int) -> Markup:
    if not version.parents:
        return Markup("")
    here = placed[version.id]
    first, *others = version.parents
    told = "; ".join(f"against {parent}: {change_words(found, len(found)) or 'no change'}" for parent, found in version.changes.items())
    parts = [element("title", f"{version.id} {told}"), element("path", d=_elbow(placed[first], here, lane), class_="edge")]
    parts += [element("path", d=_around(placed[other], here, index), class_="edge merge") for index, other in enumerate(others)]
    parts.append(text(here[0] - 14, here[1] + CARD_HEIGHT / 2 - 7, edge_words(version), "change", "end"))
    return element("g", Markup("").join(parts))


def _elbow(parent: tuple[float, float], child: tuple[float, float], lane: int) -> str:
    """Right out of the parent, down beside it, and straight into the child."""
    start, end, top, bottom = parent[0] + CARD_WIDTH, child[0], parent[1] + CARD_HEIGHT / 2, child[1] + CARD_HEIGHT / 2
    if top == bottom:
        return _d("M", start, top, "H", end)
    turn, bend = start + 9 + LANE * lane, 8
    return _d("M", start, top, "Q", turn, top, turn, top + bend, "V", bottom - bend, "Q", turn, bottom, turn + bend, bottom, "H", end)


def _around(parent: tuple[float, float], child: tuple[float, float], index: int) -> str:
    """Through the free channel between two rows, so that no card is crossed, and into the child from the side it comes from."""
    (px, py), (cx, cy) = parent, child
    sign = 1 if cy > py else -1
    out = py + (CARD_HEIGHT if sign > 0 else 0)
    channel, end = out + sign * (9 + 4 * index), cy + CARD_HEIGHT / 2 - 14 * sign
    start, turn = px + CARD_WIDTH - 18, cx - 9 - 4 * index
    return _d("M", start, out, "Q", start, channel, start + 8, channel, "H", turn - 8, "Q", turn, channel, turn, channel + 8 * sign,
              "V", end - 6 * sign, "Q", turn, end, cx, end)


def _d(*parts: str | float) -> str:
    return " ".join(part if isinstance(part, str) else coordinate(part) for part in parts)
