"""`make demo-slurm`: the demo campaign on the private Slurm cluster of this machine, its controller a job too, a preemption in the middle.

Everything is done by the commands that a user of a real cluster types; they are shown. Run again it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.slurm_figures import campaign_figures, figures_text
from evo_hpc.config.slurm import Slurm
from evo_hpc.controller.launch import controller_name
from evo_hpc.controller.settings import load_settings
from evo_hpc.controller.skeleton import copy_campaign
from evo_hpc.dispatch.attempt import read_attempt
from evo_hpc.dispatch.slurm.commands import Commands, SlurmError
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.errors import EvoError, Failure, UserError
from evo_hpc.paths import CampaignPaths, Workspace
from evo_hpc.store.atomic import StoreError, read_json, write_bytes
from tests.cluster import Cluster
from tests.cluster.__main__ import default_prefix
from tools.same_outcome import comparison

REPOSITORY = Path(__file__).resolve().parents[1]
PROFILE = Path(__file__).with_name("demo-slurm.cluster.yaml")
QUIET_SECONDS = 13.0
"""Longest silence; after it a line says what goes on. The controller writes one every ten seconds while jobs run."""
PREEMPTED_VERSION, PREEMPT_AFTER_STEP, LAST_STEPS = "v0001", 12, 5
"""Whose training is preempted, after which of its steps, and how many from its end are too few to be worth it."""
URGENT = ("--partition=urgent", "--cpus-per-task=4", "--mem=100M", "--time=2", "--job-name=urgent", "--output=/dev/null")
"""A job for which there is no room on the training's node while that one is there (6 of 8 CPUs)."""
URGENT_SECONDS = 20
RETRY_SECONDS = 12.0
"""A controller that was killed counts as alive for about so long."""


