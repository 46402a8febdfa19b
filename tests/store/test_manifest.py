"""Completion records and folders that appear at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.paths import COMPLETE
from evo_hpc.store.manifest import Torn, complete, publish_folder, quarantine, read_complete


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    (path / "sub").mkdir(parents=True)
    (path / "a").write_text("alpha")
    (path / "sub" / "b").write_text("beta")
    complete(path, {"n": 2})
    return path


def test_round_trip(folder: Path) -> None:
    record = read_complete(folder, hashes=True)
    assert record["meta"] == {"n": 2}
    assert [f["name"] for f in record["files"]] == ["a", "sub/b"]


@pytest.mark.parametrize("damage, message", [
    (lambda f: (f / "a").unlink(), "a: listed in COMPLETE.json but missing"),
    (lambda f: (f / "a").write_text("alp"), "3 bytes, COMPLETE.json says 5"),
    (lambda f: (f / COMPLETE).unlink(), "the write never finished"),
    (lambda f: (f / COMPLETE).write_text("{}"), "not a completion record"),
    (lambda f: (f / "sub" / "b").write_text("BETA"), "content differs from the hash"),
])
def test_damage_is_named(folder: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    damage(folder)
    with pytest.raises(Torn, match=message.replace(".", r"\.")):
        read_complete(folder, hashes=True)


def test_publishing_twice_is_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("x")
    first = publish_folder(tmp_path / "out", {"deep/x": source}, {"try": 1})
    again = publish_folder(tmp_path / "out", {"deep/x": source}, {"try": 2})
    assert first == again
    assert (tmp_path / "out" / "deep" / "x").samefile(source)


def test_a_torn_folder_is_set_aside_and_replaced(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text("x")
    out.mkdir()
    (out / "half").write_text("written")
    publish_folder(out, {"x": source}, {})
    assert read_complete(out)["files"][0]["name"] == "x"
    assert (tmp_path / "out.quarantined-0" / "half").read_text() == "written"


def test_a_missing_source_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="out"):
        publish_folder(tmp_path / "out", {"x": tmp_path / "absent"}, {})
    assert list(tmp_path.iterdir()) == []


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / "f").write_text(str(number))
        quarantine(tmp_path / "f")
    assert [(tmp_path / f"f.quarantined-{n}").read_text() for n in range(2)] == ["0", "1"]
