"""The filesystem of a campaign: each promise kept, and each broken."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.store import mount
from evo_hpc.store.checks import CheckResult
from evo_hpc.store.mount import (
    Filesystem, check_clock, check_filesystem, check_link, check_listing, check_mount, check_rename, check_space, check_sync, check_umask,
    filesystem_of,
)
from evo_hpc.store.mount_peers import VISIBLE, PeerReport, judge, parse_reports, take_part

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:40 / /home rw,relatime - nfs4 server:/home rw,vers=4.2,acdirmax=30,hard
31 22 0:41 / /scratch rw - lustre mds@tcp:/scratch rw,flock
32 31 0:42 / /scratch/my\\040lab rw - nfs server:/lab rw,actimeo=0
33 22 0:43 / /tmp rw - ext4 /dev/old rw
34 22 0:44 / /tmp rw,nosuid - tmpfs tmpfs rw,size=1g
a line that is none
"""


def of(kind: str, *options: str, point: str = "/x") -> Filesystem:
    return Filesystem(kind, "source", point, ("rw", *options))


def test_a_sound_folder_has_nothing_but_ok_and_is_left_as_it_was(hostile_path: Path) -> None:
    found = check_mount(hostile_path)
    assert {each.check.removeprefix("mount: ") for each in found} == {"filesystem", "rename", "link", "fsync", "listing", "clock", "umask", "space"}
    assert [each for each in found if each.level != "ok"] == []
    assert list(hostile_path.iterdir()) == []


def test_a_folder_that_is_not_there() -> None:
    [result] = [each for each in check_mount(Path("/proc/no/such")) if each.check == "mount: write"]
    assert result.level == "error" and "/proc/no/such" in result.text


@pytest.mark.parametrize(("folder", "kind", "point"), [
    ("/opt/x", "ext4", "/"), ("/home/ada/campaigns", "nfs4", "/home"), ("/homes", "ext4", "/"), ("/scratch/my lab/c", "nfs", "/scratch/my lab"),
    ("/scratch/x", "lustre", "/scratch"), ("/tmp", "tmpfs", "/tmp"),
])
def test_the_mount_of_a_folder(folder: str, kind: str, point: str) -> None:
    seen = filesystem_of(Path(folder), MOUNTINFO)
    assert seen is not None and (seen.kind, seen.mount_point) == (kind, point)


def test_options_of_mount_and_filesystem_are_both_read() -> None:
    seen = filesystem_of(Path("/tmp"), MOUNTINFO)
    assert seen is not None and {"nosuid", "size=1g"} <= set(seen.options)
    real = filesystem_of(Path("/dev/shm"))
    assert real is not None and real.kind == "tmpfs"


@pytest.mark.parametrize(("filesystem", "many_machines", "level", "words"), [
    (of("ext4"), False, "ok", "ext4 at /x"), (of("ext4"), True, "warning", "usually one machine's own"), (of("lustre"), True, "ok", "lustre"),
    (of("fuse.glusterfs"), True, "ok", "gluster"), (of("tmpfs"), False, "ok", "tmpfs"), (of("tmpfs"), True, "warning", "seen by this machine alone"),
    (of("nfs4", "acdirmax=30"), True, "warning", "up to 30 s later"), (of("nfs"), False, "warning", "up to 60 s later"),
    (of("nfs4", "actimeo=3"), True, "warning", "up to 3 s later"), (of("nfs4", "noac"), True, "ok", "without caching"),
    (of("nfs", "lookupcache=none"), True, "ok", "without caching"), (of("exfat"), False, "error", "no hard links"),
    (of("fuse.s3fs"), False, "error", "no atomic rename"),
    (of("ext4", "ro"), False, "error", "read-only"), (None, False, "warning", "not known"),
])
def test_what_is_known_of_a_type(filesystem: Filesystem | None, many_machines: bool, level: str, words: str) -> None:
    [result] = check_filesystem(filesystem, many_machines)
    assert (result.level, words in result.text) == (level, True), result


def test_a_rename_that_is_not_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove_and_copy(source: Path, final: Path) -> None:
        final.unlink()
        time.sleep(0.002)
        shutil.copy(source, final)

    monkeypatch.setattr(os, "replace", remove_and_copy)
    result = check_rename(tmp_path)
    assert result.level == "error" and "not always there and whole" in result.text


def refuse(number: int) -> Callable[..., None]:
    def refusing(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refusing


def replacing_link(source: Path, final: Path) -> None:
    final.unlink(missing_ok=True)
    os.link(source, final)


@pytest.mark.parametrize(("link", "words"), [
    (refuse(errno.EPERM), "not supported"), (refuse(errno.EXDEV), "refused here"), (replacing_link, "two controllers could both commit"),
    (shutil.copy, "replaced the first"),
])
def test_links_that_are_no_exclusive_create(tmp_path: Path, link: Callable[[Path, Path], None], words: str) -> None:
    result = check_link(tmp_path, link)
    assert result.level == "error" and words in result.text


def only_folders(number: int) -> Callable[[int], None]:
    def sync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))

    return sync


