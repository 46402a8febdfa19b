"""A filesystem that really fills up in the middle of a run: said clearly, nothing lost, and the run goes on once there is room."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from evo_hpc.store.atomic import read_json
from tests.crash.campaign import check_sound, controller, finish, make_campaign


def fill(path: Path) -> None:
    """Take every byte that is left."""
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def test_a_disk_that_fills_up_while_training(mounted_disk: Callable[[str], Path]) -> None:
    small_disk = mounted_disk("220m")  # just above what a run asks for at its start
    paths = make_campaign(small_disk / "campaign", max_starts=2, max_attempts=1, environment={"FAKE_STEP_SECONDS": "0.3"})
    process = controller(paths)
    progress = paths.version("v0001").job("train", 0).incarnation(0).progress
    deadline = time.time() + 60
    while not (progress.exists() and progress.stat().st_size and read_json(progress).get("step", 0) >= 2):
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.05)
    fill(small_disk / "filler")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "no space left" in output and "Traceback" not in output
    assert os.statvfs(small_disk).f_bavail == 0
    refused = controller(paths)
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2 and "MiB free on this filesystem" in output
    (small_disk / "filler").unlink()
    finish(paths)
    check_sound(paths)
