"""What the executor of this machine knows of a process that it has just started."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.local import LocalExecutor
from evo_hpc.jobs.spec import Intent
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json, write_json
from tests.controller.attempts import write_attempt


def test_a_start_that_cannot_be_seen_yet_is_not_dead(tmp_path: Path) -> None:
    """While a process turns into another by exec its command line is empty; the attempt has no other start left."""
    paths = CampaignPaths(tmp_path / "campaign")
    job = write_attempt(paths.version("v0001").job("train", 0), executor="local", recorded=None)
    job.incarnation(0).result.unlink()
    for _, claim in job.claims():
        claim.unlink()
    intent = Intent.model_validate(read_json(job.intent)).model_copy(update={"root": str(paths.root.resolve())})
    write_json(job.intent, intent.model_dump())
    executor = LocalExecutor(Cluster())
    dispatch = Dispatch(Cluster(), _local=executor)
    assert dispatch.observe(job).phase == "dead"
    executor._starting[job.root] = child = subprocess.Popen(["sleep", "60"])
    try:
        status = dispatch.observe(job)
        assert (status.phase, status.pid) == ("running", child.pid)
    finally:
        child.kill()
    deadline = time.monotonic() + 10
    while child.poll() is None:
        assert time.monotonic() < deadline
    assert dispatch.observe(job).phase == "dead"
