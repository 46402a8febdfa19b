"""Batch scripts: what they ask Slurm for, that every name arrives unchanged, that signals and exit codes pass through."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evo_hpc.config.slurm import Resources
from evo_hpc.dispatch.slurm.script import SETUP_FAILED, BadScript, Task, controller_script, job_script
from evo_hpc.paths import CampaignPaths, JobPaths

NAME = "evo-demo-0123abcd-v0001-train-000-s2"
EVERYTHING = Resources(
    partition="train,scavenge", account="lab", qos="high", constraint="a100&nvlink", reservation="week", exclude="n[1-2]", nodes=2, tasks_per_node=4,
    gpus_per_node="h100:4", cpus_per_task=8, memory="64G", minutes=90, warning_signal="USR1", warning_seconds=30, requeue=False,
    setup=["module load cuda", "export Q='a b'"], environment={"A": "x 'y' $z\nsecond"}, sbatch_arguments=["--mail-type=FAIL", "--comment=a#b\"c"],
)


def one(job: Path, resources: Resources = Resources(), python: str = sys.executable) -> str:
    """The script of one start."""
    task = Task(None, job, job_name="evo-demo-v0001-train-000", start=2)
    return job_script(resources, name=NAME, log=JobPaths(job).slurm_log, python=[python], tasks=[task], generation=7)


def options(script: str) -> list[str]:
    """What follows #SBATCH, line by line."""
    return re.findall(r"^#SBATCH (.*)$", script, re.M)


def fake_python(folder: Path, code: str) -> str:
    """An executable that runs `code` in place of `python -m ...`; its arguments are in `words`."""
    path = folder / "fake python"
    path.write_text(f"#!{sys.executable}\nimport json, os, signal, sys, time\nwords = sys.argv[1:]\n{code}\n")
    path.chmod(0o755)
    return str(path)


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.sh"
    path.write_text(script)
    return subprocess.run(["bash", path], capture_output=True, text=True, timeout=30, env={**os.environ, **environment})


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    path = folder / "script.sh"
    path.write_text(script)
    return subprocess.Popen(["bash", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)


def test_a_profile_becomes_options(tmp_path: Path) -> None:
    assert options(one(tmp_path, EVERYTHING)) == [
        f"--job-name={NAME}", f"--output={tmp_path}/slurm.log", "--open-mode=append", "--partition=train,scavenge", "--account=lab", "--qos=high",
        '--constraint="a100&nvlink"', "--reservation=week", '--exclude="n[1-2]"', "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8",
        "--gpus-per-node=h100:4", "--mem=64G", "--time=90", "--signal=B:USR1@30", "--no-requeue", "--kill-on-invalid-dep=yes", "--mail-type=FAIL",
        '"--comment=a#b\\"c"',
    ]


def test_an_empty_profile_leaves_the_rest_to_slurm(tmp_path: Path) -> None:
    assert options(one(tmp_path)) == [
        f"--job-name={NAME}", f"--output={tmp_path}/slurm.log", "--open-mode=append", "--signal=B:USR2@120", "--requeue", "--kill-on-invalid-dep=yes",
    ]


def test_a_controller_waits_for_the_one_before_it(tmp_path: Path) -> None:
    script = controller_script(Resources(), name="evo-demo-0123abcd-controller", log=tmp_path / "log", python=["py"], campaign=tmp_path)
    assert "--dependency=singleton" in options(script)
    assert not any(option.startswith("--array") for option in options(script))


def test_directives_come_before_any_command(tmp_path: Path) -> None:
    lines = one(tmp_path, EVERYTHING).splitlines()
    assert lines[0] == "#!/bin/bash"
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])


@pytest.mark.parametrize(("indexes", "written"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([7, 0, 1, 5, 3], "0-1,3,5,7")])
def test_an_array_has_the_indexes_that_were_given(tmp_path: Path, indexes: list[int], written: str) -> None:
    tasks = [Task(index, tmp_path / f"evaluate-{index:03d}", "n", 0) for index in indexes]
    script = job_script(Resources(), name="n", log=tmp_path / "log", python=["py"], tasks=tasks, generation=1)
    assert f"--array={written}" in options(script)


