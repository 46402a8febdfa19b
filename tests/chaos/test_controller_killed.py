"""kill -9 of a controller on Slurm at every durable write and every command, amid faults of the cluster: the same end, nothing twice."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.chaos.case import FAULTS, Case, cases
from tests.chaos.killing import play, undisturbed
from tests.chaos.points import Point

Told = tuple[dict[str, Any], list[Point], float]
STRIDE = int(os.environ.get("CHAOS_STRIDE", "12"))
"""CHAOS_STRIDE=1 tries every point, before and after (about half an hour on two cores that are free)."""


@pytest.fixture(scope="module")
def told() -> Told:
    """What an undisturbed campaign ends with, and the points that it passes."""
    return undisturbed()


def run(chosen: list[Case], told: Told) -> int:
    """Live through them; how many controllers died where they should."""
    reached, problems, number = 0, [], 0
    for found in play(chosen):
        number += 1
        answer = found.get("answer")
        if answer is None:
            problems.append(f"{Case(**found['case'])}\n{found['error']}")
            continue
        reached += answer["reached"]
        if answer["outcome"] != told[0]:
            problems.append(f"{Case(**found['case'])}: another outcome: {answer['outcome']}")
    assert not problems, "\n".join(problems)
    assert number == len(chosen)
    return reached


def test_every_kind_of_point_is_found(told: Told) -> None:
    """The recording layer sees files and commands, and every fault meets points of both."""
    labels = [point.label for point in told[1]]
    for beginning in (
        "sbatch base", "squeue", "sacct", "link base/jobs/supervise-000/intent.json", "link versions/v0001/jobs/train-000/start-000000.json",
        "rename versions/v0001/train", "link looks/", "link versions/v0001/decision.yaml", "link controller/generation-",
    ):
        assert any(label.startswith(beginning) for label in labels), f"no {beginning} among {labels}"
    every = cases(told[1])
    assert len(every) == 2 * len(labels) and {case.fault for case in every} == set(FAULTS)


def test_killed_at_some_points(told: Told) -> None:
    """Between the three steps of a submission, with an sbatch that does not say how it ended; the slow test has many more."""
    script = "versions/v0000/jobs/evaluate-000-shard-00/start-000000.sh"
    chosen = [
        Case(0, f"sbatch {script}", 1, "before", "none"), Case(1, f"sbatch {script}", 1, "after", "ids reused"),
        Case(2, "rename versions/v0001/train", 1, "after", "preempted"),
        Case(0, "link base/jobs/supervise-000/record.json", 1, "before", "sbatch timeout_after"),
    ]
    assert run(chosen, told) == len(chosen)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_point(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    """Every STRIDE-th of all points, before and after in turn."""
    every = cases(told[1])
    chosen = every[::STRIDE]
    with capsys.disabled():
        print(f" {len(told[1])} points, {len(every)} cases, {len(chosen)} of them run ", end="", flush=True)
    # How often Slurm is asked depends on the time a run takes, so some points may lie beyond its end.
    assert run(chosen, told) > 0.8 * len(chosen)
