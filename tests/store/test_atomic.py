"""Atomic files: whole or absent, write-once, honest about a full disk, and killed at every point without harm."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evo_hpc.paths import TEMP_PREFIX
from evo_hpc.store import atomic
from evo_hpc.store.atomic import AlreadyWritten, StoreError, append_line, read_json, sweep_temps, write_bytes, write_json, write_once


def test_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_hostile_folder_names(hostile_path: Path) -> None:
    write_once(hostile_path / "x", b"1")
    write_bytes(hostile_path / "y", b"2")
    assert (hostile_path / "x").read_bytes() + (hostile_path / "y").read_bytes() == b"12"


def test_write_once_refuses_other_content_and_accepts_its_own_again(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    write_once(path, b"mine")
    write_once(path, b"mine")
    with pytest.raises(AlreadyWritten, match="claim.json"):
        write_once(path, b"theirs")
    assert path.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [path]


def test_write_once_has_one_winner_among_racing_processes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from evo_hpc.store.atomic import *\n"
        "try: write_once(Path(sys.argv[1]), sys.argv[2].encode())\n"
        "except AlreadyWritten: sys.exit(3)"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "f"), str(i)]) for i in range(6)]
    codes = [racer.wait() for racer in racers]
    assert sorted(codes) == [0, 3, 3, 3, 3, 3]
    assert (tmp_path / "f").read_text() == str(codes.index(0))


def test_the_umask_is_honoured(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "open", b"")
        write_bytes(tmp_path / "closed", b"", mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_keeps_the_old_content_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, call, full)
    with pytest.raises(StoreError, match="no space left.*nothing that was committed is lost"):
        write_bytes(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_really_full_filesystem(mounted_disk: Callable[[str], Path]) -> None:
    path = mounted_disk("64k") / "file"
    write_bytes(path, b"old")
    with pytest.raises(StoreError, match="no space left"):
        write_bytes(path, bytes(200_000))
    assert path.read_bytes() == b"old"


def test_damaged_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"a": 1,\n "b": }')
    with pytest.raises(StoreError, match=r"bad\.json:2: not valid JSON"):
        read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StoreError, match="not UTF-8"):
        read_json(path)


def test_the_journal_survives_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "tor')
    append_line(path, {"n": 3})
    assert path.read_text().splitlines() == ['{"n": 1}', '{"n": 2, "tor', '{"n": 3}']


def test_sweep_takes_the_leftovers_of_the_dead_only(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    mine = atomic.temp_path(tmp_path / "file")
    mine.write_text("in use")
    theirs = tmp_path / mine.name.replace(f".{os.getpid()}.", f".{dead.pid}.")
    theirs.write_text("left behind")
    other_host = tmp_path / f"{TEMP_PREFIX}file.elsewhere.1.abcd"
    other_host.write_text("fresh, of a host that cannot be asked")
    assert sweep_temps(tmp_path) == [theirs]
    assert mine.exists() and other_host.exists()