@pytest.mark.parametrize("indexes", [[], [None, None], [None, 1], [1, 1]])
def test_an_array_without_one_index_each_is_a_mistake(tmp_path: Path, indexes: list[int | None]) -> None:
    with pytest.raises(ValueError, match="index"):
        job_script(Resources(), name="n", log=tmp_path, python=["py"], tasks=[Task(i, tmp_path, "n", 0) for i in indexes], generation=1)


@pytest.mark.parametrize("kind", ["one", "array", "controller"])
def test_bash_finds_no_fault(tmp_path: Path, kind: str) -> None:
    job = tmp_path / "it's; \"$(x)\" `y` {{ z }} %j \\n # ü"
    scripts = {
        "one": one(job, EVERYTHING),
        "array": job_script(EVERYTHING, name="n", log=job, python=["a b"], tasks=[Task(i, job / str(i), "n", 0) for i in (0, 2)], generation=1),
        "controller": controller_script(EVERYTHING, name="n", log=job, python=["a b"], campaign=job, arguments=["--until", "v0001"]),
    }
    script = tmp_path / "script.sh"
    script.write_text(scripts[kind])
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "--severity=warning", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_names_arrive_unchanged(hostile_path: Path, tmp_path: Path) -> None:
    if "\n" in hostile_path.name:
        with pytest.raises(BadScript, match="rename it"):
            one(hostile_path)
        return
    python = fake_python(hostile_path, "print(json.dumps([words, os.environ['A'], os.environ['Q']]))")
    done = run(one(hostile_path, Resources(environment={"A": hostile_path.name}, setup=["Q='$A'", "export Q"]), python), tmp_path)
    words, a, q = json.loads(done.stdout)
    assert words[:2] == ["-m", "evo_hpc.dispatch.launcher"]
    asked = dict(zip(words[2::2], words[3::2], strict=True))
    assert asked == {
        "--executor": "slurm", "--generation": "7", "--job": str(hostile_path), "--job-name": "evo-demo-v0001-train-000", "--start": "2",
    }
    assert (a, q, done.stderr) == (hostile_path.name, "$A", "")


def test_a_controller_is_told_its_campaign_and_arguments(tmp_path: Path) -> None:
    campaign = tmp_path / "my campaign's"
    campaign.mkdir()
    python = fake_python(tmp_path, "print(json.dumps(words)); sys.exit(130)")
    log = CampaignPaths(campaign).controller_log
    done = run(controller_script(Resources(), name="n", log=log, python=[python], campaign=campaign, arguments=["--until", "v0002"]), tmp_path)
    assert json.loads(done.stdout) == ["-m", "evo_hpc.cli", "run", str(campaign), "--until", "v0002"]
    assert done.returncode == 100, "130 would look like 2 in Slurm"


def test_a_task_of_an_array_takes_its_own_folder_every_time(tmp_path: Path) -> None:
    tasks = [Task(index, tmp_path / f"it's {index}", f"name-{index}", start=index + 1) for index in (0, 4)]
    for task in tasks:
        task.job.mkdir()
    python = fake_python(tmp_path, "print(words[words.index('--job') + 1:])")
    script = job_script(Resources(), name="n", log=tmp_path / "log", python=[python], tasks=tasks, generation=1)
    for restart in ("", "1"):
        for task in tasks:
            done = run(script, tmp_path, SLURM_ARRAY_TASK_ID=str(task.index), SLURM_RESTART_COUNT=restart)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for task in tasks:
        line = repr([str(task.job), "--job-name", task.job_name, "--start", str(task.start)])
        assert task.log.read_text().splitlines() == [line, line]
    done = run(script, tmp_path, SLURM_ARRAY_TASK_ID="3")
    assert done.returncode == 2 and "no task '3'" in done.stderr


@pytest.mark.parametrize("bad", ["new\nline", "carriage\rreturn", "escape\x1b[2J", "next\x85line", "surrogate\udcff"])
def test_a_name_that_no_script_can_hold_is_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(BadScript, match="rename it"):
        one(tmp_path / bad)
    with pytest.raises(BadScript, match="rename it"):
        controller_script(Resources(), name="n", log=tmp_path, python=["py"], campaign=tmp_path / bad)


