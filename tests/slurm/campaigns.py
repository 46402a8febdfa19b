"""Campaigns of stand-in jobs on the test cluster: begun cheaply, run by real controllers, disturbed, and checked at their end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.jobs.spec import root_digest
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.processes import find_by_argument
from tests.cluster import Cluster
from tests.crash.campaign import EVERY, check_sound, controller, evo, make_campaign, outcome

T = TypeVar("T")
SLURM: dict[str, Any] = {
    "defaults": {"partition": "debug", "minutes": 5, "warning_seconds": 20}, "poll_seconds": 0.5, "settle_seconds": 10, "submit_seconds": 10, "backoff_seconds": 1,
}
STEP_SECONDS = 0.5
LONG = 240.0
"""Seconds after which nothing that is waited for will come any more, on a machine with other work, too."""


@dataclass
class Site:
    """The test cluster, as one test uses it; left without jobs and controllers."""

    cluster: Cluster
    commands: Commands
    folder: Path
    begun: Path
    """A campaign whose root is scored and whose first version is still to be trained."""
    undisturbed: dict[str, Any]
    """What it comes to where nothing happens."""

    def campaign(self, name: str = "campaign", *, step_seconds: float = STEP_SECONDS, slurm: dict[str, Any] | None = None, **cluster: Any) -> CampaignPaths:
        """A copy of the begun campaign, whose jobs go to the cluster from now on; `slurm` is laid over SLURM."""
        paths = CampaignPaths(self.folder / name)
        shutil.copytree(self.begun, paths.root)
        return self.profile(paths, step_seconds=step_seconds, slurm=slurm, **cluster)

    def profile(self, paths: CampaignPaths, *, step_seconds: float = STEP_SECONDS, slurm: dict[str, Any] | None = None, **cluster: Any) -> CampaignPaths:
        """Write cluster.yaml anew."""
        settings = json.loads((self.begun / paths.cluster_yaml.name).read_text())
        environment = {**settings["environment"], "FAKE_STEP_SECONDS": str(step_seconds), **cluster.pop("environment", {})}
        merged = {**SLURM, **(slurm or {})}
        merged["defaults"] = {**SLURM["defaults"], **(slurm or {}).get("defaults", {})}
        settings |= {"executor": "slurm", "max_attempts": 2, "environment": environment, "slurm": merged, **cluster}
        paths.cluster_yaml.write_text(json.dumps(settings))
        return paths

    def live(self, name: str = "evo-") -> list[SlurmJob]:
        """Jobs whose names begin so that are not over."""
        return [job for job in self.commands.queue() if job.name.startswith(name) and life(job.state) != "terminal"]

    def scontrol(self, *words: str) -> str:
        """One scontrol, which must end well."""
        done = self.cluster.run("scontrol", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def mark(self, state: str, *names: str) -> None:
        """Tell Slurm of a node's death, or recovery, rather than wait until it notices (half a minute)."""
        for name in names:
            done = self.cluster.run("scontrol", "update", f"nodename={name}", f"state={state}", "reason=test")
            assert done.returncode == 0 or state == "resume", done.stderr  # one that is in service cannot be resumed

    @contextmanager
    def running(self, paths: CampaignPaths) -> Iterator[subprocess.Popen[str]]:
        """A controller of the campaign as a process of this machine, killed at the end where it still is."""
        process = controller(paths)
        try:
            yield process
        except BaseException:
            process.kill()
            print(process.communicate()[0])  # why it was not what the test waited for
            raise
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def same(self, paths: CampaignPaths) -> None:
        """The end is sound, that of the undisturbed campaign, and leaves no job."""
        check_sound(paths)
        assert outcome(paths) == self.undisturbed
        left = until_not(lambda: self.live(f"evo-crash-{root_digest(str(paths.root.resolve()))}-"), 20)
        assert not left, left


