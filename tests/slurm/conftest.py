"""What the tests on a real Slurm cluster share: the cluster, and campaigns on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.fixture import cluster
from tests.cluster.settings import NODES
from tests.slurm.campaigns import Site, begin, site_of

__all__ = ["cluster"]


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A campaign up to its root's score, and what it comes to undisturbed."""
    return begin(tmp_path_factory.mktemp("begun"))


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, begun: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The cluster, as one test uses it."""
    with site_of(cluster, tmp_path, begun, monkeypatch) as found:
        yield found


@pytest.fixture
def nodes(site: Site) -> Iterator[Site]:
    """The same, all nodes in service again at the end."""
    yield site
    for name in NODES:
        if site.cluster.running()[f"slurmd.{name}"] is None:
            site.mark("resume", name)
            site.cluster.start_node(name)