@dataclass
class Narrator:
    """Prints lines with the time since the start, and one by itself when there were none for a while."""

    started: float = field(default_factory=time.monotonic)
    spoken: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        self.spoken = time.monotonic()
        minutes, seconds = divmod(int(self.spoken - self.started), 60)
        for line in text.splitlines() or [""]:
            print(f"[{minutes:02d}:{seconds:02d}] {line}", flush=True)

    @property
    def quiet(self) -> bool:
        return time.monotonic() - self.spoken >= QUIET_SECONDS

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say every now and then that this goes on."""
        over = threading.Event()

        def remind() -> None:
            while not over.wait(1.0):
                if self.quiet:
                    self.say(f"... {what}")

        reminder = threading.Thread(target=remind, daemon=True)
        reminder.start()
        try:
            yield
        finally:
            over.set()
            reminder.join()

    def command(self, *words: str, check: bool = True) -> int:
        """Run one of our commands, its output shown as it comes. Raises Failure when it fails, unless that is looked at by the caller."""
        shown = " ".join(["evo-hpc", *words])
        self.say(f"$ {shown}")
        with self.during(f"{shown} goes on"), subprocess.Popen(
            [sys.executable, "-m", "evo_hpc.cli", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.say(line.rstrip())
        if check and process.returncode:
            raise Failure(f"`{shown}` ended with exit code {process.returncode}; what it says is above")
        return process.returncode


@dataclass
class Demo:
    """One run of the demo; all that it must remember is in the campaign's own files and in Slurm."""

    cluster: Cluster
    workspace: Path
    preempt: bool
    narrator: Narrator = field(default_factory=Narrator)
    _read: int = 0
    """Bytes of the controller's log that were shown."""

    def __post_init__(self) -> None:
        self.paths = CampaignPaths(Workspace(self.workspace).campaigns / "demo")

    def prepare(self, proposals: int | None) -> None:
        """The cluster, and the campaign with a profile for it. Raises UserError for a folder with another profile."""
        self.narrator.say(f"The cluster is in {self.cluster.layout.prefix}, the campaign in {self.paths.root}")
        with self.narrator.during("the cluster comes up (the first time with its packages: a minute)"):
            self.cluster.up()
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
            del os.environ[name]  # of another cluster, or of a job that this runs in
        os.environ.update(self.cluster.environment)
        if not self.paths.campaign_yaml.exists():
            if not self.paths.cluster_yaml.exists():
                write_bytes(self.paths.cluster_yaml, PROFILE.read_bytes())
            copy_campaign("demo", self.workspace)
            if proposals is not None:
                text, made = re.subn(r"(?m)^  proposals: \d+", f"  proposals: {proposals}", self.paths.campaign_yaml.read_text(encoding="utf-8"))
                assert made == 1, self.paths.campaign_yaml
                write_bytes(self.paths.campaign_yaml, text.encode())
        if load_settings(self.paths).cluster.executor != "slurm":
            raise UserError(f"{self.paths.cluster_yaml}: says `executor: local`; choose another folder: DEMO_ARGS='--workspace DIR'")
        self.commands = Commands.of(Slurm())
        self.controller = controller_name(self.paths, load_settings(self.paths).campaign.name)

    def launch(self) -> None:
        """Check, and submit the controller; nothing where it is there already."""
        if self.live():
            self.narrator.say("The controller is in the queue already.")
            return
        self.narrator.command("doctor", "--cluster", str(self.paths.root))
        self._read = self.paths.controller_log.stat().st_size if self.paths.controller_log.exists() else 0
        if self.narrator.command("launch", str(self.paths.root), check=False):
            self.narrator.say(f"Once more in {RETRY_SECONDS:.0f} s: a controller that has just died counts as alive until then.")
            time.sleep(RETRY_SECONDS)
            self.narrator.command("launch", str(self.paths.root))

    def live(self) -> list[SlurmJob]:
        """The controllers in the queue."""
        return [job for job in self.commands.queue() if job.name == self.controller and life(job.state) != "terminal"]

    def done(self) -> bool:
        """Whether nothing is left for a controller to do."""
        found = subprocess.run([sys.executable, "-m", "evo_hpc.cli", "status", "--json", str(self.paths.root)], capture_output=True, text=True)
        if found.returncode:
            raise Failure(found.stderr.strip())
        return bool(json.loads(found.stdout)["done"])

    def follow(self) -> None:
        """Show the controller's log until it has ended for good, and send the urgent job when it is time. Raises Failure."""
        absent = 0
        while absent < 3:
            try:
                jobs = self.commands.queue()
            except SlurmError as error:
                self.narrator.say(f"Slurm does not answer: {error}")
                time.sleep(2)
                continue
            absent = 0 if any(job.name == self.controller and life(job.state) != "terminal" for job in jobs) else absent + 1
            self._show_log()
            if self.preempt and self._is_time():
                self._send_urgent(jobs)
            if self.narrator.quiet:
                own = self.controller.removesuffix("controller")
                ours = [job for job in jobs if job.name.startswith(own) and life(job.state) != "terminal"]
                self.narrator.say(", ".join(f"{job.name} ({job.id}) {job.state.lower()}" for job in ours) or "none of its jobs is in the queue")
            time.sleep(0.5)
        self._show_log()
        if not self.done():
            raise Failure(f"the controller has ended, but the campaign is not done; its log: {self.paths.controller_log}")

    def _show_log(self) -> None:
        if not self.paths.controller_log.exists():
            return
        with self.paths.controller_log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        if whole:
            self.narrator.say(whole.decode(errors="replace").rstrip("\n"))

    def _is_time(self) -> bool:
        """Whether the training to be preempted is in its middle, for the first time."""
        job = self.paths.version(PREEMPTED_VERSION).job("train", 0)
        if len(job.claims()) != 1:
            if job.claims():
                self.preempt = False  # it was interrupted already
            return False
        try:
            progress = read_json(job.incarnation(job.claims()[0][0]).progress)
        except StoreError:
            return False
        step = progress.get("step", 0)
        if step > progress.get("steps", 0) - LAST_STEPS:
            self.preempt = False
        return self.preempt and progress.get("stage") == "training" and step >= PREEMPT_AFTER_STEP

    def _send_urgent(self, jobs: Sequence[SlurmJob]) -> None:
        attempt = read_attempt(self.paths.version(PREEMPTED_VERSION).job("train", 0))
        names = {start.slurm_name for start in attempt.starts}
        training = next((job for job in jobs if job.name in names and job.state == "RUNNING"), None)
        if training is None:
            return
        answer = self.commands.run("sbatch", "--parsable", *URGENT, f"--nodelist={training.nodes}", f"--wrap=sleep {URGENT_SECONDS}")
        if answer.code:
            raise Failure(f"the urgent job was refused: {answer.err.strip()}")
        self.preempt = False
        self.narrator.say(f"An urgent job of higher priority ({answer.out.strip()}) wants {training.nodes}, where {PREEMPTED_VERSION} trains "
                          f"({training.id}).")

    def conclude(self) -> None:
        """The claim, the report, and what it all took."""
        root = str(self.paths.root)
        self.narrator.command("finalize", root, check=False)  # nothing promoted is an outcome, too
        self.narrator.command("report", root)
        self.narrator.command("lineage", root)
        self.narrator.command("cost", root)
        self.narrator.say(figures_text(campaign_figures(self.paths)))