def test_syncs_that_are_refused_or_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_sync(tmp_path, refuse(errno.EIO)).level == "error"
    folders = check_sync(tmp_path, only_folders(errno.EINVAL))
    assert folders.level == "warning" and "not of folders" in folders.text
    monkeypatch.setattr(mount, "SLOW_SYNC_SECONDS", 0.01)
    slow = check_sync(tmp_path, lambda descriptor: time.sleep(0.01))
    assert slow.level == "warning" and "for a small file" in slow.text


@pytest.mark.parametrize("listing", [lambda place: [], lambda place: ["listed"]], ids=["hides what is new", "shows what is gone"])
def test_a_listing_that_lags(tmp_path: Path, listing: Callable[[Path], list[str]]) -> None:
    assert check_listing(tmp_path, listing).level == "error"


@pytest.mark.parametrize(("shift", "level", "words"), [
    (0, "ok", "agree"), (4, "ok", "agree"), (30, "warning", "30 s behind"), (-30, "warning", "30 s ahead"), (-90, "error", "90 s ahead"),
])
def test_clocks(tmp_path: Path, shift: float, level: str, words: str) -> None:
    result = check_clock(tmp_path, lambda: time.time() + shift)
    assert (result.level, words in result.text) == (level, True), result


def test_a_mode_that_the_umask_did_not_ask_for(tmp_path: Path) -> None:
    result = check_umask(tmp_path, wanted=0o600)
    assert result.level == "warning" and "new files are 0600" in result.text


def test_little_space(tmp_path: Path) -> None:
    assert [each.level for each in check_space(tmp_path, little_bytes=0)] == ["ok"]
    assert [each.level for each in check_space(tmp_path, little_bytes=1 << 60)] == ["warning"]
    assert [each.level for each in check_space(tmp_path / "absent")] == ["error"]


def race(folder: Path, peers: int = 2, **options: Any) -> list[PeerReport]:
    """Peers as threads of this process."""
    reports: list[PeerReport] = []

    def run(number: int) -> None:
        reports.append(take_part(folder, number, peers, head_start=0.05, **options))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports


def levels(found: list[CheckResult]) -> dict[str, str]:
    return {each.check.removeprefix("nodes: "): each.level for each in found}


def test_each_name_is_won_by_one_of_three(tmp_path: Path) -> None:
    reports = race(tmp_path, 3, names=40)
    assert [each.error for each in reports] == [None] * 3
    assert sorted(name for each in reports for name in each.wins) == list(range(40))
    assert levels(judge(reports, 3, names=40)) == {"race": "ok", "visible": "ok", "clocks": "ok"}


def test_a_link_whose_answer_got_lost_is_a_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def lossy(source: Path, final: Path) -> None:
        real(source, final)
        raise FileExistsError(final)

    monkeypatch.setattr(os, "link", lossy)
    assert levels(judge(race(tmp_path, names=5), 2, names=5))["race"] == "ok"


def test_links_that_replace_are_caught_by_the_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", shutil.copy)
    found = judge(race(tmp_path, names=5), 2, names=5)
    assert levels(found)["race"] == "error" and "5 of 5 names" in found[0].text


def test_a_node_that_does_not_see_the_folder(tmp_path: Path) -> None:
    alone = take_part(tmp_path, 0, 2, patience=0.05)
    elsewhere = take_part(tmp_path / "absent", 1, 2, patience=0.05)
    assert alone.error is not None and "ready-1 of another node did not show up within 0 s" in alone.error
    found = judge([alone, elsewhere], 2)
    assert [(each.check, each.level) for each in found] == [(VISIBLE, "error")] * 2
    assert "not there" in found[1].text


@pytest.mark.parametrize(("reports", "check", "level", "words"), [
    ([PeerReport(0, "a", [0], [0.1], 0.0)], "visible", "error", "2 nodes were started, 1 reported"),
    ([PeerReport(0, "a", [], [0.1], 0.0), PeerReport(1, "b", [], [], 0.0)], "race", "error", "1 of 1 names that a, b"),
    ([PeerReport(0, "a", [0], [0.1, 7.0], 0.0), PeerReport(1, "b", [], [], 0.0)], "visible", "warning", "within 7.000 s"),
    ([PeerReport(0, "a", [0], [0.1], 0.0), PeerReport(1, "b", [], [], 20.0)], "clocks", "warning", "a and b are 20 s apart"),
    ([PeerReport(0, "a", [0], [0.1], -40.0), PeerReport(1, "b", [], [], 40.0)], "clocks", "error", "80 s apart"),
])
def test_what_reports_mean(reports: list[PeerReport], check: str, level: str, words: str) -> None:
    [result] = [each for each in judge(reports, 2, names=1) if each.check == f"nodes: {check}"]
    assert (result.level, words in result.text) == (level, True), result


def test_reports_among_a_nodes_own_talk() -> None:
    text = 'Welcome to n1!\n{"peer": 1, "node": "n1", "wins": [3]}\n[1, 2]\n{"other": 1}\n'
    assert parse_reports(text) == [PeerReport(1, "n1", [3])]
