"""The controller on a real cluster: one at a time, whatever ends it; its jobs go on and are adopted; people steer it by files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.controller.launch import controller_name
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json, write_bytes
from tests.crash.campaign import STEPS, outcome
from tests.slurm.campaigns import Site, at_step, claims, ended, evo, first_steps, saved, starts, status, trained, until, until_not
from tests.slurm.jobs import of_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).resolve().parents[2]
RACES, RACERS = 100, 8


def launched(paths: CampaignPaths, command: str = "launch") -> str:
    """Id of the job of a controller that is launched now."""
    done = evo(command, str(paths.root), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    return str(record["job_id"] if command == "launch" else record["launched"])


def controllers(site: Site, paths: CampaignPaths) -> list[SlurmJob]:
    """Live jobs of the campaign's controllers, oldest first."""
    return of_name(site.commands, controller_name(paths, "crash"))


def owner(paths: CampaignPaths) -> dict[str, Any]:
    return read_json(paths.lease) if paths.lease.exists() else {}


def owned_by(paths: CampaignPaths, job_id: str, restart: int = 0) -> dict[str, Any]:
    """Wait until a run of a Slurm job owns the campaign."""
    return until(
        lambda: found if ((found := owner(paths)).get("slurm_job_id"), found.get("slurm_restart")) == (job_id, restart) else None,
        what=f"controller {job_id}, restart {restart}; {paths.controller_log} says: {log_of(paths)}",
    )


def log_of(paths: CampaignPaths) -> str:
    return paths.controller_log.read_text()[-2000:] if paths.controller_log.exists() else "(nothing)"


def over(site: Site, paths: CampaignPaths, seconds: float = 180) -> None:
    """Wait until no controller is left."""
    left = until_not(lambda: controllers(site, paths), seconds)
    assert not left, f"{left}\n{log_of(paths)}"


def never_two(paths: CampaignPaths) -> None:
    """What was done, was done by one controller after the other."""
    done_by = [json.loads(line)["generation"] for line in paths.events.read_text().splitlines()]
    assert done_by == sorted(done_by), done_by


def test_launched_refused_cancelled_adopted_requeued_and_out_of_time(site: Site) -> None:
    """One campaign, one training job, five controllers one after the other."""
    paths = site.campaign(step_seconds=6, slurm={"controller": {"partition": "debug", "warning_seconds": 30}})
    job = trained(paths)
    first = launched(paths)
    owned_by(paths, first)
    for command in ("launch", "run"):
        refused = evo(command, str(paths.root))
        assert refused.returncode == 2 and f"Slurm job {first}" in refused.stderr, refused.stderr
    assert status(paths)["controller"]["running"] is True
    at_step(job, 1)
    site.cluster.run("scancel", first)
    until_not(lambda: controllers(site, paths), 30)
    assert site.live(starts(job)[0]["slurm_name"]), "its job goes on"

    second = launched(paths)
    owned_by(paths, second)
    waits = site.cluster.run("sbatch", "--parsable", str(paths.controller_script)).stdout.strip()
    assert [(each.job_id, each.state) for each in controllers(site, paths)] == [(second, "RUNNING"), (waits, "PENDING")]
    site.scontrol("requeue", second)
    owned_by(paths, second, restart=1)
    assert not until_not(lambda: [each for each in controllers(site, paths) if each.job_id == waits], 20), "a successor that nobody needs"

    # As Slurm does before the time limit; that it does, and when, test_preemption.py sees with a job whose limit is near.
    site.cluster.run("scancel", "--batch", "--signal=USR2", second)
    owned_by(paths, second, restart=2)
    over(site, paths)
    site.same(paths)
    never_two(paths)
    assert claims(job) == [(0, 0)] and len(starts(job)) == 1, "adopted each time"
    assert owner(paths)["released"] is True
    again = evo("launch", str(paths.root))
    assert again.returncode == 2 and "nothing is left to do" in again.stderr


def test_one_that_may_not_be_requeued_hands_over_to_a_successor(site: Site) -> None:
    paths = site.campaign(step_seconds=3, slurm={"controller": {"partition": "debug", "warning_seconds": 30, "requeue": False}})
    first = launched(paths)
    owned_by(paths, first)
    at_step(trained(paths), 0)
    site.cluster.run("scancel", "--batch", "--signal=USR2", first)
    second = until(lambda: next((each.job_id for each in controllers(site, paths) if each.job_id != first), None), what="a successor")
    owned_by(paths, second)
    over(site, paths)
    site.same(paths)
    never_two(paths)
    assert claims(trained(paths)) == [(0, 0)]


RACE = """
import sys, time
from pathlib import Path
from evo_hpc.controller.ownership import job_lives
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.lease import LeaseHeld, acquire
folder, racers, races, me = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for race in range(races):
    place = folder / f"race-{race:03d}"
    (place / f"ready-{me}").touch()
    while len(list(place.glob("ready-*"))) < racers:
        time.sleep(0.0005)
    try:
        said = f"won {acquire(CampaignPaths(place / 'campaign'), ask=lambda owner: True).generation}"
    except LeaseHeld as error:
        said = f"lost {error}"
    (place / f"said-{me}").write_text(said)
"""


