"""What `make test` tries on a real cluster: a campaign whose training is requeued halfway ends as an undisturbed one."""

from __future__ import annotations

import pytest

from evo_hpc.store.atomic import read_json
from tests.slurm.campaigns import EVERY, Site, at_step, claims, ended, first_steps, starts, trained

pytestmark = pytest.mark.timeout(300)


def test_a_campaign_on_a_real_cluster(site: Site) -> None:
    paths = site.campaign(step_seconds=0.3, slurm={"analyse": {"cpus_per_task": 1}})
    job = trained(paths)
    with site.running(paths) as process:
        at_step(job, EVERY + 1)
        number = read_json(job.submission(0))["job_id"]
        site.scontrol("requeue", number)
        ended(process)
    site.same(paths)
    assert claims(job) == [(0, 0), (0, 1)] and len(starts(job)) == 1, "one submission, which Slurm ran twice"
    assert first_steps(job)[1] > EVERY, "it went on where it had saved"
    done = site.cluster.run("sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", f"--jobs={number}", "--format=State")
    assert done.stdout.split() == ["REQUEUED", "COMPLETED"], done
    analysis = paths.version("v0001").job("analyse", 0)
    assert read_json(analysis.record)["state"] == "done" and paths.version("v0001").analysis("h0001").is_dir()
    number = read_json(analysis.submission(0))["job_id"]
    done = site.cluster.run("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}", "--format=State")
    assert done.stdout.split() == ["COMPLETED"], done
