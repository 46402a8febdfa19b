"""Every state and reason of Slurm, and what it means for a job."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.slurm.states import LIVES, ending, held, life
from evo_hpc.jobs.spec import Ending

TERMINAL = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
OTHERS = {
    "PENDING": "queued", "CONFIGURING": "queued", "POWER_UP_NODE": "queued", "REQUEUED": "queued", "REQUEUE_FED": "queued", "REQUEUE_HOLD": "queued",
    "RESV_DEL_HOLD": "queued", "SPECIAL_EXIT": "queued", "REVOKED": "queued", "LAUNCH_FAILED": "queued", "RECONFIG_FAIL": "queued",
    "POWERING_DOWN": "queued",
    "RUNNING": "running", "SUSPENDED": "running", "STOPPED": "running", "RESIZING": "running", "SIGNALING": "running", "UPDATE_DB": "running",
    "COMPLETING": "ending", "STAGE_OUT": "ending", "EXPEDITING": "ending",
}


def job(state: str, reason: str = "", **more: object) -> SlurmJob:
    return SlurmJob("evo-job", "12", None, state, 100.0, reason, **more)  # type: ignore[arg-type]


def test_every_state_has_its_life() -> None:
    assert {state for state in LIVES if life(state) == "terminal"} == TERMINAL
    assert {state: life(state) for state in LIVES if life(state) != "terminal"} == OTHERS


@given(st.text())
def test_a_word_that_is_not_known_waits(word: str) -> None:
    assert life(word) == "queued" or word in LIVES


def manual() -> str:
    pages = (Path(folder, "man1", "squeue.1.gz") for folder in ("/usr/share/man", "/usr/local/share/man"))
    return "".join(gzip.decompress(page.read_bytes()).decode(errors="replace") for page in pages if page.exists())


def test_the_table_holds_every_state_that_the_installed_squeue_documents() -> None:
    section = re.search(r'^\.SH "?JOB STATE CODES"?$(.*?)^\.SH ', manual(), re.DOTALL | re.MULTILINE)
    states = set(re.findall(r"^\\fB[A-Z]{1,3}\s+([A-Z_]+)\\fR", section[1].replace("\\_", "_"), re.MULTILINE)) if section else set()
    if shutil.which("squeue"):  # newer ones list them themselves
        listed = subprocess.run(["squeue", "--helpstate"], capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            states |= set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", listed.stdout))
    if not states:
        pytest.skip("no manual page of squeue here, and no squeue that lists its states")
    assert len(states) > 15 and states <= set(LIVES)


@pytest.mark.parametrize(("state", "how"), [
    ("CANCELLED", "user_cancelled"), ("PREEMPTED", "preempted"), ("TIMEOUT", "timeout"), ("DEADLINE", "timeout"), ("OUT_OF_MEMORY", "oom"),
    ("NODE_FAIL", "node_fail"), ("BOOT_FAIL", "node_fail"), ("COMPLETED", "infrastructure"),
])
def test_how_a_state_ends_a_job(state: str, how: Ending) -> None:
    assert ending(job(state)) == how


@pytest.mark.parametrize(("code", "signal", "reason", "how"), [
    (1, None, "NonZeroExitCode", "code_error"), (2, None, "", "code_error"), (3, None, "", "code_error"), (4, None, "", "infrastructure"),
    (0, 9, "JobLaunchFailure", "infrastructure"), (0, 53, "JobLaunchFailure", "infrastructure"), (None, None, "NonZeroExitCode", "infrastructure"),
    (0, 9, "OutOfMemory", "oom"), (137, None, "OutOfMemory", "oom"), (9, None, "Out_Of_Memory", "oom"), (0, 9, "", "infrastructure"),
    (137, None, "", "infrastructure"),
    (1, None, "OutOfMemory", "code_error"), (1, 15, "", "infrastructure"),
])
def test_how_a_failure_ends_a_job(code: int | None, signal: int | None, reason: str, how: Ending) -> None:
    assert ending(job("FAILED", reason, exit_code=code, signal=signal)) == how


@pytest.mark.parametrize("state", sorted({*LIVES, "BRAND_NEW"}))
def test_an_ending_is_of_an_end_only(state: str) -> None:
    if life(state) == "terminal":
        assert ending(job(state)) in get_args(Ending)
    else:
        with pytest.raises(ValueError, match=state):
            ending(job(state))


@pytest.mark.parametrize(("reason", "command"), [
    ("JobHeldUser", "scontrol release 12"), ("JobHeldAdmin", "scontrol release 12"), ("launch failed requeued held", "scontrol release 12"),
    ("launch_failed_requeued_held", "scontrol release 12"), ("job requeued in held state", "scontrol release 12"),
    ("JobHoldMaxRequeue", "scontrol release 12"),
    ("DependencyNeverSatisfied", "scancel 12"), ("BadConstraints", "scancel 12"), ("PartitionDown", "scancel 12"),
    ("PartitionInactive", "scancel 12"),
    ("PartitionNodeLimit", "scancel 12"), ("PartitionTimeLimit", "scontrol update jobid=12 timelimit"), ("InvalidQOS", "scancel 12"),
    ("AccountNotAllowed", "scancel 12"), ("AssocGrpCPUMinutesLimit", "scancel 12"), ("AssocGrpGRESMinutes", "scancel 12"),
    ("QOSGrpWallLimit", "scancel 12"),
    ("AssocMaxWallDurationPerJobLimit", "scancel 12"), ("QOSMaxGRESPerJob", "scancel 12"), ("QOSMinGRES", "scancel 12"),
    ("ReservationDeleted", "scancel 12"),
])
def test_what_waits_for_a_person_says_so_and_names_the_command(reason: str, command: str) -> None:
    words = held(job("PENDING", reason))
    assert words is not None and f"`{command}" in words


@pytest.mark.parametrize("state", ["REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"])
def test_states_that_hold(state: str) -> None:
    assert "scontrol release 12_3" in str(held(SlurmJob("evo-job", "12", 3, state, 100.0)))


@pytest.mark.parametrize("reason", [
    "", "None", "Priority", "Resources", "Dependency", "BeginTime", "Licenses", "JobArrayTaskLimit", "Reservation",
    "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
    "Cleaning", "Prolog", "AssocGrpCpuLimit", "QOSGrpGRES", "AssocGrpCPURunMinutesLimit", "QOSMaxJobsPerUserLimit", "AssocMaxJobsLimit",
    "QOSMaxCpuPerUserLimit",
])
def test_what_passes_by_itself_is_not_held(reason: str) -> None:
    assert held(job("PENDING", reason)) is None


@pytest.mark.parametrize("state", sorted(set(LIVES) - {"PENDING", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}))
def test_only_what_waits_is_held(state: str) -> None:
    assert held(job(state, "JobHeldUser")) is None
