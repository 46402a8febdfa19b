"""The controller as a job of a real cluster: launched once, requeued or succeeded, its needless successor cancelled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evo_hpc.config.slurm import Resources, Slurm
from evo_hpc.controller.hand_over import cancel_successors, hand_over
from evo_hpc.controller.launch import ControllerLives, NothingToLaunch, controller_name, launch
from evo_hpc.dispatch.slurm.commands import Commands, environment_for_jobs
from evo_hpc.dispatch.slurm.script import controller_script
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.dispatch.slurm.submit import submit
from evo_hpc.paths import CampaignPaths
from tests.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.crash.campaign import check_sound, make_campaign
from tests.slurm.jobs import of_name, telling_python, told

pytestmark = [pytest.mark.rare, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def commands(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Of the test cluster, which is left without jobs."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    commands = Commands.of(Slurm())
    yield commands
    commands.cancel([job.id for job in commands.queue()])
    cluster.wait_idle()


def test_a_campaign_runs_inside_its_controllers_allocation(commands: Commands, tmp_path: Path) -> None:
    paths = make_campaign(tmp_path / "it's %j", slurm={"controller": {"partition": "debug", "minutes": 5}})
    launched = launch(paths)
    with pytest.raises(ControllerLives, match=f"Slurm job {launched.job_id}"):
        launch(paths)

    def over() -> bool:
        return all(life(job.state) == "terminal" for job in commands.queue() if job.job_id == launched.job_id)

    assert wait_until(over, 120, pause=0.5), paths.controller_log.read_text()
    assert {job.state for job in commands.queue() if job.job_id == launched.job_id} == {"COMPLETED"}, paths.controller_log.read_text()
    check_sound(paths)
    owner = json.loads(paths.lease.read_text())
    assert (owner["slurm_job_id"], owner["released"]) == (launched.job_id, True)
    with pytest.raises(NothingToLaunch):
        launch(paths)


def start(paths: CampaignPaths, resources: Resources, folder: Path) -> tuple[str, str]:
    """A stand-in for the campaign's controller, running; its name and id."""
    name = controller_name(paths, "demo")
    python = telling_python(folder, "time.sleep(300)")
    script = controller_script(resources, name=name, log=paths.controller_log, python=[python], campaign=paths.root)
    paths.controller.mkdir(parents=True)
    job_id = submit(environment_for_jobs(Slurm()), script, paths.controller_script, seconds=60)
    told(paths.root / "started-0.json")
    return name, job_id


def test_a_warned_controller_is_requeued(commands: Commands, tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path / "demo")
    name, job_id = start(paths, Resources(), tmp_path)
    found = hand_over(paths, Slurm(), commands, name=name, own_id=job_id, seconds=60)
    assert (found.how, found.job_id) == ("requeued", job_id)
    told(paths.root / "started-1.json", seconds=120)
    assert [job.job_id for job in of_name(commands, name)] == [job_id]


def test_one_that_may_not_be_requeued_has_a_successor_which_waits(commands: Commands, tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path / "demo")
    name, job_id = start(paths, Resources(requeue=False), tmp_path)
    found = hand_over(paths, Slurm(), commands, name=name, own_id=job_id, seconds=60)
    assert found.how == "successor" and found.job_id != job_id
    again = hand_over(paths, Slurm(), commands, name=name, own_id=job_id, seconds=60)

    def waiting() -> list[tuple[str, str]]:
        return [(job.job_id, job.reason) for job in of_name(commands, name) if job.state == "PENDING"]

    assert wait_until(lambda: waiting() == [(found.job_id, "Dependency"), (again.job_id, "Dependency")], 20, pause=0.2), waiting()
    assert cancel_successors(commands, name=name, own_id=job_id) == [found.job_id, again.job_id]
    assert [job.job_id for job in of_name(commands, name)] == [job_id], "itself it leaves alone"

    last = hand_over(paths, Slurm(), commands, name=name, own_id=job_id, seconds=60)
    (paths.root / "started-0.json").unlink()
    commands.cancel([job_id])
    told(paths.root / "started-0.json", seconds=60)
    assert [job.job_id for job in of_name(commands, name) if job.state == "RUNNING"] == [last.job_id]
    assert [number for number, _ in paths.launches()] == [0, 1, 2]
