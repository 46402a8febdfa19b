"""Slurm's commands as this package runs them: argument lists, limits, environment, and what each failure means; programs stand in for Slurm."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.commands import (
    Commands, NoAccounting, SlurmBusy, SlurmError, SlurmMissing, SlurmRefused, SlurmUnavailable, environment_for_jobs, refusal,
)
from evo_hpc.dispatch.slurm.errors import LONGEST_WORDS, clean
from evo_hpc.errors import UserError

ME = pwd.getpwuid(os.getuid()).pw_name
DOWN = "Unable to contact slurm controller (connect failure)"
POLICY = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
UNABLE = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"


class Programs:
    """Programs of Slurm's names that log how they were called, and answer as told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        for tool in ("cat", "sleep", "setsid", "sh"):  # and none of this host's own Slurm
            (folder / tool).symlink_to(shutil.which(tool) or "/nonexistent")
        self.commands = Commands(20.0, {"PATH": str(folder)})

    def add(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\nfor word in "{name}" "$@"; do printf "%s\\t" "$word"; done >> "{self.log}"\necho >> "{self.log}"\n{body}\n')
        path.chmod(0o755)

    def calls(self) -> list[list[str]]:
        return [line.split("\t")[:-1] for line in self.log.read_text().splitlines()]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def test_the_questions_are_put_as_agreed(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "somebody-else")
    programs.add("squeue", "echo '5|N/A|n|RUNNING|None|100|110|900|n1|1|5'; echo nonsense")
    programs.add("sacct", "echo '5|5|n|FAILED|1:0|100|110|120|10|cpu=1|n1'")
    jobs = programs.commands.queue()
    assert [job.id for job in jobs] == ["5"] and jobs.problems == ("nonsense",)
    assert [job.exit_code for job in programs.commands.accounting(86_400.0)] == [1]
    squeue, sacct = programs.calls()
    assert squeue == ["squeue", "--noheader", "--array", "--states=all", f"--user={ME}", "--format=%F|%K|%j|%T|%r|%V|%S|%e|%N|%D|%i"]
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(86_400))
    assert sacct == [
        "sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", f"--user={ME}", f"--starttime={start}",
        "--format=JobIDRaw,JobID,JobName,State,ExitCode,Submit,Start,End,ElapsedRaw,AllocTRES,NodeList",
    ]


def test_words_reach_the_program_as_they_are(programs: Programs) -> None:
    hostile = ["a b", "$(touch x)", ";", "'", '"', "*", "%j", "{{ x }}"]
    programs.add("scontrol", "echo out; echo err >&2; exit 3")
    answer = programs.commands.run("scontrol", *hostile)
    assert (answer.code, answer.out, answer.err) == (3, "out\n", "err\n") and programs.calls() == [["scontrol", *hostile]]


def test_a_program_that_is_not_there(programs: Programs) -> None:
    with pytest.raises(SlurmMissing, match="squeue: no such program.*executor: local") as caught:
        Commands(20.0, {"PATH": str(programs.folder)}).queue()
    assert caught.value.exit_code == 2


