"""Batch scripts on a real cluster: names arrive unchanged, arrays find their tasks again, a preemption's warning is heard."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from evo_hpc.config.slurm import Resources, Slurm
from evo_hpc.dispatch.slurm.commands import Commands, environment_for_jobs
from evo_hpc.dispatch.slurm.errors import SlurmRefused
from evo_hpc.dispatch.slurm.script import Task, job_script
from evo_hpc.dispatch.slurm.submit import submit
from evo_hpc.paths import JobPaths
from tests.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.conftest import HOSTILE_NAMES
from tests.slurm.jobs import of_name, telling_python, told

pytestmark = [pytest.mark.rare, pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = [*(name for name in HOSTILE_NAMES if "\n" not in name), "back\\slash and %j", "two\\\\ # `x` 'y'", "~[a-z]*? !x"]

ENCLOSING_MEMORY = "17"


@pytest.fixture
def commands(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Of the test cluster, which is left without jobs."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    monkeypatch.setenv("SBATCH_PARTITION", "none")  # of the caller's shell: must not reach sbatch
    monkeypatch.setenv("SLURM_MEM_PER_CPU", ENCLOSING_MEMORY)
    commands = Commands.of(Slurm())
    yield commands
    commands.cancel([job.id for job in commands.queue()])
    cluster.wait_idle()


def send(script: str, path: Path) -> str:
    return submit(environment_for_jobs(Slurm()), script, path, seconds=60)


def one(job: JobPaths, name: str, python: str, resources: Resources = Resources()) -> str:
    """The script of one start."""
    return job_script(resources, name=name, log=job.slurm_log, python=[python], tasks=[Task(None, job.root, "n", 0)], generation=1)


def test_hostile_names_arrive_unchanged(commands: Commands, tmp_path: Path) -> None:
    python = telling_python(tmp_path, "print('said', flush=True)")
    for number, name in enumerate(NAMES):
        job = JobPaths(tmp_path / name / "train-000")
        job.root.mkdir(parents=True)
        task = Task(None, job.root, f"job {name}", 3)
        resources = Resources(environment={"HOSTILE": name}, setup=["Q='$(x)'", "export Q"])
        send(job_script(resources, name=f"evo {name}", log=job.slurm_log, python=[python], tasks=[task], generation=number), job.script(3))
    for number, name in enumerate(NAMES):
        job = JobPaths(tmp_path / name / "train-000")
        found = told(job.root / "started-0.json")
        asked = dict(zip(found["words"][2::2], found["words"][3::2], strict=True))
        assert asked == {"--executor": "slurm", "--generation": str(number), "--job": str(job.root), "--job-name": f"job {name}", "--start": "3"}
        assert (found["name"], found["environment"]["HOSTILE"], found["environment"]["Q"]) == (f"evo {name}", name, "$(x)")
        assert wait_until(lambda job=job: job.slurm_log.exists() and job.slurm_log.read_text() == "said\n", 30, pause=0.1), job.slurm_log
        assert sorted(path.name for path in job.root.iterdir()) == ["slurm.log", "start-000003.sh", "started-0.json"]


def test_what_a_job_starts_with_is_what_was_allowed(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    job = JobPaths(tmp_path / "train-000")
    job.root.mkdir()
    send(one(job, "evo-env", telling_python(tmp_path)), job.script(0))
    found = told(job.root / "started-0.json")["environment"]
    assert not {"SECRET_OF_MINE", "SBATCH_PARTITION", "SLURM_WCKEY"} & set(found)
    assert found.get("SLURM_MEM_PER_CPU") != ENCLOSING_MEMORY, "what Slurm itself sets is its own affair"
    assert (found["SLURM_CONF"], found["HOME"]) == (os.environ["SLURM_CONF"], os.environ["HOME"])


def test_a_requeued_task_of_an_array_is_the_same(commands: Commands, tmp_path: Path) -> None:
    jobs = {index: JobPaths(tmp_path / f"evaluate-000-shard-{index:02d}") for index in (0, 1, 4)}
    for job in jobs.values():
        job.root.mkdir()
    python = telling_python(tmp_path, "print('said', flush=True)\ntime.sleep(0 if restart == '1' else 100)")
    tasks = [Task(index, job.root, f"n{index}", start=index) for index, job in jobs.items()]
    array = send(job_script(Resources(), name="evo-array", log=jobs[0].slurm_log, python=[python], tasks=tasks, generation=1), jobs[0].script(0))
    first = {index: told(job.root / "started-0.json")["words"] for index, job in jobs.items()}
    assert {job.array_index for job in of_name(commands, "evo-array")} == set(jobs)
    for index in jobs:
        commands.requeue(f"{array}_{index}")
    for index, job in jobs.items():
        assert told(job.root / "started-1.json")["words"] == first[index]
        assert first[index][-5:] == [str(job.root), "--job-name", f"n{index}", "--start", str(index)]
        assert wait_until(lambda job=job: job.slurm_log.read_text().count("said\n") == 2, 30, pause=0.1), "one log of both runs"


def test_a_preemption_is_heard_and_the_requeued_job_starts_again(commands: Commands, cluster: Cluster, tmp_path: Path) -> None:
    job = JobPaths(tmp_path / "train-000")
    job.root.mkdir()
    python = telling_python(tmp_path, "time.sleep(0 if restart == '1' else 100)")
    resources = Resources(partition="scavenge", sbatch_arguments=["--nodelist=n4", "--exclusive"])
    preempted = send(one(job, "evo-low", python, resources), job.script(0))
    told(job.root / "started-0.json")
    done = cluster.run("sbatch", "--parsable", "--partition=urgent", "--nodelist=n4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    assert done.returncode == 0, done.stderr
    assert told(job.root / "heard-0.json") == [signal.SIGUSR2], "the warning, once"
    told(job.root / "started-1.json", seconds=120)
    assert [each.job_id for each in commands.queue() if each.name == "evo-low"] == [preempted]


def test_the_controllers_stop_is_heard_and_the_exit_code_is_the_jobs(commands: Commands, tmp_path: Path) -> None:
    job = JobPaths(tmp_path / "train-000")
    job.root.mkdir()
    python = telling_python(tmp_path, "while not heard: time.sleep(0.05)\nsys.exit(3)")
    job_id = send(one(job, "evo-stop", python), job.script(0))
    told(job.root / "started-0.json")
    commands.cancel([job_id], signal="TERM", batch=True)
    assert told(job.root / "heard-0.json") == [signal.SIGTERM]

    def ended() -> bool:
        return any(each.state == "FAILED" for each in commands.queue() if each.job_id == job_id)

    assert wait_until(ended, 30, pause=0.2)


def test_what_the_cluster_does_not_have_is_refused(commands: Commands, tmp_path: Path) -> None:
    with pytest.raises(SlurmRefused, match="partition"):
        send(one(JobPaths(tmp_path), "n", "py", Resources(partition="none")), tmp_path / "x.sh")
