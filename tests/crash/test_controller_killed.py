"""kill -9 of the controller at every durable write, and of anything at any time: the same end, nothing twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evo_hpc.store.processes import find_by_argument
from tests.crash.campaign import HERE, check_sound, controller, finish, make_campaign, outcome

DRIVER = str(HERE / "killing_controller.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, int]:
    """What an undisturbed run ends with, and how many points it offers to die at."""
    paths = make_campaign(tmp_path_factory.mktemp("undisturbed") / "campaign")
    process = controller(paths, DRIVER, KILL_AT="-1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    check_sound(paths)
    return outcome(paths), int(output.split()[-1])


def die_and_go_on(tmp_path: Path, undisturbed: tuple[dict, int], point: int, when: str) -> bool:
    """Whether the point was reached; then the campaign is finished by a second run and checked."""
    paths = make_campaign(tmp_path / f"{when}-{point}" / "campaign")
    process = controller(paths, DRIVER, KILL_AT=str(point), KILL_WHEN=when)
    process.communicate(timeout=120)
    reached = process.returncode == -signal.SIGKILL
    finish(paths)
    check_sound(paths)
    assert outcome(paths) == undisturbed[0]
    return reached


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_some_writes(tmp_path: Path, undisturbed: tuple[dict, int], when: str) -> None:
    """A few points, spread over the run; the slow test has them all."""
    points = undisturbed[1]
    assert points > 20
    for point in random.Random(when).sample(range(2, points), 2):
        assert die_and_go_on(tmp_path, undisturbed, point, when)


STRIDE = int(os.environ.get("CRASH_STRIDE", "24"))
"""CRASH_STRIDE=1 tries every write (half an hour on two cores); CI tries every 24th: those of Slurm (tests/chaos) are denser."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_every_write(tmp_path: Path, undisturbed: tuple[dict, int]) -> None:
    """Before one write, after the next, and so on to the end."""
    points = range(1, undisturbed[1] + 1, STRIDE)
    reached = [die_and_go_on(tmp_path, undisturbed, point, "before" if i % 2 else "after") for i, point in enumerate(points)]
    # Heartbeats depend on the time a run takes, so the last few points may lie beyond its end.
    assert sum(reached) > 0.8 * len(reached)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    yield random.Random(request.param)


def test_anything_killed_at_any_time(tmp_path: Path, undisturbed: tuple[dict, int], chance: random.Random) -> None:
    """Controllers, launchers and roles die by SIGKILL at random; what remains alive is adopted by the next controller."""
    paths = make_campaign(tmp_path / "campaign", environment={"FAKE_STEP_SECONDS": "0.05"})
    process = controller(paths)
    deaths = 0
    while process.poll() is None or deaths < 12:
        if process.poll() is not None:
            process = controller(paths)
        time.sleep(chance.uniform(0.05, 0.5))
        victims = [process.pid, *_processes_of(paths.root)]
        if deaths < 12:
            victim = chance.choice(victims)
            try:
                os.kill(victim, signal.SIGKILL)
                deaths += 1
            except ProcessLookupError:
                continue
    finish(paths)
    check_sound(paths)
    assert outcome(paths) == undisturbed[0]


def _processes_of(root: Path) -> list[int]:
    """Launchers and roles of the jobs of one campaign."""
    jobs = [str(p) for p in root.glob("*/jobs/*")] + [str(p) for p in root.glob("versions/*/jobs/*")]
    return [pid for job in jobs for pid in find_by_argument("--job", job)]
