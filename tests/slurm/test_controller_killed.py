"""kill -9 of the controller at its writes and commands, jobs on a real cluster: the same end, and no job of Slurm's twice."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.jobs.spec import name_prefix
from evo_hpc.paths import CampaignPaths
from tests.crash.campaign import controller
from tests.slurm.campaigns import Site, ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

DRIVER = str(Path(__file__).resolve().parent / "dying_controller.py")
SECONDS = float(os.environ.get("SLURM_CRASH_SECONDS", "40"))
"""Controllers are killed for so long, then one goes on to the end; SLURM_CRASH_SECONDS=3600 kills one at every kind of point."""


def submitted(commands: Commands, paths: CampaignPaths, since: float, campaign: str = "crash") -> Counter[Any]:
    """How many jobs of Slurm's there were of each name and index: accounting and the queue together."""
    prefix = name_prefix(str(paths.root.resolve()), campaign)
    listings = (commands.queue(), commands.accounting(since))
    ids = {(job.name, job.array_index, job.job_id) for listing in listings for job in listing if job.name.startswith(prefix)}
    return Counter((name, index) for name, index, _ in ids)


def test_killed_at_one_kind_of_point_after_the_other(site: Site, tmp_path: Path) -> None:
    """In one campaign: each controller dies at the first point that it passes of those at which none before it died."""
    paths, spent, begun = site.campaign(step_seconds=0.01, slurm={"shards": 2}), tmp_path / "spent", time.time()
    died = 0
    while time.time() < begun + SECONDS:
        process = controller(paths, DRIVER, SPENT=str(spent))
        output, _ = process.communicate(timeout=600)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, f"after {died} deaths, the last at {spent.read_text().splitlines()[-1:]}: {output}"
        died += 1
    ended(controller(paths))
    points = spent.read_text().splitlines()
    print(f"died {died} times in {time.time() - begun:.0f} s: {points}")
    site.same(paths)
    assert died == len(points) == len(set(points)) >= 5
    twice = [job for job, times in submitted(site.commands, paths, begun).items() if times > 1]
    assert not twice, f"submitted twice: {twice}; died at {points}"
