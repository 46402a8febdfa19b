"""The `cluster` fixture: one cluster a pytest process, which no other process uses, and which the next one sweeps when this one dies."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evo_hpc.errors import UserError
from tests.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of this pytest process alone, with accounting; gone at the end."""
    with private_cluster(clusters_folder()) as private:
        private.up()
        yield private


def clusters_folder() -> Path:
    """Where pytest processes of this user keep their clusters; nobody else can look in, or have made it."""
    folder = Path(tempfile.gettempdir()) / f"evo-test-clusters-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder}: must be a folder of yours with mode 0700; remove it, or set TMPDIR to a folder of yours")
    return folder


@contextmanager
def private_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster in `folder` that is not up yet, and is brought down and wiped at the end; dead processes' clusters are wiped first.

    Each owner holds a lock on its own file for as long as it lives, which the kernel drops however it dies.
    """
    with _locked(folder / "lock"):
        sweep(folder)
        descriptor, name = tempfile.mkstemp(suffix=".owner", dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    owner = Path(name)
    cluster = Cluster(owner.with_suffix(""))
    try:
        yield cluster
    finally:
        cluster.down(wipe=True)
        owner.unlink()
        os.close(descriptor)


def sweep(folder: Path) -> list[Path]:
    """Bring down and wipe the clusters in `folder` whose owners are dead, and return their prefixes; hold the folder's lock meanwhile."""
    swept = []
    for owner in sorted(folder.glob("*.owner")):
        with owner.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # it lives
            prefix = owner.with_suffix("")
            Cluster(prefix).down(wipe=True)
            if prefix.is_dir():
                prefix.rmdir()  # its owner died before anything was written
            owner.unlink()
            swept.append(prefix)
    return swept


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
