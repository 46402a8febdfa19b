"""What a role of several ranks comes to: the word of the rank that failed first, not what srun did to the others, nor theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.dispatch import endings
from evo_hpc.dispatch.endings import log_tail
from evo_hpc.dispatch.memory import killed_for_memory
from evo_hpc.paths import IncarnationPaths, JobPaths

LOG = """starting
the last rank says no more than this
srun: error: n2: task 3: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-30T08:57:36 ***
srun: error: n2: task 2: Killed
srun: error: n1: tasks 0-1: Killed
srun: Force Terminated StepId=2.0
"""


DONE, STOPPED = {"outcome": "done", "outputs": {"policy": "p"}}, {"outcome": "stopped", "error": "on request"}
FAILED = {"outcome": "failed", "blame": "infrastructure", "error": "why"}


def incarnation_of(folder: Path, text: str, **ranks: dict[str, Any]) -> IncarnationPaths:
    """Whose trainer left that log, and whose ranks (`r0`, `r1`) have said something."""
    incarnation = JobPaths(folder).incarnation(0)
    incarnation.log("trainer").parent.mkdir(parents=True)
    incarnation.log("trainer").write_text(text)
    for rank, told in ranks.items():
        incarnation.role_outcome("trainer", int(rank[1:])).write_text(json.dumps(told))
    return incarnation


def tail_of(folder: Path, text: str) -> str:
    return log_tail(incarnation_of(folder, text).log("trainer"))


def outcome_of(incarnation: IncarnationPaths, code: int, stopping: bool = False) -> dict[str, Any]:
    return endings.outcome_of(
        "trainer", code, incarnation, asked_to_stop=stopping, cut_off_after=None, killed_before=killed_for_memory(), behind_srun=True,
    )


@pytest.mark.parametrize("ranks, code, stopping, outcome", [
    ({"r0": DONE, "r1": DONE}, 0, False, "done"),
    ({"r0": DONE}, 1, False, "done"),  # another rank fell over at its end: the outputs are whole
    ({"r1": DONE}, 1, False, "failed"),  # the first one died without a word, and its outputs with it
    ({"r1": DONE}, 0, False, "failed"),
    ({"r1": STOPPED}, 1, False, "failed"),  # ended with it
    ({"r1": STOPPED}, 1, True, "stopped"),
    ({"r0": STOPPED, "r1": STOPPED}, 0, False, "stopped"),
    ({"r0": DONE, "r1": FAILED}, 1, False, "failed"),
    ({}, 1, False, "failed"),
])
def test_what_the_ranks_come_to(tmp_path: Path, ranks: dict[str, dict[str, Any]], code: int, stopping: bool, outcome: str) -> None:
    found = outcome_of(incarnation_of(tmp_path, "last words", **ranks), code, stopping)
    assert found["outcome"] == outcome and (outcome != "done" or found["outputs"] == {"policy": "p"})


NODE_LOG = """starting
srun: error: Node failure on n2
slurmstepd-n1: error: *** STEP 1.1 ON n1 CANCELLED AT 2026-11-30T12:55:29 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***
srun: Job step aborted: Waiting up to 5 seconds for job step to finish.
"""


def test_a_lost_node_is_a_nodes_failure(tmp_path: Path) -> None:
    """The log is a recording."""
    found = outcome_of(incarnation_of(tmp_path, NODE_LOG), 143)
    assert (found["outcome"], found["ending"], found["error"]) == ("failed", "node_fail", "trainer lost a node: Node failure on n2")
    assert "ending" not in outcome_of(incarnation_of(tmp_path / "other", LOG), 1)


@pytest.mark.parametrize("killed, log, told, ending", [
    (1, "Connection closed by peer", FAILED, "oom"), (0, NODE_LOG, FAILED, "node_fail"), (0, LOG, FAILED, None),
    (1, LOG, {**FAILED, "ending": "oom", "error": "token_budget"}, "oom"), (1, LOG, {**FAILED, "blame": "user"}, None),
])
def test_ranks_that_lost_a_peer_do_not_hide_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int, log: str, told: dict[str, Any], ending: str | None
) -> None:
    monkeypatch.setattr(endings, "killed_for_memory", lambda: killed)
    found = endings.outcome_of(
        "trainer", 1, incarnation_of(tmp_path, log, r0=told), asked_to_stop=False, cut_off_after=None, killed_before=0, behind_srun=True,
    )
    assert found["outcome"] == "failed" and found.get("ending") == ending
    assert (found["error"] == told["error"]) == (ending is None or told.get("ending") is not None)


def test_the_failed_ranks_words_are_told(tmp_path: Path) -> None:
    """The log is a recording, of four ranks on two nodes of which the last one exits."""
    told = tail_of(tmp_path, LOG)
    assert told == "starting | the last rank says no more than this | srun: error: n2: task 3: Exited with exit code 1"


def test_where_slurm_alone_spoke_that_is_told(tmp_path: Path) -> None:
    assert tail_of(tmp_path, "srun: error: n2: task 2: Killed\n") == "srun: error: n2: task 2: Killed"