def ended(process: subprocess.Popen[str], code: int = 0, seconds: float = LONG) -> str:
    """What a controller printed, once it has ended with that code."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"no end after {seconds:.0f} s:\n{process.communicate()[0]}") from None
    assert process.returncode == code, output
    return output


def until(look: Callable[[], T | None], seconds: float = LONG, what: str = "") -> T:
    """The first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what or look}: not within {seconds:.0f} s"
        time.sleep(0.05)
    return found


def until_not(look: Callable[[], T], seconds: float) -> T:
    """The first answer that is false, or the last one where all are true: a job ends a moment after its result is there."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def step_of(job: JobPaths, incarnation: int = 0) -> int:
    """How far an incarnation says that it is; -1 before it says anything."""
    path = job.incarnation(incarnation).progress
    return int(read_json(path).get("step", 0)) if path.exists() and path.stat().st_size else -1


def at_step(job: JobPaths, step: int, incarnation: int = 0) -> int:
    """Wait until an incarnation is that far; how far it is."""
    return until(lambda: found if (found := step_of(job, incarnation)) >= step else None, what=f"step {step} of {job.incarnation(incarnation).root}")


def first_steps(job: JobPaths) -> list[int]:
    """By incarnation, the first step that it made anew, from the parts it wrote."""
    found = []
    for incarnation in job.incarnations():
        parts = sorted(incarnation.steps.glob("part-*.parquet"))
        found.append(int(parts[0].name.split("-")[1]) if parts else 0)
    return found


def saved(job: JobPaths, incarnation: int) -> list[int]:
    """Steps of the checkpoints of an incarnation."""
    return sorted(int(path.name.split("-")[1]) for path in job.incarnation(incarnation).checkpoints.glob("step-*"))


def status(paths: CampaignPaths) -> dict[str, Any]:
    """What `evo-hpc status --json` says."""
    done = evo("status", str(paths.root), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def said_of(paths: CampaignPaths, owner: str = "v0001") -> str:
    """What it says of the live job of a version; empty where it knows none."""
    return next((str(job["said"]) for job in status(paths)["jobs"] if job["owner"] == owner), "")


def trained(paths: CampaignPaths, attempt: int = 0) -> JobPaths:
    """The training job of the first version."""
    return paths.version("v0001").job("train", attempt)


def starts(job: JobPaths) -> list[dict[str, Any]]:
    """start-N.json, in order."""
    return [read_json(path) for _, path in job.starts()]


def claims(job: JobPaths) -> list[tuple[int, int]]:
    """(start, restart) of each incarnation, in order."""
    return [(read_json(path)["start"], read_json(path)["restart"]) for _, path in job.claims()]


def kill_launcher(job: JobPaths) -> None:
    """SIGKILL to the launcher of an attempt, on whatever node; `scancel --signal=KILL` would count as cancelled by hand."""
    launchers = [pid for pid in find_by_argument("--job", str(job.root)) if b"evo_hpc.dispatch.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert launchers
    for pid in launchers:
        os.kill(pid, signal.SIGKILL)


def begin(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A campaign up to its root's score, made on this machine, and what a copy of it comes to undisturbed."""
    paths = make_campaign(folder / "begun")
    done = evo("run", str(paths.root), "--until", "v0000")
    assert done.returncode == 0, done.stderr
    copy = CampaignPaths(folder / "undisturbed")
    shutil.copytree(paths.root, copy.root)
    done = evo("run", str(copy.root))
    assert done.returncode == 0, done.stderr
    check_sound(copy)
    return paths.root, outcome(copy)


@contextmanager
def site_of(cluster: Cluster, folder: Path, begun: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """What a fixture needs; at its end nothing is in the queue, so that the next test finds the cluster as this one did."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    commands = Commands.of(Slurm())
    yield Site(cluster, commands, folder, *begun)
    commands.cancel([job.id for job in commands.queue()])
    cluster.wait_idle()


__all__ = [
    "EVERY", "LONG", "SLURM", "STEP_SECONDS", "Site", "at_step", "begin", "claims", "ended", "evo", "first_steps", "kill_launcher", "said_of", "saved", "site_of",
    "starts", "status", "step_of", "trained", "until",
]
