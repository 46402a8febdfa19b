"""Nodes, daemons, processes and disks that die under a campaign, and people who take its jobs away, on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.dispatch.slurm.states import life
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.processes import find_by_argument
from tests.cluster import Cluster
from tests.cluster.fixture import clusters_folder, private_cluster
from tests.cluster.settings import NODES
from tests.slurm.campaigns import EVERY, Site, at_step, claims, ended, evo, first_steps, kill_launcher, said_of, site_of, starts, status, trained, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def node_of(site: Site, paths: CampaignPaths, restart: int) -> str:
    """Where the training job runs, in that run of it."""
    job = trained(paths)
    until(lambda: job.claim(restart).exists(), what=f"run {restart} of {job.root}")
    host = until(lambda: next((each.nodes for each in site.live(read_json(job.start(0))["slurm_name"]) if each.state == "RUNNING"), None))
    return str(host)


@pytest.mark.rare
def test_a_node_dies(nodes: Site) -> None:
    site = nodes
    paths = site.campaign(step_seconds=0.5)
    job = trained(paths)
    with site.running(paths) as process:
        at_step(job, EVERY + 1)
        node = node_of(site, paths, 0)
        site.cluster.kill_node(node)
        site.mark("down", node)
        ended(process, seconds=180)
    assert claims(job) == [(0, 0), (0, 1)]
    site.same(paths)
    assert len(starts(job)) == 1 and first_steps(job)[:2] == [1, EVERY + 1], "requeued by Slurm, and at most `every` steps are lost"


def test_a_slurmd_dies_and_its_step_lives_on_beside_the_requeued_copy(nodes: Site) -> None:
    """The older notices that it is superseded, and commits nothing."""
    site = nodes
    paths = site.campaign(step_seconds=3)
    job = trained(paths)
    with site.running(paths) as process:
        at_step(job, 1)
        node = node_of(site, paths, 0)
        alive = find_by_argument("--job", str(job.root))
        site.cluster.kill_slurmd(node)
        site.mark("down", node)
        until(lambda: job.claim(1).exists(), what="the requeued copy")
        assert [pid for pid in alive if Path(f"/proc/{pid}").exists()], "the old step is there beside its copy"
        ended(process, seconds=180)
    assert claims(job) == [(0, 0), (0, 1)]
    until(lambda: not [pid for pid in alive if Path(f"/proc/{pid}").exists()], 30, "the end of the old step")
    site.same(paths)
    assert len(starts(job)) == 1 and not job.incarnation(0).result.exists(), "the superseded one says nothing"


def test_a_role_dies_and_the_work_is_done_by_another_attempt(site: Site) -> None:
    paths = site.campaign(step_seconds=0.5)
    job = trained(paths)
    with site.running(paths) as process:
        at_step(job, EVERY + 1)
        trainer = next(pid for pid in find_by_argument("--job", str(job.root)) if b"\0trainer\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(trainer, signal.SIGKILL)
        ended(process)
    site.same(paths)
    record = read_json(job.record)
    assert (record["state"], record["blame"], record["ending"]) == ("failed", "infrastructure", None)
    assert "trainer was killed by signal 9 (SIGKILL)" in record["error"]
    assert len(starts(trained(paths, 1))) == 1 and first_steps(trained(paths, 1)) == [EVERY + 1], "the other attempt goes on from the checkpoint"


def test_memory_is_exceeded(begun: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster of its own with control groups, where the kernel really kills."""
    with private_cluster(clusters_folder()) as any_cluster:
        cluster = Cluster(any_cluster.prefix, accounting=False, cgroup=True)
        try:
            cluster.up()
        except UserError as error:
            pytest.skip(f"no control groups here: {error}")
        with site_of(cluster, tmp_path, begun, monkeypatch) as site:
            paths = site.campaign(step_seconds=0.1, slurm={"train": {"memory": "70M"}}, max_attempts=1)
            with site.running(paths) as process:
                output = ended(process, code=1)
            record = read_json(trained(paths).record)
            print(record)
            assert (record["state"], record["ending"], record["blame"]) == ("failed", "oom", "infrastructure"), record
            assert "`memory` in cluster.yaml" in record["error"] and "`memory` in cluster.yaml" in output
            site.profile(paths, step_seconds=0.1, slurm={"train": {"memory": "1000M"}}, max_attempts=2)
            with site.running(paths) as process:
                ended(process)
            site.same(paths)