def finished(paths: CampaignPaths) -> bool:
    """Whether it is a demo with its claim."""
    return paths.campaign_yaml.exists() and paths.report_html.exists()


def guarded(demo: Demo, run: Callable[[], None]) -> int:
    """Run it; whatever ends it early is one message that says how to go on and how to clear up. The exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        problem, code = "interrupted; the jobs go on in the cluster", 130
    except (EvoError, OSError, subprocess.SubprocessError) as error:
        problem, code = str(error), getattr(error, "exit_code", 1)
    else:
        return 0
    prefix = f" CLUSTER_ARGS='--prefix {demo.cluster.prefix}'" if demo.cluster.prefix != default_prefix() else ""
    print(f"demo-slurm: {problem}\nRun the same command again to go on. `make cluster-down{prefix}` ends all jobs and the cluster; the campaign "
          f"stays in {demo.paths.root}", file=sys.stderr)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as of evo-hpc: 0 fine, 1 failure, 2 yours to mend, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="make demo-slurm", description="The demo campaign on a private Slurm cluster; options as DEMO_ARGS='...'.")
    parser.add_argument("--workspace", type=Path, default=REPOSITORY / "workspace-slurm", help="folder for the campaign (default: %(default)s)")
    parser.add_argument("--prefix", type=Path, default=default_prefix(), help="folder of the cluster, as of `make cluster-up` (default: %(default)s)")
    parser.add_argument("--no-preemption", action="store_true", help="send no urgent job")
    parser.add_argument("--proposals", type=int, help="versions after v0001 (default: as campaigns/demo says); counts where the workspace is new")
    parser.add_argument("--compare", type=Path, default=REPOSITORY / "workspace" / "campaigns" / "demo",
                        help="a campaign of `make demo` to compare with, where it is finished (default: %(default)s)")
    options = parser.parse_args(arguments)
    demo = Demo(Cluster(Path(os.path.abspath(options.prefix))), Path(os.path.abspath(options.workspace)), preempt=not options.no_preemption)

    def run() -> None:
        demo.prepare(options.proposals)
        if demo.live() or not demo.done():
            demo.launch()
            demo.follow()
        demo.conclude()
        other = CampaignPaths(options.compare.absolute())
        if finished(other):
            demo.narrator.say(comparison(demo.paths, other))
        demo.narrator.say(f"Report: {demo.paths.report_html}")
        prefix = f" CLUSTER_ARGS='--prefix {demo.cluster.prefix}'" if demo.cluster.prefix != default_prefix() else ""
        demo.narrator.say(f"The cluster is still up: `. {demo.cluster.layout.env_script}` to use it, `make cluster-down{prefix}` to end it.")

    return guarded(demo, run)


if __name__ == "__main__":
    sys.exit(main())
