"""What all tests share: markers, one thread a process, hypothesis without deadlines, hostile paths."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before any test imports numpy or torch; children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("evo", max_examples=40, deadline=None, derandomize=True, print_blob=True)
settings.load_profile("evo")

HOSTILE_NAMES = (
    "with space", "quo'te\"s", "semi;colon & $(echo x)", "new\nline", "-rf", "per%cent %j", "ünïcode", "{{ j }}",
)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers, since unknown ones are errors."""
    config.addinivalue_line("markers", "rare: slow, and near to others that CI runs; run by `make test-rare`")
    config.addinivalue_line("markers", "slow: starts an engine, a cluster or an install; run by `make test-slow`")


@pytest.fixture(params=HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
def hostile_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An existing folder whose name breaks careless shell quoting, globs, patterns or templates."""
    path = tmp_path / request.param
    path.mkdir()
    return path


@pytest.fixture
def mounted_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts an empty filesystem of a given size (as tmpfs: 1m, 220m) that can really fill up; root alone may."""
    mounts: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk-{size}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user may not mount a filesystem: {done.stderr.strip()}")
        mounts.append(folder)
        return folder

    yield mount
    for folder in mounts:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that the tests lie in."""
    return Path(__file__).resolve().parent.parent