@pytest.mark.parametrize("word", ["--job-name=x", "-Jx", "--array=0-3", "--outp=/dev/null", "--wrap=true", "--time=5", "--signal=USR1", "x"])
def test_options_that_jobs_are_found_by_are_not_the_profiles(tmp_path: Path, word: str) -> None:
    with pytest.raises(BadScript, match="sbatch_arguments"):
        one(tmp_path, Resources(sbatch_arguments=[word]))


def test_a_variable_with_a_bad_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadScript, match="letters"):
        one(tmp_path, Resources(environment={"A=1; rm -rf x; B": "1"}))


@pytest.mark.parametrize("srun", [False, True])
def test_the_container_holds_the_launcher_unless_roles_are_steps(tmp_path: Path, srun: bool) -> None:
    script = one(tmp_path, Resources(container=["apptainer", "exec", "image.sif"], srun=srun), python="py")
    assert ("\napptainer exec image.sif py -m evo_hpc.dispatch.launcher" in script) is not srun


def test_a_failed_set_up_line_ends_the_job_and_is_named(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "print('ran')")
    done = run(one(tmp_path, Resources(setup=["true", "(exit 9) # 'load'", "echo later"]), python), tmp_path)
    assert (done.returncode, done.stdout) == (SETUP_FAILED, "")
    assert "exit code 9" in done.stderr and "(exit 9) # 'load'" in done.stderr
    assert SETUP_FAILED not in (0, 1, 2, 3), "these are what a job says of itself"


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit(3)", "sys.exit(75)"])
def test_the_exit_code_is_passed_on(tmp_path: Path, code: str) -> None:
    done = run(one(tmp_path, python=fake_python(tmp_path, code)), tmp_path)
    assert done.returncode == int(code[9:-1])


def test_a_launcher_that_is_killed_is_no_success(tmp_path: Path) -> None:
    done = run(one(tmp_path, python=fake_python(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")), tmp_path)
    assert done.returncode == 100, "128 + 9 would look like 9"


LISTENER = """
heard = []
for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, lambda number, frame: heard.append(number))
open(os.path.join(FOLDER, "listens"), "w").close()
deadline = time.time() + 20
while len(heard) < 2 and time.time() < deadline:
    time.sleep(0.01)
time.sleep(0.3)
print(sorted(heard), flush=True)
sys.exit(42)
"""


@pytest.mark.parametrize("warning", ["USR1", "USR2"])
def test_the_warning_and_the_stop_are_passed_on_once_and_waited_for(tmp_path: Path, warning: str) -> None:
    python = fake_python(tmp_path, f"FOLDER = {str(tmp_path)!r}\n{LISTENER}")
    process = start(one(tmp_path, Resources(warning_signal=warning), python), tmp_path)  # type: ignore[arg-type]
    wait_for(tmp_path / "listens")
    warned = signal.Signals[f"SIG{warning}"]
    process.send_signal(warned)
    time.sleep(0.5)
    assert process.poll() is None, "a signal does not end the wait"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (output.strip(), process.returncode) == (str(sorted([int(warned), int(signal.SIGTERM)])), 42)


def test_a_signal_that_comes_too_early_is_kept(tmp_path: Path) -> None:
    slow = "time.sleep(1.0)  # loading\n" + LISTENER.replace("< 2", "< 1")
    python = fake_python(tmp_path, f"FOLDER = {str(tmp_path)!r}\n{slow}")
    process = start(one(tmp_path, Resources(setup=[f"touch '{tmp_path}/set-up'", "sleep 0.5"]), python), tmp_path)
    wait_for(tmp_path / "set-up")
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=30)
    assert (output.strip(), process.returncode) == (str([int(signal.SIGUSR2)]), 42)


def test_a_signal_at_the_very_end_leaves_the_exit_code_alone(tmp_path: Path) -> None:
    """Also when the command ends while the signal is being passed on."""
    for delay in (0.0, 0.05, 0.1, 0.15, 0.2):
        code = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({str(tmp_path / 'on')!r}, 'w').close()\ntime.sleep(0.2)\nos._exit(7)"
        python = fake_python(tmp_path, code)
        process = start(one(tmp_path, python=python), tmp_path)
        wait_for(tmp_path / "on")
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
        (tmp_path / "on").unlink()
