"""How jobs fail, and what the user is told: blame, exit codes, retries, watchdog, stop and go on."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from evo_hpc.store.atomic import read_json
from tests.crash.campaign import STEPS, check_sound, controller, finish, make_campaign


def run(paths, timeout: float = 60) -> tuple[int, str]:  # type: ignore[no-untyped-def]
    process = controller(paths)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def failing(tmp_path: Path, how: str, role: str = "trainer", step_seconds: float = 0.2, **cluster: float):  # type: ignore[no-untyped-def]
    environment = {"FAKE_FAILURE": how, "FAKE_FAILURE_IN": role, "FAKE_STEP_SECONDS": str(step_seconds)}
    return make_campaign(tmp_path / "campaign", max_attempts=2, max_starts=2, environment=environment, **cluster)


def mend(paths) -> None:  # type: ignore[no-untyped-def]
    text = json.loads(paths.cluster_yaml.read_text())
    del text["environment"]["FAKE_FAILURE_IN"]
    text["environment"]["FAKE_STEP_SECONDS"] = "0.1"
    paths.cluster_yaml.write_text(json.dumps(text))


def test_the_users_mistake_is_not_retried_and_exits_2(tmp_path: Path) -> None:
    paths = failing(tmp_path, "user")
    code, output = run(paths)
    assert code == 2 and "recipe.yaml:3: this is yours to mend" in output and "Traceback" not in output
    assert len(paths.base.jobs()) == 1
    mend(paths)
    finish(paths)
    assert [read_json(j.record)["state"] for j in paths.base.jobs()] == ["failed", "done"]


@pytest.mark.parametrize("how, message", [
    ("error", r"RuntimeError: the machine did something \(fake_roles\.py:\d+\)"),
    pytest.param("exit", "trainer exited with 7", marks=pytest.mark.slow),
    pytest.param("abort", r"trainer was killed by signal 6 \(SIGABRT\)", marks=pytest.mark.slow),
])
def test_the_machines_failure_is_retried_then_exits_1(tmp_path: Path, how: str, message: str) -> None:
    paths = failing(tmp_path, how)
    code, output = run(paths)
    assert code == 1 and re.search(message, output), output
    assert [read_json(j.record)["blame"] for j in paths.base.jobs()] == ["infrastructure"] * 2
    mend(paths)
    finish(paths)
    check_sound(paths)


def test_a_job_dies_as_a_whole_when_a_service_does(tmp_path: Path) -> None:
    # Slow steps: an attempt that came a step further before its service died would not be one in a row.
    paths = failing(tmp_path, "exit", role="rollout", step_seconds=60)
    code, output = run(paths)
    assert code == 1 and "rollout exited with 7" in output
    mend(paths)
    finish(paths)
    check_sound(paths)


def test_a_silent_hang_is_stopped_with_its_stacks(tmp_path: Path) -> None:
    paths = failing(tmp_path, "hang", stall_minutes=0.05)
    code, output = run(paths)
    assert code == 1 and "no progress for" in output
    log = paths.base.job("supervise", 0).incarnation(0).log("trainer").read_text()
    assert "Fatal Python error: Aborted" in log and "fake_roles.py" in log


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_controller_saves_and_the_next_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    paths = make_campaign(tmp_path / "campaign", environment={"FAKE_STEP_SECONDS": "0.3"})
    process = controller(paths)
    progress = paths.version("v0001").job("train", 0).incarnation(0).progress
    deadline = time.time() + 60
    while not (progress.exists() and read_json(progress).get("step", 0) >= 2):
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "Run the same command to go on" in output
    inc = paths.version("v0001").job("train", 0).incarnation(0)
    assert read_json(inc.result)["outcome"] == "stopped"
    saved = max(int(p.name.split("-")[1]) for p in inc.checkpoints.glob("step-*"))
    assert saved >= 2, "a signalled stop saves where it is"
    finish(paths)
    check_sound(paths)
    metrics = sorted(p.name for p in paths.version("v0001").metrics.glob("*.parquet"))
    ends = [int(name.removesuffix(".parquet").split("-")[2]) for name in metrics]
    assert saved in ends and ends[-1] == STEPS, "what was flushed for the stop is part of the run"


def test_ctrl_c_while_a_role_is_being_started_is_no_failure(tmp_path: Path) -> None:
    paths = make_campaign(tmp_path / "campaign", max_starts=1, max_attempts=1)
    process = controller(paths)
    inc = paths.base.job("supervise", 0).incarnation(0)
    deadline = time.time() + 60
    while not inc.log("trainer").exists():
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert read_json(inc.result)["outcome"] in ("stopped", "done"), "on a slow machine it may be done before the signal arrives"
    finish(paths)
    check_sound(paths)
    assert [read_json(j.record)["state"] for j in paths.base.jobs()] == ["done"], "a stop is no attempt"


def test_two_controllers_at_once(tmp_path: Path) -> None:
    paths = make_campaign(tmp_path / "campaign", environment={"FAKE_STEP_SECONDS": "0.2"})
    first = controller(paths)
    deadline = time.time() + 30
    while not paths.lease.exists():
        assert time.time() < deadline
        time.sleep(0.02)
    code, output = run(paths)
    assert code == 2 and f"a controller runs this campaign already: process {first.pid}" in output
    assert first.wait(timeout=60) == 0
    check_sound(paths)
