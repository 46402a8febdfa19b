"""What `make demo-slurm` tells of a preemption, and how it ends early; without a cluster."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.slurm_figures import interruption_text, interruptions
from evo_hpc.config.cluster import Cluster as Profile
from evo_hpc.config.yaml_io import dump_tree, load_model
from evo_hpc.errors import UserError
from evo_hpc.jobs.cost import AccountedRun, Cost, CostRecord
from evo_hpc.jobs.spec import Identity, Result
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import write_bytes, write_json
from evo_hpc.store.processes import ProcessIdentity
from evo_hpc.store.schemas import METRICS, STEP
from evo_hpc.store.tables import write_table
from tests.cluster import Cluster
from tools.demo_slurm import PROFILE, REPOSITORY, Demo, Narrator, guarded
from tools.same_outcome import differences

T = 1_700_000_000.0


def preempted(folder: Path, *, reached: int, accounted: bool = True) -> CampaignPaths:
    """A published run of 5 steps, warned at T + 20 when step 3 was done two seconds ago; step `reached` was done when it ended."""
    paths = CampaignPaths(folder)
    version = paths.version("v0001")
    job = version.job("train", 0)
    for number, at in ((0, T), (1, T + 40)):
        identity = Identity(job_name="x", generation=1, start=0, restart=number, process=ProcessIdentity.current(), claimed_at=at)
        write_json(job.claim(number), identity.model_dump())
    first, second = job.incarnation(0), job.incarnation(1)
    write_json(first.result, Result(outcome="stopped", stopped_by="warning", finished_at=T + 23, seconds=23).model_dump())
    write_json(first.progress, {"step": reached})
    write_bytes(first.stop, b"")
    os.utime(first.stop, (T + 20, T + 20))
    write_bytes(second.effective("trainer"), dump_tree({}))
    os.utime(second.effective("trainer"), (T + 50, T + 50))
    write_bytes(second.effective("rollout"), dump_tree({"start_seconds": 13.0}))
    os.utime(second.effective("rollout"), (T + 55, T + 55))
    if accounted:
        runs = [AccountedRun(job_id="7", state=state, started=at, elapsed=seconds, gpus=0, nodes=1)
                for state, at, seconds in (("REQUEUED", T - 1, 25), ("COMPLETED", T + 37, 60))]
        write_json(job.cost, CostRecord(cost=Cost(), runs=runs, generation=1, written_at=T).model_dump())
    rows = [
        {"campaign": "demo", "version": "v0001", "attempt": 0, "incarnation": int(step > 3), "step": step, **dict.fromkeys(METRICS),
         "time": datetime.fromtimestamp(T + 6 * step if step <= 3 else T + 50 + 6 * step, UTC)} for step in range(1, 6)
    ]
    write_table(version.steps / "part-000001-000005.parquet", rows, STEP)
    write_json(version.train_complete, {})
    return paths


def test_the_time_of_a_preemption_is_split_by_cause(tmp_path: Path) -> None:
    (found,) = interruptions(preempted(tmp_path, reached=3))
    assert (found.lost_steps, found.resumed, found.restart, found.outcome) == (0, 3, 1, "stopped")
    assert found.lost_seconds == pytest.approx(2, abs=0.01)
    split = {"saving": 3, "ending": 1, "queue": 13, "python": 5, "loading": 8, "engine": 5}
    assert {name: getattr(found, name) for name in split} == pytest.approx(split, abs=0.01)
    assert found.total == pytest.approx(sum(split.values()), abs=0.01) == pytest.approx(35, abs=0.01)
    text = interruption_text({**vars(found), "lost_steps": found.lost_steps})
    assert "35.0 s from the warning to training again" in text and "waiting in the queue 13.0" in text


def test_a_step_that_was_done_and_not_saved_is_lost(tmp_path: Path) -> None:
    (found,) = interruptions(preempted(tmp_path, reached=4))
    assert (found.lost_steps, found.reached, found.resumed) == (1, 4, 3)


def test_without_accounting_the_rest_is_still_told(tmp_path: Path) -> None:
    (found,) = interruptions(preempted(tmp_path, reached=3, accounted=False))
    assert (found.ending, found.queue, found.python) == (None, None, None)
    assert found.total == pytest.approx(35, abs=0.01) and "waiting in the queue" not in interruption_text({**vars(found), "lost_steps": 0})


def test_the_profile_computes_as_the_demo_does() -> None:
    ours, theirs = load_model(PROFILE, Profile), load_model(REPOSITORY / "campaigns" / "demo" / "cluster.yaml", Profile)
    assert (ours.engine, ours.trainer, ours.max_parallel_jobs) == (theirs.engine, theirs.trainer, theirs.max_parallel_jobs)
    assert ours.executor == "slurm" and ours.slurm.of("train").partition == "scavenge"


def test_outcomes_that_differ_are_named() -> None:
    assert differences({"v0001 dev": "0.5", "claim": "x"}, {"v0001 dev": "0.5", "claim": "x"}) == []
    assert differences({"v0001 dev": "0.5"}, {"v0001 dev": "0.6", "claim": "x"}) == ["v0001 dev: 0.5 here, 0.6 there", "claim: absent here, x there"]


@pytest.mark.parametrize("error, code", [(UserError("no room"), 2), (KeyboardInterrupt(), 130), (OSError("disk"), 1)], ids=("user", "ctrl-c", "os"))
def test_an_early_end_says_how_to_go_on(error: BaseException, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Demo(Cluster(tmp_path / "cluster"), tmp_path / "workspace", preempt=True)

    def run() -> None:
        raise error

    assert guarded(demo, run) == code
    said = capsys.readouterr().err
    assert "Run the same command again" in said and f"make cluster-down CLUSTER_ARGS='--prefix {tmp_path / 'cluster'}'" in said


def test_a_long_silence_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import time

    monkeypatch.setattr("tools.demo_slurm.QUIET_SECONDS", 0.0)
    with Narrator().during("it goes on"):
        time.sleep(1.2)
    assert "... it goes on" in capsys.readouterr().out
