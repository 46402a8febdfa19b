"""The cost of attempts: accounting where it knows, files where it does not, each second once; and what is kept of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.slurm import Resources
from evo_hpc.controller.cost import (
    SETTLE_SECONDS, Asked, allocated_gpus, asked_of, asked_since, cost_of, gpus_of, settled, waiting, write_cost,
)
from evo_hpc.controller.spending import CostBook, goodput, spent, works
from evo_hpc.dispatch.attempt import Attempt, load, read_attempt
from evo_hpc.dispatch.slurm.parse import parse_accounting
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.jobs.cost import CostRecord
from evo_hpc.jobs.spec import Identity, Intent, Result, Start
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.atomic import StoreError, write_json
from evo_hpc.store.lease import LeaseLost
from evo_hpc.store.schemas import STEP
from evo_hpc.store.tables import metric_rows, write_table
from tests.controller.attempts import NAME, Owner, spec, start, who, write_attempt

FOUR = Asked(gpus=4.0, nodes=2.0)


class Displaced(Owner):
    def check(self) -> None:
        raise LeaseLost("generation 4 has taken over")


def run(started: float, elapsed: float, number: int = 0, *, ended: bool = True, index: int | None = None, **more: Any) -> SlurmJob:
    values: dict[str, Any] = {
        "name": f"{NAME}-s{number}", "job_id": str(100 + number), "array_index": index, "state": "COMPLETED" if ended else "RUNNING",
        "submitted": started, "started": started, "ended": started + elapsed if ended else None, "elapsed": elapsed,
        "tres": {"node": 2.0, "gres/gpu": 4.0, "cpu": 8.0}, "source": "sacct",
    }
    return SlurmJob(**{**values, **more})


def attempt(*claims: Identity, starts: Sequence[Start] = (start(),), seconds: dict[int, float] | None = None, beats: dict[int, float] | None = None,
            executor: str = "slurm") -> Attempt:
    intent = Intent(name=NAME, spec_sha256="", owner="v0001", work="w", root="/c", generation=1, written_at=0, executor=executor)  # type: ignore[arg-type]
    results = {number: Result(outcome="done", seconds=each) for number, each in (seconds or {}).items()}
    job = JobPaths(Path("/c/versions/v0001/jobs/train-000"))
    return Attempt(job, intent, tuple(starts), {}, {}, tuple(enumerate(claims)), results, beats or {}, {})


def test_accounting_is_elapsed_times_allocated() -> None:
    cost = cost_of(attempt(who(0, 102), seconds={0: 3000}), Asked(1.0, 1.0), [run(100, 3600)])
    assert (cost.gpu_hours, cost.node_hours, cost.wall_hours, cost.source, cost.starts) == (4.0, 2.0, 1.0, "accounted", 1)


def test_every_requeue_of_every_start_counts() -> None:
    made = attempt(who(0, 102), who(0, 2002, restart=1), who(1, 9002), starts=[start(), start(1, 8000)])
    runs = [run(100, 1800, state="PREEMPTED"), run(2000, 3600), run(9000, 1800, 1)]
    cost = cost_of(made, FOUR, runs)
    assert (cost.gpu_hours, cost.wall_hours, cost.source, cost.starts) == (8.0, 2.0, "accounted", 2)
    assert cost_of(made, FOUR, [*runs, *runs]) == cost, "asked twice"


def test_without_accounting_by_results_and_heartbeats() -> None:
    cost = cost_of(attempt(who(0, 100), who(0, 5000, 1), seconds={1: 1800}, beats={0: 1900, 1: 99999}), FOUR)
    assert (cost.gpu_hours, cost.node_hours, cost.wall_hours, cost.source) == (4.0, 2.0, 1.0, "estimated")
    assert cost_of(attempt(who(0, 100)), FOUR).wall_hours == 0.0, "killed before its first heartbeat"
    assert cost_of(attempt(), FOUR, [run(100, 3600)]).gpu_hours == 4.0, "a node that held GPUs, and no job of ours that began"


def test_a_run_that_accounting_does_not_have_to_the_end_is_estimated() -> None:
    made = attempt(who(0, 102), who(0, 4000, 1), beats={0: 3000, 1: 5800})
    cost = cost_of(made, FOUR, [run(100, 3600), run(3999, 10, ended=False)])
    assert cost.wall_hours == pytest.approx(1.5) and cost.source == "mixed"
    quick = attempt(who(0, 102), who(0, 3703, 1), beats={1: 5503})
    assert cost_of(quick, FOUR, [run(100, 3600)]).wall_hours == pytest.approx(1.5), "requeued within seconds: one run, one claim"
    unclaimed = cost_of(attempt(), FOUR, [run(100, 360, ended=False)])
    assert unclaimed.wall_hours == pytest.approx(0.1) and unclaimed.source == "estimated"


def test_other_jobs_do_not_count() -> None:
    mine = attempt(starts=[start(0, 5000.0, index=2)])
    others = [run(5000, 60, index=1), run(5000, 60), run(100, 60, index=2), run(5000, 60, 1, index=2), run(5000, 60, index=2, source="squeue"),
              replace(run(5000, 60, index=2), started=None)]
    assert cost_of(mine, FOUR, others).wall_hours == 0.0
    assert cost_of(mine, FOUR, [*others, run(5000, 3600, index=2)]).wall_hours == 1.0


def test_a_cluster_that_does_not_account_for_gpus() -> None:
    cost = cost_of(attempt(who(0, 102)), FOUR, [run(100, 3600, tres={"node": 2.0, "cpu": 8.0})])
    assert (cost.gpu_hours, cost.source) == (4.0, "mixed"), "hours by accounting, GPUs as asked"
    none = cost_of(attempt(who(0, 102)), Asked(0.0, 1.0), [run(100, 3600, tres={"node": 1.0})])
    assert (none.gpu_hours, none.source) == (0.0, "accounted")
    assert allocated_gpus(run(0, 1, tres={"gres/gpu": 4, "gres/gpu:a": 3, "gres/gpu:b": 1})) == 4
    assert allocated_gpus(run(0, 1, tres={"gres/gpu:a": 3, "gres/gpu:b": 1})) == 4


def test_what_a_real_cluster_says_of_a_requeued_job() -> None:
    """Recorded from Slurm 22.05: two GPUs, requeued after 2 s, run again for 6 s; it was submitted at 1796026705."""
    said = parse_accounting(
        f"136|136|{NAME}-s0|REQUEUED|0:0|1796026705|1796026706|1796026708|2|billing=1,cpu=1,gres/gpu=2,mem=100M,node=1|n1\n"
        f"136|136|{NAME}-s0|COMPLETED|0:0|1796026708|1796026716|1796026722|6|billing=1,cpu=1,gres/gpu=2,mem=100M,node=1|n1\n"
        f"90|90|{NAME}-s0|COMPLETED|0:0|1795000000|1795000001|1795009001|9000|billing=1,cpu=1,gres/gpu=2,mem=100M,node=1|n1\n"
    )
    made = attempt(who(0, 1796026706.07), who(0, 1796026716.13, 1), starts=[start(0, 1796026705.25)])
    cost = cost_of(made, FOUR, said)
    assert cost.gpu_hours * 3600 == pytest.approx(16) and cost.node_hours * 3600 == pytest.approx(8) and cost.source == "accounted"
    assert settled(made, said) and not settled(made, said[:1])


LENGTHS = st.lists(st.tuples(st.floats(30, 1e5), st.floats(12, 1e4), st.floats(0, 4), st.booleans()), min_size=1, max_size=6)


@given(LENGTHS)
def test_each_run_is_counted_once_whatever_accounting_has_lost(history: list[tuple[float, float, float, bool]]) -> None:
    """Of each run: its length, the time in the queue before it, the delay of its claim, whether accounting has it."""
    now, claims, runs, beats, expected = 1000.0, [], [], {}, 0.0
    for restart, (length, gap, delay, known) in enumerate(history):
        now += gap
        claims.append(who(0, now + delay, restart))
        beats[restart] = now + length - 1
        runs += [run(now, length)] if known else []
        expected += length if known else length - 1 - delay
        now += length
    cost = cost_of(attempt(*claims, beats=beats), FOUR, runs)
    assert cost.wall_hours * 3600 == pytest.approx(expected)
    assert cost.gpu_hours == pytest.approx(4 * cost.wall_hours) and cost.node_hours == pytest.approx(2 * cost.wall_hours)
    assert cost.source == {0: "estimated", len(history): "accounted"}.get(len(runs), "mixed")
    assert settled(attempt(*claims), runs) == (len(runs) == len(history))


@pytest.mark.parametrize("resources, gpus", [
    ({}, 0), ({"gpus_per_node": "4"}, 4), ({"gpus_per_node": "h100:8"}, 8), ({"gpus_per_node": "a:2,b:1"}, 3), ({"gpus_per_node": "h100"}, 1),
    ({"gres": "gpu:h100:4"}, 4), ({"gres": "gpu"}, 1), ({"gres": "gpu:2,nvme:1"}, 2), ({"gres": "nvme:3"}, 0), ({"gres": "gres/gpu:2"}, 2),
    ({"gres": "gpu=2"}, 2),
])
def test_gpus_as_profiles_ask_for_them(resources: dict[str, str], gpus: int) -> None:
    assert gpus_of(Resources(**resources)) == gpus  # type: ignore[arg-type]


def test_what_a_job_asked_for() -> None:
    two = spec(defaults={"gpus_per_node": "8"}, train={"nodes": 2})
    assert asked_of(two, "slurm") == Asked(16.0, 2.0)
    assert asked_of(two, "local") == Asked(0.0, 1.0), "this machine's GPUs are nobody's allocation"
    assert asked_of(spec("evaluate", train={"gpus_per_node": "8"}), "slurm") == Asked(0.0, 1.0)


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    return CampaignPaths(tmp_path)


def test_what_accounting_said_outlives_accounting(paths: CampaignPaths) -> None:
    job = write_attempt(paths.version("v0001").job("train", 0), train={"gpus_per_node": "4", "nodes": 2})
    assert waiting([job]) == [job] and asked_since([job]) == 940.0
    assert write_cost(job, Owner(), [run(1001, 3600)], job.record.stat().st_mtime)  # type: ignore[arg-type]
    before = job.cost.read_bytes()
    assert waiting([job]) == []
    assert write_cost(job, Owner(), [], 1e12) and job.cost.read_bytes() == before, "written once"  # type: ignore[arg-type]
    (found,) = CostBook().read([job])
    assert (found.cost.gpu_hours, found.cost.source, found.recorded) == (4.0, "accounted", True)
    record = load(CostRecord, job.cost)
    assert record.generation == 3 and [(each.job_id, each.elapsed, each.gpus, each.nodes) for each in record.runs] == [("100", 3600.0, 4.0, 2.0)]


def test_accounting_that_lags_is_waited_for_but_not_for_ever(paths: CampaignPaths) -> None:
    job = write_attempt(paths.version("v0001").job("train", 0), train={"gpus_per_node": "4"})
    recorded_at = job.record.stat().st_mtime
    for behind in ([], [run(1001, 5, ended=False)]):
        assert not write_cost(job, Owner(), behind, recorded_at + 10) and not job.cost.exists()  # type: ignore[arg-type]
    assert CostBook().read([job])[0].cost.gpu_hours == 2.0, "estimated meanwhile"
    assert write_cost(job, Owner(), [], recorded_at + SETTLE_SECONDS)  # type: ignore[arg-type]
    assert load(CostRecord, job.cost).cost.source == "estimated"


def test_where_there_is_nothing_to_wait_for(paths: CampaignPaths) -> None:
    here = write_attempt(paths.version("v0001").job("train", 0), executor="local", train={"gpus_per_node": "4"})
    absent = write_attempt(paths.version("v0002").job("train", 0), train={"gpus_per_node": "4"})
    assert write_cost(here, Owner(), [], here.record.stat().st_mtime)  # type: ignore[arg-type]
    assert write_cost(absent, Owner(), None, absent.record.stat().st_mtime)  # type: ignore[arg-type]
    cost = [each.cost for each in CostBook().read([here, absent])]
    assert [(c.gpu_hours, c.wall_hours, c.source) for c in cost] == [(0.0, 0.5, "estimated"), (2.0, 0.5, "estimated")]


def test_a_controller_that_was_displaced_writes_no_cost(paths: CampaignPaths) -> None:
    job = write_attempt(paths.version("v0001").job("train", 0))
    with pytest.raises(LeaseLost):
        write_cost(job, Displaced(), None, 1e12)  # type: ignore[arg-type]
    assert not job.cost.exists()


def test_a_damaged_cost_is_named(paths: CampaignPaths) -> None:
    job = write_attempt(paths.version("v0001").job("train", 0))
    job.cost.write_text('{"cost": ')
    with pytest.raises(StoreError, match=r"cost\.json:1"):
        CostBook().read([job])


def test_what_can_change_no_more_is_read_once(paths: CampaignPaths) -> None:
    final, live = (write_attempt(paths.version(v).job("train", 0), recorded=state) for v, state in (("v0001", "done"), ("v0002", None)))
    assert write_cost(final, Owner(), None, 1e12)  # type: ignore[arg-type]
    book = CostBook()
    first = book.read([final, live])
    final.cost.unlink()
    os.utime(final.root)
    write_json(live.incarnation(0).result, Result(outcome="done", seconds=3600).model_dump())
    second = book.read([final, live])
    assert second[0] == first[0] and second[1].cost.wall_hours == 1.0
    owners = {"v0001": [final], "v0002": [live]}
    assert book.spent(owners) == spent(second)
    write_json(live.incarnation(0).result, Result(outcome="done", seconds=7200).model_dump())
    another = write_attempt(paths.version("v0001").job("train", 1), seconds=3600)
    assert book.spent(owners).campaign.wall_hours == 2.5, "open ones are read anew"
    assert book.spent({**owners, "v0001": [final, another]}).owners["v0001"].wall_hours == 1.5, "a new attempt is noticed"


def test_sums_by_version_and_goodput(paths: CampaignPaths) -> None:
    version = paths.version("v0001")
    jobs = [
        write_attempt(version.job("train", 0), recorded="failed", seconds=600), write_attempt(version.job("train", 1), seconds=1000),
        write_attempt(version.job("evaluate", 0), seconds=400), write_attempt(paths.version("v0002").job("train", 0), recorded=None, seconds=7200),
        write_attempt(paths.base.job("supervise", 0), recorded="failed", seconds=1000),
    ]
    where = {"campaign": "c", "version": "v0001", "incarnation": 0}
    rows = [metric_rows({**where, "attempt": of}, step, {"seconds_step": 200.0})[1] for step, of in enumerate((0, 0, 1, 1, 1), start=1)]
    write_table(version.steps / "part-000001-000005.parquet", rows, STEP)
    attempts = CostBook().read(jobs)
    used = spent(attempts)
    assert {owner: round(3600 * cost.wall_hours) for owner, cost in used.owners.items()} == {"v0001": 2000, "v0002": 7200, "base": 1000}
    assert round(3600 * used.campaign.wall_hours) == 10200
    found = works(paths, attempts)
    assert [(w.owner, w.kind, w.attempts, w.useful_seconds) for w in found] == [
        ("v0001", "train", 2, 1000.0), ("v0001", "evaluate", 1, 400.0), ("v0002", "train", 1, None), ("base", "supervise", 1, 0),
    ]
    assert goodput(found) == pytest.approx(1400 / 3000), "what still runs is not judged, what failed is"
    assert goodput(found[2:3]) is None and goodput(found[:1]) == pytest.approx(1000 / 1600), "steps that a later attempt went on from are of use"


def test_reading_an_attempt_agrees_with_the_record_on_its_seconds(paths: CampaignPaths) -> None:
    job = write_attempt(paths.version("v0001").job("train", 0), seconds=1234.5)
    assert cost_of(read_attempt(job), FOUR).wall_hours * 3600 == pytest.approx(1234.5)