@pytest.mark.rare
def test_the_disk_fills_up(site: Site, mounted_disk: Callable[[str], Path]) -> None:
    from tests.dispatch.test_full_disk import fill

    disk = mounted_disk("300m")
    site.folder = disk
    paths = site.campaign(step_seconds=0.7, max_attempts=1)
    job = trained(paths)
    with site.running(paths) as process:
        at_step(job, EVERY + 1)
        fill(disk / "filler")
        output = ended(process, code=1, seconds=90)
    assert "no space left" in output.lower() and "Traceback" not in output, output
    refused = evo("run", str(paths.root))
    assert refused.returncode == 2 and "MiB free" in refused.stderr
    until(lambda: not site.live(), 60, "the end of the job")
    (disk / "filler").unlink()
    with site.running(paths) as process:
        ended(process)
    site.same(paths)


def test_slurmctld_dies_right_after_a_submission_while_accounting_is_down(site: Site) -> None:
    """Whatever it forgot, and whatever ids it gives out again: every piece of work is done, and is done once."""
    cluster = site.cluster
    cluster.stop_dbd()
    try:
        paths = site.campaign(step_seconds=0.1)
        job = trained(paths)
        with site.running(paths) as process:
            until(lambda: job.submission(0).exists(), what="the submission")
            cluster.kill_ctld()
            lost = read_json(job.submission(0))["job_id"]
            until(lambda: process.poll() is not None or "Slurm does not answer" in said_of(paths) or trained(paths).record.exists(), 60)
            cluster.start_dbd()  # a slurmctld that has no state yet does not start without it
            cluster.start_ctld()
            other = cluster.run("sbatch", "--parsable", "--output=/dev/null", "--job-name=stranger", "--wrap=sleep 30").stdout.strip()
            ended(process, seconds=180)
        # A job that it replayed, whose first life it forgot, was cancelled by the controller, or finds all done.
        print(f"job {lost} was submitted, a stranger got {other}; starts: {starts(job)}")
        site.same(paths)
        assert life(next(each.state for each in site.commands.queue() if each.id == other)) in ("running", "queued"), "another's job is left alone"
    finally:
        if cluster.running()["slurmdbd"] is None:
            cluster.start_dbd()
        if cluster.running()["slurmctld"] is None:
            cluster.start_ctld()
        site.mark("resume", *NODES)  # a node that was asked to launch a job a second time is drained


@pytest.mark.rare
def test_a_cluster_without_accounting_that_forgets(begun: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is told by squeue alone; then a job is gone from Slurm's memory while no controller looks, as one that was purged."""
    with private_cluster(clusters_folder()) as any_cluster:
        cluster = Cluster(any_cluster.prefix, accounting=False)
        cluster.up()
        with site_of(cluster, tmp_path, begun, monkeypatch) as site:
            paths = site.campaign(step_seconds=0.6)
            job = trained(paths)
            with site.running(paths) as process:
                at_step(job, EVERY + 1)
                kill_launcher(job)
                at_step(job, 2 * EVERY + 1, 1)
                process.kill()
            cluster.kill_ctld()
            for path in cluster.layout.state.glob("job_state*"):
                path.unlink()
            cluster.start_ctld()
            until(lambda: not find_by_argument("--job", str(job.root)), what="the end of a job that Slurm does not know")
            beat = job.incarnation(1).heartbeat
            beat.write_text(json.dumps({**read_json(beat), "time": time.time() - 100}))  # else it would be waited for, a minute long
            with site.running(paths) as process:
                ended(process)
            site.same(paths)
            told = [(start["after"], start["why"]) for start in starts(job)]
            assert [after for after, _ in told[:2]] == [None, "infrastructure"], told
            assert first_steps(job)[-1] == 2 * EVERY + 1 or len(told) == 2, told


def test_people_cancel_and_hold(site: Site) -> None:
    paths = site.campaign(step_seconds=0.7)
    job = trained(paths)
    with site.running(paths) as process:
        at_step(job, EVERY + 1)
        number = read_json(job.submission(0))["job_id"]
        site.scontrol("requeuehold", number)
        said = until(lambda: words if "scontrol release" in (words := said_of(paths)) else None, what="how to release it")
        assert f"`scontrol release {number}`" in said and "held" in said, said
        site.scontrol("release", number)
        at_step(job, EVERY + 2, 1)
        site.cluster.run("scancel", number)
        output = ended(process, code=2)
    assert "cancelled by hand" in output and "for a new attempt" in output, output
    record = read_json(job.record)
    assert (record["state"], record["blame"], record["ending"], len(starts(job))) == ("failed", "user", "user_cancelled", 1)
    shown = next(each for each in status(paths)["jobs"] if each["job"] == "train-000")
    assert shown["state"] == "failed" and "cancelled by hand" in shown["error"]
    with site.running(paths) as process:
        ended(process)
    site.same(paths)
    assert claims(job) == [(0, 0), (0, 1)] and first_steps(trained(paths, 1))[0] > EVERY
