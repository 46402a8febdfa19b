"""`make demo-slurm` for real: the demo campaign under Slurm, its training preempted in the middle, comes to the same end.

The versions after v0001 are left out, for a run of about a third of the time; DEMO_SLURM_PROPOSALS=all has them, too.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.slurm_figures import interruptions
from evo_hpc.controller.claim import final_claim
from evo_hpc.controller.launch import controller_name
from evo_hpc.controller.state import read_state
from evo_hpc.dispatch.attempt import read_attempt
from evo_hpc.paths import CampaignPaths
from evo_hpc.report.cost_view import cost_record
from evo_hpc.store.atomic import read_json
from evo_hpc.store.schemas import ROLLOUT, STEP
from evo_hpc.store.tables import read_tables
from tests.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
_ASKED = os.environ.get("DEMO_SLURM_PROPOSALS", "0")
PROPOSALS = None if _ASKED == "all" else _ASKED


def make_demo(repository: Path, cluster: Cluster, workspace: Path) -> str:
    """What `make demo-slurm` prints."""
    short = f" --proposals {PROPOSALS}" if PROPOSALS is not None else ""
    done = subprocess.run(
        ["make", "demo-slurm", f"DEMO_ARGS=--workspace {workspace} --prefix {cluster.prefix}{short}"], cwd=repository, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, repository: Path) -> tuple[CampaignPaths, str]:
    """The campaign in a fresh workspace, and what was printed."""
    workspace = tmp_path_factory.mktemp("demo") / "workspace"
    printed = make_demo(repository, cluster, workspace)
    return CampaignPaths(workspace / "campaigns" / "demo"), printed


def test_it_decides_as_on_one_machine(demo: tuple[CampaignPaths, str]) -> None:
    paths = demo[0]
    state = read_state(paths, hashes=True)
    decisions = {v.id: v.decision for v in state.versions.values() if v.node.version.parents}
    assert all(decision is not None and decision.by == "gate" for decision in decisions.values())
    first = decisions["v0001"]
    assert first is not None and (first.decision, first.promoted) == ("keep", True)
    comparison = read_json(paths.version("v0001").comparisons()[0])["interval"]
    assert comparison["n_tasks"] == 160 and comparison["k"] == 8 and comparison["ci_low"] > 0
    incumbent = state.incumbent_before(None)
    if PROPOSALS is None:
        kinds = [decision.decision for name, decision in decisions.items() if decision and name != "v0001"]
        assert len(kinds) >= 3 and {"keep", "merge"} & set(kinds) and {"prune", "revert"} & set(kinds)
        assert incumbent != "v0001", "the search found something better than where it began"
    assert state.tasks is not None
    claim = final_claim(paths, state.tasks.splits["sealed"].task_set)
    assert claim is not None and claim.result.verdict == "better" and claim.read.candidate.version == incumbent
    assert claim.result.n_tasks == 256 and claim.result.k == 8 and claim.result.comparison.ci_low > 0
    assert len(paths.workspace.sealed_reads(claim.read.task_set)) == 1, "read once"


def test_evaluations_were_divided_and_are_whole(demo: tuple[CampaignPaths, str]) -> None:
    for version in demo[0].versions():
        shards = [job.shard for job in version.jobs() if job.kind == "evaluate"]
        assert shards == [0, 1]
        for suite, tasks in (("dev", 160), ("probe", 48)):
            meta = read_json(version.evaluation_complete(suite))["meta"]
            assert (meta["n_tasks"], meta["rollouts"], meta["missing"]) == (tasks, 8 * tasks, 0)


def test_the_preempted_training_lost_at_most_a_step(demo: tuple[CampaignPaths, str]) -> None:
    paths = demo[0]
    (found,) = interruptions(paths)
    assert (found.version, found.outcome, found.restart) == ("v0001", "stopped", 1)
    assert 12 <= found.resumed < 40 and 0 <= found.lost_steps <= 1
    assert None not in (found.ending, found.queue, found.python), "accounting has both runs"
    assert 0 < found.total < 180 and found.saving < 16, "saved within what a preemption leaves"
    attempt = read_attempt(paths.version("v0001").job("train", 0))
    assert [identity.restart for _, identity in attempt.claims] == [0, 1] and len(attempt.starts) == 1
    assert [attempt.results[number].outcome for number, _ in attempt.claims] == ["stopped", "done"]
    assert len([job for job in paths.version("v0001").jobs() if job.kind == "train"]) == 1, "the same attempt"
    steps = read_tables(sorted(paths.version("v0001").steps.glob("*.parquet")), STEP, ["step", "incarnation"]).to_pylist()
    assert sorted(row["step"] for row in steps) == list(range(1, 41)), "every step once"
    assert {row["incarnation"] for row in steps} == {number for number, _ in attempt.claims}
    rows = read_tables(sorted(paths.version("v0001").rollouts.glob("*.parquet")), ROLLOUT, ["trainer_step", "seed"])
    assert len(rows) == 40 * 16 * 8 == len(set(rows.column("seed").to_pylist()))


def test_the_controller_was_a_job_that_completed(demo: tuple[CampaignPaths, str], cluster: Cluster) -> None:
    paths = demo[0]
    told = cluster.run("sacct", "-nXP", "--format=State", f"--name={controller_name(paths, 'demo')}", "--starttime=now-1days").stdout.split()
    assert told == ["COMPLETED"], paths.controller_log.read_text()
    assert len(paths.launches()) == 1 and len(paths.generations()) == 2, "one controller, then finalize"
    assert read_json(paths.generation(1))["slurm_job_id"] is not None
    assert not cluster.run("squeue", "--noheader").stdout.strip(), "nothing is left in the queue"


def test_its_cost_is_accounted(demo: tuple[CampaignPaths, str]) -> None:
    record = cost_record(demo[0])
    training = next(row for row in record["work"] if (row["owner"], row["kind"]) == ("v0001", "train"))
    assert training["source"] == "accounted" and 0 < training["goodput"] < 1
    assert record["total"]["wall_hours"] > 0 and record["total"]["goodput"] > 0
    runs = read_json(demo[0].version("v0001").job("train", 0).cost)["runs"]
    assert len(runs) == 2 and runs[0]["job_id"] == runs[1]["job_id"], "requeued: both runs count"


def test_it_is_never_silent_and_says_all(demo: tuple[CampaignPaths, str]) -> None:
    paths, printed = demo
    seconds = [60 * int(m) + int(s) for m, s in re.findall(r"^\[(\d\d+):(\d\d)\] ", printed, re.M)]
    assert max(b - a for a, b in zip(seconds, seconds[1:], strict=False)) <= 20
    for words in ("$ evo-hpc doctor --cluster", "$ evo-hpc launch", "An urgent job", "$ evo-hpc finalize", "to training again", "goodput of train",
                  f"Report: {paths.report_html}", "make cluster-down"):
        assert words in printed
    assert paths.report_html.stat().st_size > 10_000


def test_again_it_only_shows(demo: tuple[CampaignPaths, str], cluster: Cluster, repository: Path) -> None:
    paths = demo[0]

    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in paths.root.rglob("*") if p.is_file() and "controller" not in p.parts}

    before = files()
    printed = make_demo(repository, cluster, paths.workspace.root)
    assert files() == before and "evo-hpc launch" not in printed and "to training again" in printed
    assert len(paths.launches()) == 1
