"""The two reports: the same numbers, nothing from elsewhere, hostile text disarmed, the same bytes each time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from evo_hpc.report.html import render_html
from evo_hpc.report.markdown import markdown_code, markdown_text, render_markdown
from evo_hpc.report.model import CampaignReport, build
from evo_hpc.report.summary import cautions, summary
from evo_hpc.report.words import alpha, field_value, number, percent, percent_interval, points, points_interval, shell_word, signed
from tests.report.sample_report import SCORES, sample, version, with_hostile_texts

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y> {{ 7*7 }} | `a` [x](http://evil) \x1b[31m \u202e \ud800 </style></svg> **b**\n# h"
VOID = {"meta", "br", "img", "link", "hr", "input"}


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(sample())


@pytest.fixture(scope="module")
def markdown() -> str:
    return render_markdown(sample())


class Page(HTMLParser):
    """Tags, attributes, and whether each element is closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"
        if tag in ("td", "th", "li", "dd", "dt", "p", "text", "summary", "title", "h2", "h3"):
            self.text.append(" ")

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def words_of(html: str) -> str:
    """The text that the page shows."""
    return re.sub(r"[ \n]+", " ", "".join(Page(html).text))


def test_the_numbers_are_those_of_the_record(html: str, markdown: str) -> None:
    report = sample()
    shown = words_of(html)
    for v in report.versions:
        found = [v.id, v.verdict]
        if v.score:
            found += [percent(v.score.avg_at_k), percent_interval(v.score.ci_low, v.score.ci_high)]
        for c in v.comparisons:
            seen = c.at_look_alpha
            found += [points(seen.difference), points_interval(seen.ci_low, seen.ci_high), alpha(c.look.alpha)]
        found += [text for f in v.findings for text in (f.id, number(f.value))]
        for change in v.first_changes:
            found += [change.field, field_value(change.after)]
        for text in found:
            assert text in shown and text in markdown, (v.id, text)
    assert report.best and report.best.id == "v0007" and report.best.over_base
    assert points(report.best.over_base.difference) == "+49.2"
    for sentence in (*summary(report), *cautions(report)):
        assert sentence in shown, sentence
        assert markdown_text(sentence) in markdown, sentence


def test_both_show_the_same_numbers(html: str, markdown: str) -> None:
    """Every table of scores, looks and findings has the same cells in both."""
    numbers = re.compile(r"[+−-]?\d+\.\d+(?:e-\d+)?")
    text = words_of(html)
    curves = markdown[markdown.index("## Training") : markdown.index("## Decisions")]
    missing = set(numbers.findall(markdown.replace(curves, ""))) - set(numbers.findall(text))
    assert not missing, "in Markdown and not in HTML"
    start, end = text.index("Scores"), text.index("Reproduce evo-hpc")
    pictured = {n for svg in re.findall(r"<svg.*?</svg>", html, re.S) for n in numbers.findall(svg)}
    missing = set(numbers.findall(text[start:end])) - set(numbers.findall(markdown)) - pictured
    assert not missing, "in HTML and not in Markdown"


def test_what_the_summary_says() -> None:
    told = " ".join(summary(sample()))
    for words in (
        "v0007 is the best version", "from 36.9\u00a0% to 86.1\u00a0%, +49.2 points, 95 % interval [", "n = 160 tasks × 8", "leans high",
        "The final claim: v0007 scores higher than v0000 on 256 sealed tasks, +47.6 points", "had been read 1 time before, by demo-last-week",
        "7 versions tried: 4 kept, 1 pruned, 1 reverted, 1 stopped early.", "11 min of job time",
    ):
        assert words in told, words
    assert "There is no final claim" in " ".join(summary(sample(sealed=False)))
    assert any("not a claim about the intervention" in caution for caution in cautions(sample()))


def test_nothing_comes_from_elsewhere(html: str) -> None:
    page = Page(html)
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "src", (tag, name)
            if "href" in name:
                assert value and value.startswith("#"), (tag, value)
    for pattern in ("@import", r"url\(", "javascript:"):
        assert not re.search(pattern, html), pattern
    assert "default-src 'none'" in html


def test_ids_are_unique_and_every_link_and_label_has_its_target(html: str) -> None:
    tags = Page(html).tags
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in tags:
        targets = [(attributes.get("href") or "").removeprefix("#")] if "href" in attributes else (attributes.get("aria-labelledby") or "").split()
        assert set(targets) <= set(ids), targets
    pictures = [a for tag, a in tags if tag == "svg"]
    assert pictures and all(a.get("role") == "img" and a.get("aria-labelledby") or a.get("aria-hidden") == "true" for a in pictures)


def test_pictures_are_well_formed(html: str) -> None:
    found = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(found) > 12
    for svg in found:
        ElementTree.fromstring(svg)
        assert "nan" not in svg.lower().replace("nant", "") and "inf" not in svg.lower().replace("info", "")


