"""What all tests share: markers, one thread a process, hypothesis without deadlines, hostile paths."""

from __future__ import annotations

import os
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
    config.addinivalue_line("markers", "slow: starts an engine, a cluster or an install; run by `make test-slow`")


@pytest.fixture(params=HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
def hostile_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An existing folder whose name breaks careless shell quoting, globs, patterns or templates."""
    path = tmp_path / request.param
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that the tests lie in."""
    return Path(__file__).resolve().parent.parent
