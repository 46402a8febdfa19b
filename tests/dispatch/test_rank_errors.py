"""Of a step that ended together, what is told is the rank that failed first, not what srun did to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch.launcher import Launcher
from evo_hpc.paths import JobPaths

LOG = """starting
the last rank says no more than this
srun: error: n2: task 3: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-30T08:57:36 ***
srun: error: n2: task 2: Killed
srun: error: n1: tasks 0-1: Killed
srun: Force Terminated StepId=2.0
"""


def tail_of(folder: Path, text: str) -> str:
    job = JobPaths(folder)
    incarnation = job.incarnation(0)
    incarnation.log("trainer").parent.mkdir(parents=True)
    incarnation.log("trainer").write_text(text)
    return Launcher(job, cast(Any, None), incarnation, cast(Any, None), Cluster())._log_tail("trainer")


def test_the_failed_ranks_words_are_told(tmp_path: Path) -> None:
    """The log is a recording, of four ranks on two nodes of which the last one exits."""
    told = tail_of(tmp_path, LOG)
    assert told == "starting | the last rank says no more than this | srun: error: n2: task 3: Exited with exit code 1"


def test_where_slurm_alone_spoke_that_is_told(tmp_path: Path) -> None:
    assert tail_of(tmp_path, "srun: error: n2: task 2: Killed\n") == "srun: error: n2: task 2: Killed"