@pytest.mark.parametrize("hostile", [HOSTILE, "x" * 4000, ""])
def test_hostile_text_is_shown_as_it_is(hostile: str) -> None:
    report = with_hostile_texts(sample(), hostile)
    html, markdown = render_html(report), render_markdown(report)
    tags = [tag for tag, _ in Page(html).tags]
    assert tags.count("script") == tags.count("img") == 0 and tags.count("style") == 1
    for text in (html, markdown):
        text.encode()
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", text) and "49" not in text.split("{{")[-1][:3]
    plain = re.sub(r"^```$.*?^```$|`[^`\n]*`", "", markdown, flags=re.S | re.M)
    if hostile == HOSTILE:
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and r"\x1b[31m" in html and "{{ 7*7 }}" in html
        assert "<" not in plain, "no HTML outside code"
        assert "\n# h" not in markdown and not re.search(r"(?<!\\)\]\(http", plain)
    sizes = {line.count("|") - line.count(r"\|") for line in markdown.splitlines() if line.startswith("| v000")}
    assert sizes == {6, 8, 12} or hostile, "rows keep their cells"


def test_markdown_tables_keep_their_columns() -> None:
    markdown = render_markdown(with_hostile_texts(sample(), HOSTILE))
    width = 0
    for line in markdown.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, line
        width = cells


def test_text_and_code_cannot_leave_their_place() -> None:
    assert markdown_text("a_b *c* <d> |e| [f](g) https://h www.i") == r"a\_b \*c\* &lt;d&gt; \|e\| [f\](g) https:\//h www\.i"
    assert markdown_code("a`b|c\nd") == "`aˋb¦c d`"


def test_the_same_record_gives_the_same_bytes(html: str, markdown: str) -> None:
    report = sample()
    shuffled = build(
        name=report.name, description=report.description, folder=report.folder, domain=report.domain, seed=report.seed, alpha=report.alpha,
        versions=report.versions[::-1], looks=report.looks[::-1], rounds=report.rounds[::-1], sealed=report.sealed[::-1], tasks=report.tasks,
        epochs=dict(reversed(report.epochs.items())), software=report.software, other_seconds=report.other_seconds,
        times=[t for t in (report.data_at, report.started_at) if t],
    )
    assert shuffled == report
    assert render_html(shuffled) == html and render_markdown(shuffled) == markdown


def empty(**pieces: object) -> CampaignReport:
    return build(name="new", folder="new", domain="arithmetic", seed=0, alpha=0.05, **{"versions": [], **pieces})  # type: ignore[arg-type]


def test_an_unfinished_campaign_says_what_is_missing() -> None:
    html, markdown = render_html(empty()), render_markdown(empty())
    for words in (
        "Nothing has been scored yet.", "There is no version yet.", "No training step has been written yet.", "No version has been tried yet.",
        "No analyzer has looked at any version yet.", "The agent has not been asked yet.", "The gate has not looked at dev yet.",
        "Nobody has read them.",
    ):
        assert words in words_of(html) and words in markdown, words
    base = replace(version("v0000"), scores={}, stage="evaluating")
    child = replace(version("v0001"), scores={}, over_base=None, comparisons=(), decision=None, analyses=(), stage="training")
    text = words_of(render_html(empty(versions=[base, child])))
    for words in (
        "not decided yet, training: v0001", "not decided yet, evaluating: v0000", "none yet (training)", "not checked yet",
        "No version has been scored on dev yet.",
    ):
        assert words in text, words
    alone = words_of(render_html(empty(versions=[version("v0000"), child])))
    assert "The base policy, v0000, scores 36.9\u00a0%" in alone and "No other version has been scored yet." in alone
    undecided = empty(versions=[replace(version(name), decision=None) for name in SCORES])
    assert "v0007 has the highest score so far (nothing has been decided yet)" in " ".join(summary(undecided))
    assert undecided.incumbent == "v0000"


def test_numbers_read_well() -> None:
    assert [signed(v) for v in (3.14, -0.04, 0.0, 0.04)] == ["+3.1", "−0.0", "0.0", "+0.0"]
    values = (None, 0.0, 1280.0, 2e-4, 0.0123456, -5e-5, 61.25, float("nan"))
    assert [number(v) for v in values] == ["–", "0", "1,280", "2e-04", "0.01235", "−5e-05", "61.25", "–"]
    assert [field_value(v) for v in (None, True, 5e-05, 0.28, 16, [3, 4], "group_norm", -1e-5, 4096)] == [
        "none", "true", "5e-05", "0.28", "16", "[3, 4]", "group_norm", "-1e-05", "4096"]
    assert [shell_word(v) for v in ("demo", "a b", "a'b\n```")] == ["demo", "'a b'", r"$'a\x27b\x0a```'"]
    assert [alpha(v) for v in (0.030396, 8.4e-4, 1e-7)] == ["0.03040", "0.00084", "1.0e-07"]
