"""An analyzer's folder is read whole or refused, with the file and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.assets import asset_dir
from evo_hpc.harness.manifest import BadAnalyzer, load_analyzer
from tests.harness.data import write_analyzer

FINDING = "parameters:\n  low: {value: 0.2, about: a floor}\nfindings:\n  - {id: poor, severity: warning, measure: score, below: low, says: Poor.}\n"


def test_an_analyzer_is_read(tmp_path: Path) -> None:
    found = load_analyzer(write_analyzer(tmp_path / "mine", more=FINDING))
    assert found.name == "mine" and found.finding_ids == ("mine.poor",) and not found.manifest.live
    assert found.manifest.threshold(found.manifest.findings[0]) == 0.2


@pytest.mark.parametrize("name", ["score", "signal", "length", "optimisation"])
def test_the_built_in_ones_are_read(name: str) -> None:
    found = load_analyzer(asset_dir("analyzers") / name)
    assert found.manifest.live == (name != "length") and found.manifest.findings


@pytest.mark.parametrize(("change", "line", "message"), [
    (("below: low", "below: loww"), 1, "threshold `loww`, which is no parameter; did you mean `low`"),
    (("below: low", "below: 0.1, above: 0.2"), 9, "exactly one of `above` and `below`"),
    (("below: low", "below: low, each: true"), 9, "with `each` needs `evidence`"),
    (("value: 0.2", "value: many"), 1, "a parameter that is not a number"),
    (("says: Poor.", "says: '{{ value | nosuch }}'"), 9, "says of finding `poor`: No filter named 'nosuch'"),
    (("says: Poor.", "says: Poor., evidence: {where: '{{ p.low'}"), 9, "evidence.where of finding `poor`"),
    (("severity: warning", "severity: dire"), 9, "severity"),
    (("layer: score", "layer: scores"), 2, "layer"),
    (("inputs: [steps]", "inputs: [steps, dev]"), 4, "inputs"),
    (("name: mine", "name: other"), 1, "`name` is 'other', the folder is 'mine'"),
    (("question:", "qestion:"), 3, "did you mean `question`"),
    (("id: poor", "id: mine.poor"), 9, "id"),
    (("name: mine", "name: [mine"), 2, "analyzer.yaml"),
])
def test_a_wrong_manifest_is_one_clear_error(tmp_path: Path, change: tuple[str, str], line: int, message: str) -> None:
    folder = write_analyzer(tmp_path / "mine", more="\n" * 1 + FINDING)
    text = (folder / "analyzer.yaml").read_text()
    assert change[0] in text
    (folder / "analyzer.yaml").write_text(text.replace(*change))
    with pytest.raises(BadAnalyzer) as caught:
        load_analyzer(folder)
    assert message in str(caught.value) and f"{folder / 'analyzer.yaml'}:{line}:" in str(caught.value), caught.value


@pytest.mark.parametrize(("name", "text", "line"), [
    ("query.sql.j2", "SELECT 1\nFROM steps {% if %}", 2), ("measures.sql.j2", "SELECT\n\n{{ p.x | bindd }}", 3), ("report.md.j2", "a\n{% for %}", 2),
])
def test_a_template_that_does_not_compile_is_named_with_its_line(tmp_path: Path, name: str, text: str, line: int) -> None:
    folder = write_analyzer(tmp_path / "mine")
    (folder / name).write_text(text)
    with pytest.raises(BadAnalyzer, match=f"{name}:{line}: "):
        load_analyzer(folder)


def test_what_is_missing_or_strange_is_named(tmp_path: Path) -> None:
    folder = write_analyzer(tmp_path / "mine")
    (folder / "README.md").touch()
    (folder / ".query.sql.j2.swp").touch()
    load_analyzer(folder)
    (folder / "notes.txt").touch()
    with pytest.raises(BadAnalyzer, match="notes.txt: not part of an analyzer"):
        load_analyzer(folder)
    (folder / "notes.txt").unlink()
    (folder / "analyze.py").touch()
    with pytest.raises(BadAnalyzer, match="analyze.py: analyzers in Python are not supported yet, as there is no sandbox"):
        load_analyzer(folder)
    (folder / "analyze.py").unlink()
    (folder / "inner").mkdir()
    with pytest.raises(BadAnalyzer, match="inner: an analyzer's folder holds files only"):
        load_analyzer(folder)
    (folder / "inner").rmdir()
    (folder / "measures.sql.j2").unlink()
    with pytest.raises(BadAnalyzer, match="missing measures.sql.j2"):
        load_analyzer(folder)


def test_reading_an_analyzer_runs_nothing_of_it(tmp_path: Path) -> None:
    # Jinja folds constants when it compiles; this one would take for ever.
    load_analyzer(write_analyzer(tmp_path / "mine", report="{{ 9 ** 9 ** 9 ** 9 }}{{ 'a' * 10 ** 12 }}"))
