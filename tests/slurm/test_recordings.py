"""The recordings that the simulator is held against are what a live cluster shows today."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.record import recorded
from tests.chaos.scenarios import SCENARIOS, play, real
from tests.chaos.story import essence
from tests.cluster.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.rare]


@pytest.mark.parametrize("name", SCENARIOS)
def test_recording_still_holds(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """The same story again, with the same sequence; `python -m tests.chaos.record` records anew after a change that is meant."""
    assert essence(play(name, real(tmp_path, {**os.environ, **cluster.environment}))) == essence(recorded(name))
