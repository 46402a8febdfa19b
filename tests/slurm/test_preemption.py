"""Training that is warned, preempted, cut short by its limit or thrown out unwarned, on a real cluster: it goes on where it saved."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.atomic import read_json
from tests.crash.campaign import STEPS
from tests.slurm.campaigns import EVERY, Site, at_step, claims, ended, first_steps, kill_launcher, saved, starts, status, trained, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCAVENGE = {"train": {"partition": "scavenge", "sbatch_arguments": ["--nodelist=n4", "--exclusive"]}}


def running_id(site: Site, paths: CampaignPaths) -> str:
    """Slurm's id of the training job, once it runs."""
    return until(lambda: next((job["slurm_job"] for job in status(paths)["jobs"] if job["kind"] == "train" and job["state"] == "running"), None))


def warned(job: JobPaths, disturb: Callable[[], object], step: int, incarnation: int) -> None:
    """Disturb an incarnation at a step: it saves what it has, and the next one goes on from there, with at most the step in hand lost."""
    at_step(job, step, incarnation)
    disturb()
    result = until(lambda: read_json(path) if (path := job.incarnation(incarnation).result).exists() else None, what=f"result of incarnation {incarnation}")
    assert (result["outcome"], result["stopped_by"]) == ("stopped", "warning"), result
    until(lambda: job.claim(incarnation + 1).exists(), what=f"incarnation {incarnation + 1}")
    done = read_json(job.incarnation(incarnation).progress)["step"]
    assert saved(job, incarnation)[-1] >= done, "all that was done is saved"


def preempt(site: Site) -> None:
    """A job of higher priority takes the node for a second."""
    done = site.cluster.run("sbatch", "--partition=urgent", "--nodelist=n4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    assert done.returncode == 0, done.stderr


def test_warned_thrice(site: Site) -> None:
    """By the time limit, a preemption, and by hand: each time the same Slurm job runs again, one restart further."""
    paths = site.campaign(step_seconds=4, slurm=SCAVENGE)
    job = trained(paths)
    with site.running(paths) as process:
        number = running_id(site, paths)
        # Slurm looks at limits twice a minute, and warns half a minute too early rather than too late.
        warned(job, lambda: site.scontrol("update", f"jobid={number}", "EndTime=now+45"), 0, 0)
        shown = next(each for each in status(paths)["jobs"] if each["job"] == "train-000")
        assert (shown["state"], shown["slurm_job"], shown["endings"]) in [("running", number, []), ("queued", number, [])], shown
        warned(job, lambda: preempt(site), saved(job, 0)[-1] + 1, 1)
        if saved(job, 1)[-1] < STEPS - 2:
            warned(job, lambda: site.cluster.run("scancel", "--signal=USR2", "--batch", number), saved(job, 1)[-1] + 1, 2)
        ended(process, seconds=180)
    site.same(paths)
    runs = claims(job)
    assert len(runs) >= 3 and runs == [(0, restart) for restart in range(len(runs))] and len(starts(job)) == 1, "one submission, requeued"
    ids = {read_json(path)["slurm_job_id"] for _, path in job.claims()}
    assert ids == {number}
    record = read_json(job.record)
    assert (record["state"], record["ending"], record["incarnation"]) == ("done", None, len(runs) - 1)
    lasts = [saved(job, incarnation)[-1] for incarnation in range(len(runs) - 1)]
    assert first_steps(job) == [1, *(last + 1 for last in lasts)], "resumed at the saved step"


@pytest.mark.rare
def test_one_that_may_not_be_requeued_is_submitted_anew(site: Site) -> None:
    train = {**SCAVENGE["train"], "requeue": False}
    paths = site.campaign(step_seconds=0.8, slurm={"train": train})
    job = trained(paths)
    with site.running(paths) as process:
        first = running_id(site, paths)
        warned(job, lambda: preempt(site), 3, 0)
        ended(process)
    site.same(paths)
    assert claims(job) == [(0, 0), (1, 0)]
    second = starts(job)[1]
    assert second["after"] is None and "stopped and saved" in second["why"], "a stop that saved is no failure"
    assert read_json(job.claim(1))["slurm_job_id"] != first
    assert first_steps(job) == [1, saved(job, 0)[-1] + 1]


@pytest.mark.rare
def test_without_a_warning_the_steps_since_the_last_checkpoint_are_lost(site: Site) -> None:
    """Requeued by an administrator, then killed: no save, so what counts is `checkpoint.every`."""
    paths = site.campaign(step_seconds=0.8)
    job = trained(paths)
    with site.running(paths) as process:
        number = running_id(site, paths)
        lost = at_step(job, EVERY + 2)
        site.scontrol("requeue", number)
        at_step(job, 2 * EVERY + 1, 1)
        before = int(time.time())  # an ending's time is in Slurm's whole seconds
        kill_launcher(job)
        ended(process)
    site.same(paths)
    assert claims(job) == [(0, 0), (0, 1), (1, 0)]
    again = starts(job)[1]
    assert again["after"] == "infrastructure" and "failed" in again["why"] and number in again["why"], again
    assert again["written_at"] > before + 0.9, "after the back-off of a failure of the machine"
    firsts = first_steps(job)
    assert lost + 3 - firsts[1] <= EVERY + 2 and firsts[1] > EVERY and firsts[2] == 2 * EVERY + 1, firsts


@pytest.mark.rare
def test_a_part_of_an_array_is_preempted(site: Site) -> None:
    """The one whose node is taken is requeued, and makes only what is missing; the other part goes on."""
    evaluate = {"partition": "scavenge", "sbatch_arguments": ["--exclude=n[1-2]", "--exclusive"]}
    paths = site.campaign(
        step_seconds=0.05, slurm={"shards": 2, "evaluate": evaluate, "poll_seconds": 0.5}, environment={"FAKE_EVALUATE_SECONDS": "12"},
    )
    parts = [paths.version("v0001").job("evaluate", 0, shard) for shard in range(2)]
    with site.running(paths) as process:
        hit = until(lambda: next((p for p in parts for j in site.live(read_json(p.start(0))["slurm_name"] if p.start(0).exists() else "none")
                                  if j.array_index == p.shard and j.state == "RUNNING" and j.nodes == "n4"), None), what="a part on n4")
        until(lambda: hit.incarnation(0).progress.exists() and read_json(hit.incarnation(0).progress).get("step", 0) > 0, what="its first chunk")
        preempt(site)
        until(lambda: hit.claim(1).exists(), what="its second run")
        ended(process)
    site.same(paths)
    other = next(part for part in parts if part != hit)
    assert claims(hit) == [(0, 0), (0, 1)] and len(starts(hit)) == 1 and claims(other) == [(0, 0)]
    results = [read_json(hit.incarnation(number).result) for number in range(2)]
    assert [each["outcome"] for each in results] == ["stopped", "done"]
    assert read_json(hit.record)["state"] == read_json(other.record)["state"] == "done"
