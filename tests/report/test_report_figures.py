"""The pictures: no two cards in one place, axes that hold their data, lines that keep their spikes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.lineage.version import Version
from evo_hpc.report.curves_figure import Panel, points_of, smoothed, thinned, window_of
from evo_hpc.report.layout import place
from evo_hpc.report.lineage_figure import CARD_HEIGHT, CARD_WIDTH, corners, edge_words, lineage_figure, shortened
from evo_hpc.report.model import CampaignReport, Curves, VersionReport
from evo_hpc.report.score_figure import score_figure
from evo_hpc.report.svg import Axis, axis_over, coordinate, element, tick_label
from tests.report.sample_report import sample


@st.composite
def trees(draw: st.DrawFn, most: int = 40) -> dict[str, list[str]]:
    """Up to 40 versions, some of them merges of two."""
    names: dict[str, list[str]] = {"v0000": []}
    for index in range(1, draw(st.integers(1, most))):
        known = list(names)
        parents = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
        names[f"v{index:04d}"] = parents
    return names


def report_of(tree: dict[str, list[str]]) -> CampaignReport:
    versions = tuple(
        VersionReport(version=Version(id=name, parents=parents), recipe_steps=1, seed=0, init="base", stage="waiting",
                      changes={p: () for p in parents})
        for name, parents in tree.items()
    )
    return replace(sample(), versions=versions)


@given(trees())
def test_no_two_cards_touch_and_no_edge_to_a_first_parent_runs_through_one(tree: dict[str, list[str]]) -> None:
    cells = place(tree)
    placed = corners(report_of(tree), cells)
    names = list(tree)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            (ax, ay), (bx, by) = placed[a], placed[b]
            assert abs(ax - bx) >= CARD_WIDTH + 20 or abs(ay - by) >= CARD_HEIGHT + 10, (a, b)
    for name, parents in tree.items():
        assert all(cells[parent].column < cells[name].column for parent in parents)
        if parents:
            between = [n for n in names if cells[n].row == cells[name].row and cells[parents[0]].column < cells[n].column < cells[name].column]
            assert not between, "the horizontal part of its edge would cross these"


def test_lines_share_rows_where_there_is_room() -> None:
    """Four versions kept in a row, two siblings pruned beside each: three rows, not nine."""
    tree: dict[str, list[str]] = {"v0000": []}
    for index in range(12):
        tree[f"v{index + 1:04d}"] = [f"v{3 * (index // 3):04d}"]
    cells = place(tree, "v0012")
    assert 1 + max(cell.row for cell in cells.values()) == 3 and {cells[f"v{i:04d}"].row for i in (0, 3, 6, 9, 12)} == {0}


def test_edges_of_two_parents_never_turn_in_one_track() -> None:
    cells = place({"a": [], "b": ["a"], "c": ["a"], "d": ["b"], "e": ["b"], "f": ["b"], "g": ["c"], "h": ["c"], "i": ["g"], "j": ["d"], "k": ["d"]})
    parents = {"b": "a", "c": "a", "d": "b", "e": "b", "f": "b", "g": "c", "h": "c", "i": "g", "j": "d", "k": "d"}
    for one, first in parents.items():
        for other, second in parents.items():
            same = first != second and cells[first].column == cells[second].column and cells[one].lane == cells[other].lane
            turned = cells[one].row > cells[first].row and cells[other].row > cells[second].row
            if same and turned:
                assert cells[one].row < cells[second].row or cells[other].row < cells[first].row, (one, other)


@given(trees(), st.data())
def test_the_main_line_runs_straight(tree: dict[str, list[str]], data: st.DataObject) -> None:
    main = data.draw(st.sampled_from(list(tree)))
    cells = place(tree, main)
    rows, name = set(), main
    while True:
        rows.add(cells[name].row)
        if not tree[name]:
            break
        name = tree[name][0]
    assert rows == {0}


def test_the_tree_shows_scores_verdicts_changes_and_merges() -> None:
    picture = str(lineage_figure(sample()))
    for text in ("v0007", "86.1\u00a0%", "stopped early", "reverted", "optimizer.lr 5e-05 → 2e-04", "merge with v0004", "★ incumbent"):
        assert text in picture, text
    assert picture.count('class="edge merge"') == 1 and picture.count("the-incumbent") == 1
    assert edge_words(sample()["v0005"]) == "…digits none → [4]"


@pytest.mark.parametrize("words, width, expected", [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("漢字漢字", 6, "漢字…"), ("", 3, "")])
def test_words_are_cut_by_their_width(words: str, width: int, expected: str) -> None:
    assert shortened(words, width) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_an_axis_holds_its_values_and_its_ticks(values: list[float]) -> None:
    axis = axis_over(values, 0, 100)
    assert all(-1e-6 <= axis(value) <= 100 + 1e-6 for value in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 11 and all(axis.low <= tick <= axis.high for tick in ticks)


def test_ticks_are_round_numbers() -> None:
    assert Axis(31.2, 88.9, 0, 1).ticks(5) == [40, 60, 80]
    assert Axis(1e-4, 1.0, 0, 1, log=True).ticks(4) == [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert [tick_label(v, 0.05) for v in (-0.05, 0.0, 0.1)] == ["−0.05", "0.00", "0.10"] and tick_label(2e-4, 1e-4) == "2e-4"


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=900))
def test_a_thinned_line_keeps_its_extremes_and_its_end(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned(points, 100)
    assert len(kept) <= 103 and kept == sorted(kept) and kept[-1] == points[-1]
    assert {min(values), max(values)} <= {value for _, value in kept}
    smooth = smoothed(points, window_of(points))
    assert len(smooth) == len(points) and min(values) - 1e-9 <= min(v for _, v in smooth) <= max(v for _, v in smooth) <= max(values) + 1e-9


def test_a_panel_adds_its_columns_and_leaves_out_steps_without_a_value() -> None:
    curves = Curves((1, 2, 3), {"clip_fraction_low": (0.1, None, 0.2), "clip_fraction_high": (0.2, 0.1, 0.0)})
    both = Panel("clip", "Clip fraction", ("clip_fraction_low", "clip_fraction_high"))
    assert points_of(curves, both) == [(1, pytest.approx(0.3)), (3, pytest.approx(0.2))]
    assert points_of(curves, Panel("kl", "KL", ("kl",))) == []


def test_the_score_picture_has_every_scored_version_and_the_incumbents_line() -> None:
    picture = str(score_figure(sample()))
    assert len(re.findall(r'class="row ', picture)) == 7 and ">incumbent</text>" in picture and "[83.4, 88.7]" in picture


def test_text_and_attributes_are_escaped() -> None:
    drawn = str(element("text", "<a & 'b'>", x=1.0, class_='"><script>'))
    assert drawn == '<text x="1" class="&#34;&gt;&lt;script&gt;">&lt;a &amp; &#39;b&#39;&gt;</text>'
    assert [coordinate(v) for v in (-0.04, 1.0, 2.25, -3.96)] == ["0", "1", "2.2", "-4"]
