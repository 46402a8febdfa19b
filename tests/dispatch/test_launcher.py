"""The launcher and its roles: what a stop, a pause, a full disk or a newer start make of a job; stand-ins for the roles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.slurm import Resources
from evo_hpc.dispatch import launcher
from evo_hpc.dispatch.exchange import exchange_bytes
from evo_hpc.dispatch.launcher import AwakeClock, Launcher
from evo_hpc.dispatch.roles import ROLES, Role, processes
from evo_hpc.dispatch.slurm.steps import srun_words
from evo_hpc.dispatch.workers import Pulses
from evo_hpc.domains.task import Task, tasks_to_jsonl
from evo_hpc.jobs.claims import claim
from evo_hpc.jobs.role import load_entry, outcome_of
from evo_hpc.jobs.spec import Identity, JobKind, JobSpec, Result, load_spec, spec_bytes
from evo_hpc.paths import CampaignPaths, ExchangePaths, JobPaths
from evo_hpc.store.atomic import read_json, write_json
from evo_hpc.store.processes import ProcessIdentity, find_by_argument

CRASH = Path(__file__).resolve().parent.parent / "crash"


def make_job(campaign: Path, kind: JobKind = "supervise", params: dict[str, Any] | None = None, **cluster: Any) -> JobPaths:
    job = CampaignPaths(campaign).base.job(kind, 0)
    job.root.mkdir(parents=True)
    profile = Cluster(environment={"PYTHONPATH": os.pathsep.join([str(CRASH), *sys.path])}, **cluster).model_dump(mode="json")
    job.spec.write_bytes(spec_bytes(JobSpec(
        name="evo-job", kind=kind, campaign="c", owner="base", attempt=0, config={}, cluster=profile, params=params or {},
    )))
    return job


def command(job: JobPaths) -> list[str]:
    return ["--job", str(job.root), "--job-name", "evo-job", "--start", "0", "--generation", "1"]


def start(job: JobPaths, how: str, role: str = "trainer", log: Path | None = None) -> subprocess.Popen[bytes]:
    """The real launcher in a process group of its own, one of its roles failing as told."""
    with (log or job.launch_log).open("wb") as out:
        return subprocess.Popen(
            [sys.executable, str(CRASH / "fake_python.py"), "-m", "evo_hpc.dispatch.launcher", *command(job)],
            stdout=out, stderr=out, start_new_session=True, env={**os.environ, "FAKE_FAILURE": how, "FAKE_FAILURE_IN": role},
        )


def wait_until(ready: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)


def result(job: JobPaths) -> Result:
    return Result.model_validate(read_json(job.incarnation(0).result))


@pytest.mark.parametrize("how, outcome, error", [
    ("obedient", "stopped", "trainer: stopped on request"),
    ("starting", "stopped", "trainer ended on the stop signal without saving"),
    ("deaf", "stopped", "trainer was killed after 1 s without saving"),
    ("error on stop", "failed", "RuntimeError: could not save"),
])
def test_what_a_stop_makes_of_a_role(tmp_path: Path, how: str, outcome: str, error: str) -> None:
    job = make_job(tmp_path, grace_seconds=1)
    process = start(job, how)
    wait_until(job.incarnation(0).progress.exists, process)
    process.terminate()
    assert process.wait(timeout=4) == 0, "when the grace is over, the role is killed at once"
    found = result(job)
    assert found.outcome == outcome and error in (found.error or "")
    assert (found.blame is None) == (outcome == "stopped")


def test_a_stop_while_the_role_is_being_started(tmp_path: Path) -> None:
    job = make_job(tmp_path, grace_seconds=5)
    process = start(job, "obedient")
    wait_until(job.incarnation(0).log("trainer").exists, process)
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert result(job).outcome == "stopped"


def test_a_stop_before_anything_was_started(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run = Launcher(job, JobSpec.model_construct(kind="train"), job.incarnation(0), ExchangePaths(tmp_path), Cluster())
    run.request_stop()
    found = run.run()
    assert found.outcome == "stopped" and not run.processes


def test_a_service_that_is_stopped_alone_takes_the_job_with_it(tmp_path: Path) -> None:
    job = make_job(tmp_path, kind="train", params={"init": "base/policy"})
    process = start(job, "obedient")
    wait_until(job.incarnation(0).progress.exists, process)
    wait_until(lambda: find_by_argument(str(job.root), "--role", "rollout"), process)
    time.sleep(0.5)  # its handler, too
    os.kill(find_by_argument(str(job.root), "--role", "rollout")[0], signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    assert (result(job).outcome, result(job).error) == ("stopped", "trainer: stopped on request")


TRAIN: dict[str, Any] = {"kind": "train", "params": {"init": "base/policy", "run": "r", "recipe": Recipe(steps=30).model_dump(mode="json")}}


def train(campaign: Path, how: str, step_seconds: float, **cluster: Any) -> tuple[JobPaths, subprocess.Popen[bytes]]:
    """A training job with workers that fail as told; its trainer is well."""
    job = make_job(campaign, **TRAIN, **cluster)
    task = Task("t", "train", ({"role": "user", "content": "1"},), "1", {})
    tasks = CampaignPaths.of_job(job).tasks("train")
    tasks.parent.mkdir()
    tasks.write_text(tasks_to_jsonl([task]))
    spec = load_spec(job)
    job.spec.write_bytes(spec_bytes(spec.model_copy(update={"config": {"name": "c", "domain": {"name": "arithmetic"}}})))
    with job.launch_log.open("wb") as out:
        return job, subprocess.Popen(
            [sys.executable, str(CRASH / "fake_python.py"), "-m", "evo_hpc.dispatch.launcher", *command(job)], stdout=out, stderr=out,
            env={**os.environ, "FAKE_FAILURE": how, "FAKE_FAILURE_IN": "rollout", "FAKE_WORKERS": "1", "FAKE_STEP_SECONDS": str(step_seconds)},
        )


def test_workers_that_die_are_started_again_and_the_job_ends_well(tmp_path: Path) -> None:
    job, process = train(tmp_path, "dies of it", 0.1, engine={"workers": 3})
    assert process.wait(timeout=60) == 0
    assert result(job).outcome == "done", result(job).error
    log = job.launch_log.read_text()
    assert all(f"{name} was killed by signal 9 (SIGKILL)" in log for name in ("rollout", "rollout-1", "rollout-2")), log
    assert log.count("Started again (1 of 2 times)") == 3


def test_a_worker_that_dies_again_and_again_ends_the_job(tmp_path: Path) -> None:
    job, process = train(tmp_path, "exit", 0.5, engine={"restarts": 1})
    assert process.wait(timeout=60) == 0
    found = result(job)
    assert (found.outcome, found.blame) == ("failed", "infrastructure") and "rollout exited with 7" in (found.error or "")
    assert job.launch_log.read_text().count("Started again") == 1


def test_the_users_mistake_in_a_worker_is_not_tried_again(tmp_path: Path) -> None:
    job, process = train(tmp_path, "user", 0.5)
    assert process.wait(timeout=60) == 0
    assert result(job).blame == "user" and "Started again" not in job.launch_log.read_text()


def test_a_worker_that_is_silent_with_work_is_started_again_with_its_stacks(tmp_path: Path) -> None:
    job, process = train(tmp_path, "silent with work", 0.25, stall_minutes=4 / 60)
    assert process.wait(timeout=60) == 0
    assert result(job).outcome == "done", result(job).error
    assert "rollout had work and gave no sign of life for 0.1 minutes" in job.launch_log.read_text()
    log = job.incarnation(0).log("rollout").read_text()
    assert "Fatal Python error: Aborted" in log and "fake_roles.py" in log


def test_only_a_worker_with_work_can_be_silent_too_long(tmp_path: Path) -> None:
    pulses, path = Pulses(), tmp_path / "pulse.json"
    assert pulses.silent_seconds("rollout", path, 500.0) == 0.0, "it has not begun to speak"
    write_json(path, {"busy": True})
    assert pulses.silent_seconds("rollout", path, 510.0) == 0.0 and pulses.silent_seconds("rollout", path, 540.0) == 30.0 and pulses.last == 510.0
    write_json(path, {"busy": False})
    assert pulses.silent_seconds("rollout", path, 550.0) == 0.0 and pulses.silent_seconds("rollout", path, 5500.0) == 0.0
    assert pulses.last == 510.0, "being without work is no progress of the job"
    write_json(path, {"busy": True})
    pulses.silent_seconds("rollout", path, 5600.0)
    pulses.forget("rollout", 5700.0)
    path.unlink()
    assert pulses.silent_seconds("rollout", path, 9000.0) == 0.0 and pulses.last == 5700.0


def test_there_are_as_many_workers_as_the_profile_says() -> None:
    found = processes(ROLES["train"], Cluster(engine={"workers": 3}))  # type: ignore[arg-type]
    assert [role.name for role in found] == ["trainer", "rollout", "rollout-1", "rollout-2"] and [role.index for role in found] == [0, 0, 1, 2]
    assert [role.name for role in processes(ROLES["evaluate"], Cluster(engine={"workers": 3}))] == ["evaluator"]  # type: ignore[arg-type]


def test_workers_are_spread_over_the_nodes() -> None:
    resources = Resources(nodes=2, tasks_per_node=4)
    words = [srun_words(resources, primary=False, index=index) for index in range(4)]
    assert [[word for word in each if "relative" in word] for each in words] == [[], ["--relative=1"], [], ["--relative=1"]]
    assert all({"--nodes=1", "--ntasks=1"} <= set(each) for each in words)
    assert "--nodes=2" in srun_words(resources, primary=True, index=1) and not any("relative" in word for word in srun_words(resources, primary=True))


def test_a_paused_job_is_not_taken_for_a_stalled_one(tmp_path: Path) -> None:
    job = make_job(tmp_path, stall_minutes=4 / 60)
    process = start(job, "silent")
    wait_until(job.incarnation(0).progress.exists, process)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(5)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.wait(timeout=20) == 0
    assert result(job).outcome == "done", result(job).error


def test_the_awake_clock_counts_no_pause() -> None:
    readings = iter([10.0, 10.1, 10.3, 7210.3, 7210.4])
    clock = AwakeClock(now=lambda: next(readings))
    assert [round(clock.tick(), 6) for _ in range(5)] == [0.0, 0.1, 0.3, 1.3, 1.4]


def test_a_stall_begins_when_progress_ends(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    inc = job.incarnation(0)
    inc.root.mkdir()
    run = Launcher(job, JobSpec.model_construct(kind="train"), inc, ExchangePaths(tmp_path), Cluster(stall_minutes=1))
    silent = []
    for second in range(0, 200, 10):
        run.clock.seconds = float(second)
        if second in (50, 90):
            inc.progress.write_text(str(second))
            os.utime(inc.progress, (second, second))  # what the file's own time says of now is of no matter
        silent.append(run._stalled_seconds())
    assert silent[:16] == [None] * 16 and silent[16:] == [70.0, 80.0, 90.0, 100.0]


def take_over(job: JobPaths) -> None:
    process = ProcessIdentity.current()
    claim(job, Identity(job_name="evo-job", generation=2, start=0, process=process, claimed_at=0.0))


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("when", ["before", "at the end"])
def test_a_superseded_launcher_exits_3_and_says_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    job = make_job(tmp_path)

    def run(self: Launcher) -> Result:
        take_over(job)
        return Result(outcome="done")

    monkeypatch.setattr(Launcher, "run", run)
    if when == "before":
        take_over(job)
    assert launcher.main(command(job)) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not job.incarnation(0).result.exists()


@pytest.mark.usefixtures("handlers")
def test_what_stands_in_the_way_of_a_start_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = make_job(tmp_path, exchange=str(tmp_path / "file"))
    assert launcher.main(command(job)) == 0
    assert result(job).blame == "user" and "cannot be the exchange folder" in (result(job).error or "")


@pytest.mark.usefixtures("handlers")
def test_a_role_that_cannot_be_started_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    monkeypatch.setitem(launcher.ROLES, "supervise", (Role("trainer", "a:b", primary=True),))
    assert launcher.main(command(job)) == 0
    assert result(job).blame == "infrastructure" and "no-python" in (result(job).error or "")


@pytest.fixture
def small_disk(mounted_disk: Callable[[str], Path]) -> Path:
    return mounted_disk("1m")


def test_a_full_disk_at_the_end_is_said_in_a_line(small_disk: Path, tmp_path: Path) -> None:
    job, log = make_job(small_disk / "campaign"), tmp_path / "launch.log"
    process = start(job, "silent", log=log)
    wait_until(job.incarnation(0).progress.exists, process)
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(bytes(4096)):
            pass
    assert process.wait(timeout=20) == 1
    text = log.read_text()
    assert len(text.splitlines()) <= 2, "one for the heartbeat, one for the result"
    assert "result.json: no space left" in text and "(the result was: failed" in text


@pytest.mark.usefixtures("handlers")
def test_a_log_that_takes_no_line_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path)
    take_over(job)
    monkeypatch.setattr(sys, "stderr", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1, closefd=False))
    assert launcher.main(command(job)) == 3


def test_need_bytes_grow_with_the_policy(tmp_path: Path) -> None:
    job = make_job(tmp_path, kind="train", params={"init": "base/policy"})
    spec = JobSpec.model_construct(kind="train", params={"init": "base/policy"})
    (tmp_path / "base/policy").mkdir()
    for name, size in (("model-1.safetensors", 1000), ("model-2.safetensors", 500)):
        (tmp_path / "base/policy" / name).write_bytes(bytes(size))
    assert exchange_bytes(job, spec) == (64 << 20) + 3 * 1500
    assert exchange_bytes(job, JobSpec.model_construct(kind="evaluate", params={})) == 64 << 20
    spec.params["recipe"] = {"rollout": {"max_staleness": 2}, "optimizer": {"old_logprobs": "sampled"}}
    assert exchange_bytes(job, spec) == 3 * (64 << 20) + 5 * 1500, "two policies more may be asked for, and two steps more are under way"
    (tmp_path / "base/policy/config.json").write_text('{"dtype": "bfloat16"}')
    assert exchange_bytes(job, spec) == 3 * (64 << 20) + 5 * 2 * (1500 + 21), "published in float32"


def test_an_error_in_cleaning_up_does_not_hide_the_cause(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert start(job, "error in cleaning up").wait(timeout=20) == 0
    assert "RuntimeError: the cleaning up failed, too, caused by ValueError: what really happened" in (result(job).error or "")


@pytest.mark.parametrize("module, blame", [
    ("torch", "user"), ("megatron", "user"), ("vllm", "user"), ("evo_hpc.gone", "infrastructure"),
])
def test_a_missing_package_is_the_users_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, blame: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"needs_{module.replace('.', '_')}.py").write_text(f"import {module}\n")
    with pytest.raises(ModuleNotFoundError) as caught:
        load_entry(f"needs_{module.replace('.', '_')}:run")
    outcome = outcome_of(caught.value, tmp_path / "trainer.log")
    assert outcome["blame"] == blame and ("run `make setup`" in outcome["error"]) == (blame == "user")
