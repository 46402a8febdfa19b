"""The controller's last word on an attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.controller.commit import write_record
from evo_hpc.dispatch.attempt import load_intent, load_record
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.atomic import read_json, write_json
from tests.controller.attempts import Owner, write_attempt


@pytest.mark.parametrize("steps, advanced", [
    ([7], [True]), ([0], [False]), ([None], [False]), ([7, 7, 9], [True, False, True]), ([7, 5, 7], [True, False, False]),
])
def test_an_attempt_advanced_that_came_further_than_all_before_it(tmp_path: Path, steps: list[int | None], advanced: list[bool]) -> None:
    version = CampaignPaths(tmp_path).version("v0001")
    write_json(_attempt(version.job("evaluate", 0)).incarnation(0).progress, {"step": 99})
    found = []
    for number, step in enumerate(steps):
        job = _attempt(version.job("train", number))
        if step is not None:
            write_json(job.incarnation(0).progress, {"step": step})
        write_record(JobStatus(job, "finished", incarnation=0, intent=load_intent(job)), Owner(), state="failed", blame="infrastructure", error="why")  # type: ignore[arg-type]
        record = load_record(job)
        assert record is not None
        found.append(record.advanced)
    assert found == advanced


def test_attempts_at_other_work_or_damaged_ones_do_not_count(tmp_path: Path) -> None:
    version = CampaignPaths(tmp_path).version("v0001")
    other, damaged, own = (_attempt(version.job("train", number)) for number in range(3))
    write_json(other.incarnation(0).progress, {"step": 500})
    write_json(other.intent, {**read_json(other.intent), "work": "with the recipe as it was"})
    damaged.intent.write_text("{")
    damaged.incarnation(0).result.write_text("{")
    write_json(own.incarnation(0).progress, {"step": 100})
    status = JobStatus(own, "finished", incarnation=0, intent=load_intent(own))
    write_record(status, Owner(), state="failed", blame="infrastructure", error="why")  # type: ignore[arg-type]
    record = load_record(own)
    assert record is not None and record.advanced


def _attempt(job: JobPaths) -> JobPaths:
    return write_attempt(job, recorded=None)
