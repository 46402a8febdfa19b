"""A trainer of four ranks on two nodes by srun, the rollout role beside it: they meet, fail together, and a hang leaves its stacks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.store.atomic import read_json
from tests.crash.campaign import HERE as CRASH
from tests.slurm.campaigns import EVERY, Site, at_step, claims, ended, first_steps, starts, trained, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).resolve().parent
TWO_NODES: dict[str, Any] = {"train": {"nodes": 2, "tasks_per_node": 2, "srun": True}}


def ranks(site: Site, plans: str = "") -> dict[str, Any]:
    """The part of a profile by which the stand-ins are ranks, that fail as planned."""
    python = site.folder / "python-of-the-ranks"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{HERE / 'fake_ranks.py'}' \"$@\"\n")
    python.chmod(0o755)
    return {"python": str(python), "environment": {"PYTHONPATH": os.pathsep.join([str(CRASH), str(HERE)]), "FAKE_RANKS": plans}}


def test_ranks_meet_fail_together_and_are_tried_again(site: Site) -> None:
    """One attempt each: a rank that raises, one that exits, all that hang; when a person has looked, one that trains."""
    stall_minutes = 0.15 * max(1.0, os.getloadavg()[0] / 2)  # what the start of a rank takes here, and some more
    profile = {"slurm": TWO_NODES, "max_attempts": 6, "stall_minutes": stall_minutes, **ranks(site, "0:dies,1:exits,2:hangs")}
    paths = site.campaign(step_seconds=60, **profile)  # no step is made: one further would be no failure in a row
    with site.running(paths) as process:
        assert "3 attempts in a row failed by the machine's fault" in ended(process, code=1, seconds=300)
    site.profile(paths, step_seconds=0.3, **profile)
    with site.running(paths) as process:
        ended(process)
    site.same(paths)
    dies, exits, hangs, trains = (trained(paths, attempt) for attempt in range(4))
    met = [read_json(trains.incarnation(0).root / f"met-{rank}.json") for rank in range(4)]
    assert [each["heard"] for each in met] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert [each["local_rank"] for each in met] == ["0", "1", "0", "1"] and {each["world"] for each in met} == {4}
    assert met[0]["host"] == met[1]["host"] != met[2]["host"] == met[3]["host"] or os.getuid() != 0
    assert {each["addr"] for each in met} == {met[0]["host"]} or os.getuid() != 0
    errors = [read_json(job.record) for job in (dies, exits, hangs)]
    assert {(error["state"], error["blame"], error["starts"]) for error in errors} == {("failed", "infrastructure", 1)}
    assert "the last rank cannot go on" in errors[0]["error"]
    assert "exited with" in errors[1]["error"] and "the last rank says no more than this" in errors[1]["error"]
    assert "no progress" in errors[2]["error"]
    stacks = hangs.incarnation(0).log("trainer").read_text()
    assert stacks.count("hang_in_a_collective") >= 4, stacks
    assert "fake_roles.py" in hangs.incarnation(0).log("rollout").read_text()


def test_one_of_two_nodes_dies(nodes: Site) -> None:
    """Its ranks are gone before Slurm knows; that is a node's failure, not one of the attempt, which goes on where it saved."""
    site = nodes
    paths = site.campaign(step_seconds=0.5, slurm=TWO_NODES, **ranks(site, "0:notices"))
    job = trained(paths)
    with site.running(paths) as process:
        at_step(job, EVERY + 1)
        hosts = until(lambda: next((each.nodes for each in site.live(read_json(job.start(0))["slurm_name"]) if each.state == "RUNNING"), None))
        node = site.commands.hostnames(hosts)[-1]
        site.cluster.kill_node(node)
        began = time.monotonic()
        until(lambda: job.incarnation(0).result.exists() or time.monotonic() > began + 60)
        print(f"after {time.monotonic() - began:.1f} s: {job.incarnation(0).result.exists()}")
        site.mark("down", node)
        ended(process, seconds=200)
    for number in range(len(claims(job))):
        result = job.incarnation(number).result
        print(job.incarnation(number).log("trainer").read_text(), result.read_text() if result.exists() else "no result")
    site.same(paths)
    assert read_json(job.incarnation(0).result)["outcome"] == "failed" and read_json(job.record)["state"] == "done", "one attempt"
    assert len(claims(job)) == 2 and first_steps(job) == [1, EVERY + 1], claims(job)
    told = starts(job)
    assert len(told) == 1 or told[1]["after"] == "node_fail", told