def test_a_command_that_takes_too_long_is_killed_with_all_that_it_started(programs: Programs) -> None:
    pids = programs.folder / "pids"
    programs.add("sbatch", f"echo '{UNABLE}' >&2; sleep 60 & echo $! $$ > {pids}; wait")
    begin = time.monotonic()
    with pytest.raises(SlurmUnavailable, match="no end after 2 s.*temporarily unable"):
        programs.commands.run("sbatch", seconds=2)
    assert time.monotonic() - begin < 15
    for pid in pids.read_text().split():
        stat = Path("/proc", pid, "stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_what_escapes_the_group_does_not_hold_the_answer_up(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evo_hpc.dispatch.slurm.commands._AFTER_KILL_SECONDS", 0.2)
    escaped = programs.folder / "escaped"
    programs.add("sinfo", f"setsid sh -c 'echo $$ > {escaped}; exec sleep 60' & sleep 60")
    with pytest.raises(SlurmUnavailable):
        programs.commands.run("sinfo", seconds=1)
    os.kill(int(escaped.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("program", "code", "err", "kind"), [
    # Recorded from 22.05.8 with its controller, its database or its limits in that state.
    ("squeue", 1, f"slurm_load_jobs error: {DOWN}\n", SlurmUnavailable),
    ("sbatch", 1, f"sbatch: error: Batch job submission failed: {DOWN}", SlurmUnavailable),
    ("scontrol", 1, "Unexpected message received for job 1", SlurmUnavailable),
    ("sacct", 1, "sacct: error: Sending PersistInit msg: Connection refused\nsacct: error: Problem talking to the database", SlurmUnavailable),
    ("sacct", 1, "Slurm accounting storage is disabled\n", NoAccounting),
    ("squeue", 1, "squeue: error: s_p_parse_file: cannot stat file /x\nsqueue: fatal: Unable to process configuration file", SlurmUnavailable),
    ("sbatch", 1, f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", SlurmBusy),
    ("sbatch", 1, f"{UNABLE}\nsbatch: error: Batch job submission failed: Resource temporarily unavailable", SlurmBusy),
    ("sbatch", 1, "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", SlurmRefused),
    ("sbatch", 1, "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition name specified",
        SlurmRefused),
    ("sbatch", 1, "sbatch: error: Batch job submission failed: Requested node configuration is not available", SlurmRefused),
    ("scontrol", 1, "Invalid job id specified for job 99999", SlurmRefused),
    # By the lists of slurm_errno and of users' reports.
    ("sbatch", 1, "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", SlurmUnavailable),
    ("sbatch", 1, "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", SlurmUnavailable),
    ("sbatch", 1, "sbatch: error: Batch job submission failed: Communication connection failure", SlurmUnavailable),
    ("sbatch", 1, "sbatch: error: Munge encode failed: Failed to access \"/run/munge/munge.socket.2\"", SlurmUnavailable),
    ("sbatch", 1, UNABLE, SlurmUnavailable),
    ("sbatch", 1, f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{POLICY}", SlurmBusy),
    ("sbatch", 1, f"sbatch: error: QOSMaxGRESPerJob\n{POLICY}", SlurmRefused),
    ("sbatch", 1, POLICY, SlurmRefused),
    ("sbatch", 1, "", SlurmUnavailable),
    ("sbatch", -15, "sbatch: error: Invalid qos specification", SlurmUnavailable),
])
def test_what_a_failure_means(program: str, code: int, err: str, kind: type[SlurmError]) -> None:
    error = refusal([f"/usr/bin/{program}", "x"], code, err)
    assert type(error) is kind and str(error).startswith(f"{program}: ")
    assert error.exit_code == (1 if kind is SlurmUnavailable else 2)


def test_slurms_words_are_cleaned() -> None:
    assert clean(f"sbatch: error: a\x1b[31m\n{UNABLE}\n\nsbatch: error: a\x1b[31m\nsqueue: fatal: b\n") == "a [31m; b"
    assert clean(UNABLE) == "Slurm temporarily unable to accept job, sleeping and retrying"


@given(st.text(), st.integers(-64, 255).filter(bool))
def test_any_words_make_one_short_line(text: str, code: int) -> None:
    error = refusal(["sbatch"], code, text)
    assert len(str(error)) < LONGEST_WORDS + 20 and "\n" not in str(error) and "\x1b" not in str(error)
    assert not (code < 0 and isinstance(error, SlurmRefused))


GONE = """scancel: error: Kill job error on job id 1: Invalid job id specified
scancel: error: Kill job error on job id 2: Job/step already completing or completed"""


def test_many_are_cancelled_in_few_calls(programs: Programs) -> None:
    programs.add("scancel", "true")
    ids = [f"{n}_{n % 7}" for n in range(1200)]
    programs.commands.cancel([*ids, *ids], signal="TERM", batch=True)
    calls = programs.calls()
    assert len(calls) == 3 and all(call[:4] == ["scancel", "--batch", "--state=RUNNING", "--signal=TERM"] for call in calls)
    assert [word for call in calls for word in call[4:]] == ids


def test_nothing_is_cancelled_where_no_id_is_given(programs: Programs) -> None:
    programs.commands.cancel([])  # there is no scancel to run


@pytest.mark.parametrize("bad", ["", "all", "-u", "1 2", "1_", "1.0", "1\n"])
def test_what_is_no_id_reaches_no_command(programs: Programs, bad: str) -> None:
    for call in (lambda: programs.commands.cancel(["1", bad]), lambda: programs.commands.requeue(bad)):
        with pytest.raises(ValueError, match="no id"):
            call()


@pytest.mark.parametrize(("signal_name", "err", "kind"), [
    (None, GONE, None), ("TERM", GONE, None),
    ("TERM", f"{GONE}\nscancel: error: Kill job error on job id 3: Job can not be altered now, try again later", SlurmBusy),
    ("TERM", "scancel: error: Kill job error on job id 3: Job is pending execution", SlurmBusy),
    (None, f"{GONE}\nscancel: error: Kill job error on job id 3: Access/permission denied", SlurmRefused),
    (None, f"{GONE}\nscancel: error: Kill job error on job id 3: {DOWN}", SlurmUnavailable), (None, "", SlurmUnavailable),
])
def test_how_a_cancel_fails(programs: Programs, signal_name: str | None, err: str, kind: type[SlurmError] | None) -> None:
    (programs.folder / "words").write_text(err)
    programs.add("scancel", f"cat {programs.folder}/words >&2; exit 8")
    if kind is None:
        programs.commands.cancel(["1", "2"], signal=signal_name)
        return
    with pytest.raises(SlurmError) as caught:
        programs.commands.cancel(["1", "2", "3"], signal=signal_name)
    assert type(caught.value) is kind


def test_the_rest_is_cancelled_though_one_call_fails(programs: Programs) -> None:
    programs.add("scancel", f'case "$*" in *" 7 "*) echo "scancel: error: Kill job error on job id 7: {DOWN}" >&2; exit 8;; esac')
    with pytest.raises(SlurmUnavailable):
        programs.commands.cancel(str(n) for n in range(1, 1001))
    assert len(programs.calls()) == 2


def test_small_questions(programs: Programs) -> None:
    answers = '--version) echo "slurm-wlm 22.05.8";; show) printf "n1\\nn2\\n";; *) echo "Job is not pending nor running for job 1" >&2; exit 1;;'
    programs.add("scontrol", f'case "$1" in {answers} esac')
    assert programs.commands.version() == (22, 5, 8)
    assert programs.commands.hostnames("n[1-2]") == ["n1", "n2"] and programs.commands.hostnames("") == []
    with pytest.raises(SlurmRefused):
        programs.commands.requeue("1")


def test_squeue_that_does_not_know_the_user_has_no_empty_queue(programs: Programs) -> None:
    programs.add("squeue", "echo 'squeue: error: Invalid user: x' >&2")  # exit code 0
    with pytest.raises(SlurmRefused, match="Invalid user"):
        programs.commands.queue()


ENVIRON = {
    "PATH": "/opt/bin", "HOME": "/home/x", "USER": "wrong", "LC_TIME": "C", "LANG": "de_DE.UTF-8", "TZ": "Europe/Berlin", "TMPDIR": "/scratch",
    "SLURM_CONF": "/etc/s.conf",
    "SLURM_JOB_ID": "123", "SLURM_MEM_PER_CPU": "17", "SBATCH_PARTITION": "none", "PYTHONPATH": "/x", "LD_LIBRARY_PATH": "/y",
    "XDG_RUNTIME_DIR": "/run/user/0",
    "XDG_CACHE_HOME": "/big", "ANTHROPIC_API_KEY": "k", "HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "EMPTY": "",
}


def test_jobs_get_what_is_allowed_and_no_more() -> None:
    got = environment_for_jobs(Slurm(pass_environment=["NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "SLURM_CONF", "NOT_SET"]), ENVIRON)
    assert got == {
        "PATH": "/opt/bin", "HOME": "/home/x", "USER": ME, "LOGNAME": ME, "LC_TIME": "C", "LANG": "de_DE.UTF-8", "TZ": "Europe/Berlin",
        "TMPDIR": "/scratch",
        "SLURM_CONF": "/etc/s.conf", "XDG_CACHE_HOME": "/big", "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false",
    }


def test_a_temporary_folder_of_the_enclosing_job_stays_with_it() -> None:
    assert "TMPDIR" not in environment_for_jobs(Slurm(), {**ENVIRON, "TMPDIR": "/local/slurm.123"})


def test_jobs_get_a_path_and_a_home_where_there_is_none() -> None:
    got = environment_for_jobs(Slurm(), {})
    assert set(got) == {"PATH", "HOME", "USER", "LOGNAME"} and "/usr/bin" in got["PATH"].split(":")


@pytest.mark.parametrize("name", ["ANTHROPIC_API_KEY", "HF_TOKEN", "AWS_SECRET", "db_password", "SLURM_JWT", "SBATCH_PARTITION", "SLURM_MEM_PER_CPU"])
def test_secrets_and_slurms_own_are_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"pass_environment names {name}"):
        environment_for_jobs(Slurm(pass_environment=[name]), ENVIRON)


def test_commands_get_the_same_and_speak_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("HF_TOKEN", "t")
    commands = Commands.of(Slurm(command_seconds=7))
    assert commands.seconds == 7 and commands.environment == {**environment_for_jobs(Slurm()), "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    assert not {"SQUEUE_FORMAT", "HF_TOKEN"} & set(commands.environment)


def test_a_user_without_a_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(UserError, match="no login name"):
        Commands(1.0, {}).queue()
