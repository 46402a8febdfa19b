"""The real demo under Slurm, its controller killed (SIGKILL) time and again: it comes to the very end that it comes to on one machine."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from evo_hpc.config.slurm import Slurm
from evo_hpc.controller.skeleton import copy_campaign
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.paths import CampaignPaths, Workspace
from tests.cluster import Cluster
from tests.crash.campaign import controller, evo
from tests.slurm.campaigns import ended
from tests.slurm.test_controller_killed import DRIVER, submitted
from tools.demo_slurm import PROFILE
from tools.same_outcome import differences, outcome

pytestmark = [pytest.mark.slow, pytest.mark.rare, pytest.mark.timeout(2400)]

SECONDS = (6, 20, 35, 30, 20)
"""How long each controller lives, before the next write or command is its last."""


def short_demo(workspace: Path, profile: bytes | None = None) -> CampaignPaths:
    """Up to v0001."""
    paths = CampaignPaths(Workspace(workspace).campaigns / "demo")
    if profile is not None:
        paths.root.mkdir(parents=True)
        paths.cluster_yaml.write_bytes(profile)
    copy_campaign("demo", workspace)
    text, made = re.subn(r"(?m)^  proposals: \d+", "  proposals: 0", paths.campaign_yaml.read_text())
    assert made == 1
    paths.campaign_yaml.write_text(text)
    return paths


def test_killed_and_run_again(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, paths = short_demo(tmp_path / "alone"), short_demo(tmp_path / "killed", PROFILE.read_bytes())
    ended(controller(alone), seconds=900)
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    spent, died, begun = tmp_path / "spent", 0, time.time()
    for seconds in SECONDS:
        process = controller(paths, DRIVER, SPENT=str(spent), NOT_BEFORE=str(seconds))
        output, _ = process.communicate(timeout=900)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output
        died += 1
    ended(controller(paths), seconds=900)
    print(f"died {died} times: {spent.read_text().splitlines()}")
    assert died >= 3
    for each in (alone, paths):
        done = evo("finalize", str(each.root))
        assert done.returncode == 0, done.stderr
    assert not differences(outcome(paths), outcome(alone))
    twice = [job for job, times in submitted(Commands.of(Slurm()), paths, begun, "demo").items() if times > 1]
    assert not twice
