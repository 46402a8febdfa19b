"""Exactly one incarnation of an attempt may commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evo_hpc.jobs.claims import Superseded, check_claim, claim, current_claim
from evo_hpc.jobs.spec import Identity
from evo_hpc.paths import JobPaths
from evo_hpc.store.processes import ProcessIdentity


def identity(generation: int, start: int) -> Identity:
    return Identity(job_name="j", generation=generation, start=start, process=ProcessIdentity.current(), claimed_at=0.0)


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    path = JobPaths(tmp_path / "jobs" / "train-000")
    path.root.mkdir(parents=True)
    return path


def test_a_newer_start_supersedes_and_the_older_stops(job: JobPaths) -> None:
    first = claim(job, identity(1, 0))
    check_claim(job, first)
    second = claim(job, identity(1, 1))
    assert (first.number, second.number) == (0, 1)
    with pytest.raises(Superseded, match="incarnation 1 has taken over"):
        check_claim(job, first)
    check_claim(job, second)


def test_a_job_folder_removed_by_hand_ends_its_incarnation(job: JobPaths) -> None:
    import shutil

    first = claim(job, identity(1, 0))
    shutil.rmtree(job.root)
    with pytest.raises(Superseded, match="removed by hand"):
        check_claim(job, first)


@pytest.mark.parametrize("late", [(1, 1), (1, 0), (0, 9)])
def test_an_older_or_equal_start_is_refused(job: JobPaths, late: tuple[int, int]) -> None:
    claim(job, identity(1, 1))
    with pytest.raises(Superseded, match="it stops"):
        claim(job, identity(*late))
    assert len(job.claims()) == 1


def test_a_newer_generation_outranks_more_starts(job: JobPaths) -> None:
    claim(job, identity(1, 5))
    assert claim(job, identity(2, 0)).number == 1
    current = current_claim(job)
    assert current is not None and current[1].rank == (2, 0, 0)


def test_racing_processes_agree_on_one_owner(job: JobPaths) -> None:
    code = (
        "import sys; from pathlib import Path; from evo_hpc.jobs.claims import *; from evo_hpc.jobs.spec import Identity\n"
        "from evo_hpc.paths import JobPaths; from evo_hpc.store.processes import ProcessIdentity\n"
        "i = Identity(job_name='j', generation=1, start=int(sys.argv[2]), process=ProcessIdentity.current(), claimed_at=0)\n"
        "try: claim(JobPaths(Path(sys.argv[1])), i)\n"
        "except Superseded: sys.exit(3)"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code, str(job.root), str(n)]) for n in range(5)]
    codes = [racer.wait() for racer in racers]
    current = current_claim(job)
    assert current is not None and current[1].start == 4 and codes[4] == 0
    assert [n for n, _ in job.claims()] == list(range(codes.count(0)))


def test_what_still_runs_stops_once_the_controller_has_written_its_last_word(job: JobPaths) -> None:
    """A copy that Slurm requeued, when the step of before ended well on its lost node."""
    claim(job, identity(1, 0))
    copy = claim(job, identity(1, 1))
    check_claim(job, copy)
    job.record.write_text("{}")
    with pytest.raises(Superseded, match="last word on this attempt; incarnation 1 stops"):
        check_claim(job, copy)


def test_nothing_starts_anew_once_the_controller_has_written_its_last_word(job: JobPaths) -> None:
    job.record.write_text("{}")
    with pytest.raises(Superseded, match="last word"):
        claim(job, identity(9, 9))
    assert not job.claims()