def race(folder: Path, launcher: Sequence[str], environment: dict[str, str]) -> list[list[str]]:
    """By race, what each racer says; all of them start each race together."""
    for number in range(RACES):
        (folder / f"race-{number:03d}" / "campaign" / "controller").mkdir(parents=True)
    (folder / "race.py").write_text(RACE)
    words = [sys.executable, str(folder / "race.py"), str(folder), str(RACERS), str(RACES)]
    if launcher:
        done = subprocess.run([*launcher, "sh", "-c", 'exec "$@" "$SLURM_PROCID"', "sh", *words], env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    else:
        processes = [subprocess.Popen([*words, str(me)], env=environment) for me in range(RACERS)]
        assert [process.wait(200) for process in processes] == [0] * RACERS
    return [[path.read_text() for path in sorted((folder / f"race-{number:03d}").glob("said-*"))] for number in range(RACES)]


@pytest.mark.parametrize("where", ["processes", "nodes"])
def test_of_two_controllers_started_at_once_one_wins(where: str, site: Site) -> None:
    """A hundred races of eight: processes of this host, and steps on four nodes."""
    launcher = ["srun", "--nodes=4", f"--ntasks={RACERS}", "--ntasks-per-node=2", "--mem=0", "--chdir=/"] if where == "nodes" else []
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for said in race(site.folder, launcher, environment):
        won = [each for each in said if each.startswith("won")]
        assert len(said) == RACERS and won == ["won 1"], said
        assert all("at this very moment" in each or "a controller runs this campaign already" in each for each in said if each not in won), said


def test_people_steer_it_by_files(site: Site) -> None:
    """Paused, a wrong wish and its mending, drained, gone on with; stopped now, resumed as a job; a budget raised, a version added."""
    paths = site.campaign(step_seconds=1)
    job, evaluation = trained(paths), paths.version("v0001").job("evaluate", 0)
    with site.running(paths) as process:
        at_step(job, 1)
        paths.control_yaml.write_text("state: pause\nreason: to look at it\n")
        until(lambda: job.record.exists(), what="the end of training, which goes on while paused")
        paths.control_yaml.write_text("# by hand\nstate: go\n")
        time.sleep(2)
        assert process.poll() is None and not evaluation.starts(), f"paused by a wish that nobody understands, too: {process.poll()}"
        said = json.dumps(status(paths))
        assert f"{paths.control_yaml.name}:2" in said, said
        paths.control_yaml.write_text("# by hand\nstate: drain\n")
        output = ended(process)
        assert f"{paths.control_yaml}:2" in output, output
    assert not evaluation.starts(), "nor is anything submitted by one that is told to come to its end"

    text = paths.campaign_yaml.read_text()
    paths.campaign_yaml.write_text(text + "budget: {wall_hours: 0.000001}\n")
    paths.control_yaml.unlink()
    refused = evo("run", str(paths.root))
    assert refused.returncode != 0 and f"{paths.campaign_yaml}:" in refused.stderr and "wall_hours" in refused.stderr, refused.stderr
    assert not evaluation.starts(), "no budget, no new job"
    site.profile(paths, step_seconds=2)
    assert evo("pause", str(paths.root), "--reason", "to look again").returncode == 0
    with site.running(paths) as process:
        until(lambda: owner(paths).get("process", {}).get("pid") == process.pid)
        # In one step each: a controller that reads a file half saved, or a version without its version.yaml, says so and ends.
        write_bytes(paths.campaign_yaml, (text + "budget: {wall_hours: 1000}\n").encode())
        new = paths.root / "being-written"
        new.mkdir()
        recipe = paths.version("v0001").recipe_yaml.read_text()
        (new / "recipe.yaml").write_text(recipe.replace("kl_coef:", "kl_coef: 0.0 #", 1))
        (new / "version.yaml").write_text("id: v0002\nparents: [v0001]\nauthor: person\nhypothesis: Without the KL term it gets better.\n"
                                          "prediction: {metric: dev/avg_at_k, direction: up, by: 0.01}\nrollback: Go on from v0001.\n")
        new.rename(paths.version("v0002").root)
        paths.control_yaml.write_text("state: run\n")
        at_step(trained_of(paths, "v0002"), 2)
        assert evo("stop", str(paths.root), "--now").returncode == 0
        ended(process)
    second = trained_of(paths, "v0002")
    stopped_at = saved(second, 0)[-1]
    assert read_json(second.incarnation(0).result)["stopped_by"] == "controller" and not site.live(), "its jobs have saved and are gone"
    number = launched(paths, "resume")
    owned_by(paths, number)
    over(site, paths)
    assert first_steps(second) == [1, stopped_at + 1] and starts(second)[1]["after"] is None
    assert outcome(paths) == site.undisturbed
    assert {each["id"]: bool(each["decision"]) for each in status(paths)["versions"]}["v0002"]
    assert read_json(second.record)["state"] == "done" and stopped_at < STEPS
    never_two(paths)


def trained_of(paths: CampaignPaths, version: str) -> Any:
    return paths.version(version).job("train", 0)
