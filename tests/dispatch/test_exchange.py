"""The exchange folder: nobody else's, fresh, where there is room, and swept of what the dead left; real folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch import exchange as exchange_module
from evo_hpc.dispatch.exchange import UnsafeExchange, make_exchange
from evo_hpc.errors import UserError
from evo_hpc.paths import IncarnationPaths, JobPaths

NAME = "evo-c-v0001-train-000"


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(exchange_module, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def incarnation(campaign: Path, number: int = 0, attempt: int = 0) -> IncarnationPaths:
    inc = JobPaths(campaign / "versions/v0001/jobs" / f"train-{attempt:03d}").incarnation(number)
    inc.root.mkdir(parents=True, exist_ok=True)
    return inc


def make(inc: IncarnationPaths, folder: Path | None = None, need_bytes: int = 1) -> Path:
    return make_exchange(Cluster(exchange=None if folder is None else str(folder)), NAME, inc, need_bytes=need_bytes).root


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def user_folder(base: Path) -> Path:
    return base / f"evo_hpc-{os.getuid()}"


@pytest.mark.parametrize("named", [False, True])
def test_every_level_is_closed_to_others(tmp_path: Path, shared_memory: Path, open_umask: None, named: bool) -> None:
    base = tmp_path / "fast" if named else shared_memory
    if named:
        base.mkdir(mode=0o755)
    user_folder(base).mkdir(mode=0o777)  # ours, made by somebody careless
    root = make(incarnation(tmp_path / "campaign"), base if named else None)
    assert root.parent == user_folder(base)
    assert {mode(path) for path in (root.parent, root, *root.iterdir())} == {0o700} and len(list(root.iterdir())) == 5


def test_the_job_folder_is_taken_when_shared_memory_is_too_small(tmp_path: Path, open_umask: None) -> None:
    inc = incarnation(tmp_path / "campaign")
    root = make(inc, need_bytes=1 << 60)
    assert root == inc.exchange and mode(root) == 0o700


@pytest.mark.parametrize("named", [False, True])
def test_a_link_in_the_way_is_refused_and_not_followed(tmp_path: Path, shared_memory: Path, named: bool) -> None:
    inc, base = incarnation(tmp_path / "campaign"), tmp_path / "fast" if named else shared_memory
    root = make(inc, base if named else None)
    elsewhere = tmp_path / "elsewhere"
    root.parent.rename(elsewhere)
    root.parent.symlink_to(elsewhere)
    with pytest.raises(UnsafeExchange, match=rf"{root.parent}: is a link or a file"):
        make(inc, base if named else None)
    assert (elsewhere / root.name / "policy").is_dir(), "a sweep through the link would have removed it"


def test_another_users_folder_is_refused(tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    (shared_memory / f"evo_hpc-{me + 1}").mkdir(mode=0o700)
    with pytest.raises(UnsafeExchange, match=rf"evo_hpc-{me + 1}: belongs to user {me}, not to you .*set `exchange`"):
        make(incarnation(tmp_path / "campaign"))


def test_a_base_where_others_can_replace_folders_is_refused(tmp_path: Path, shared_memory: Path) -> None:
    base = tmp_path / "fast"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(UnsafeExchange, match=rf"{base}: .*chmod \+t"):
        make(incarnation(tmp_path / "campaign"), base)
    shared_memory.chmod(0o777)
    inc = incarnation(tmp_path / "campaign")
    assert make(inc) == inc.exchange


def test_a_named_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be the exchange folder"):
        make(incarnation(tmp_path / "campaign"), tmp_path / "file" / "fast")


@pytest.mark.parametrize("named", [False, True])
def test_what_dead_incarnations_left_is_swept_and_nothing_else(tmp_path: Path, named: bool) -> None:
    base, campaign = tmp_path / "fast" if named else None, tmp_path / "campaign"
    first, small = make(incarnation(campaign, 0), base), make(incarnation(campaign, 1), None, need_bytes=1 << 60)
    newer = make(incarnation(campaign, 3), base)
    assert not first.exists() and not small.exists()
    first.mkdir()
    other = make(incarnation(tmp_path / "other", 0), base)
    make(incarnation(campaign, 2), base)
    assert not first.exists() and newer.exists() and other.exists()
    make(incarnation(campaign, 0, attempt=1), base)
    assert not newer.exists() and other.exists(), "an earlier attempt at the same work is over"


def test_a_leftover_of_this_very_incarnation_is_not_taken_for_fresh(tmp_path: Path) -> None:
    inc = incarnation(tmp_path / "campaign")
    (make(inc) / "requests" / "stale.json").write_text("")
    assert not list((make(inc) / "requests").iterdir())


def test_a_copied_campaign_leaves_the_originals_exchange_alone(tmp_path: Path) -> None:
    original = make(incarnation(tmp_path / "campaign"))
    copy = make(incarnation(tmp_path / "campaign copy"))
    assert original.exists() and copy != original and NAME in original.name and NAME in copy.name
