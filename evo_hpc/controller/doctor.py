"""`evo-hpc doctor`: what of this machine, this filesystem and this cluster will fail a campaign, said before anything is queued."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.slurm import SlurmKind
from evo_hpc.controller.preflight import NotReady, check_machine
from evo_hpc.dispatch.slurm.asked import Asked
from evo_hpc.dispatch.slurm.check import check, worst
from evo_hpc.dispatch.slurm.check_time import preemption_of
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.errors import SlurmUnavailable, clean
from evo_hpc.dispatch.slurm.script import BadScript, Task, controller_script, job_script
from evo_hpc.dispatch.slurm.site import Partition, Site, read_site
from evo_hpc.errors import EvoError
from evo_hpc.paths import CampaignPaths, IncarnationPaths
from evo_hpc.store.atomic import StoreError, read_json
from evo_hpc.store.checks import CheckResult, Level
from evo_hpc.store.mount import check_mount, workplace
from evo_hpc.store.mount_peers import PATIENCE_SECONDS, VISIBLE, judge, parse_reports

SAVE_SECONDS = "save_seconds"
"""Key of a trainer's progress: how long its last checkpoint took to write."""
PEERS = 2
BETWEEN_NODES: tuple[SlurmKind, ...] = ("train", "evaluate", "supervise", "controller")
START_SECONDS = 30
"""How long the test across nodes may wait for nodes."""
RACE_SECONDS = 30.0
"""Longest time that the race itself takes, beside the waiting for each other."""
_STYLE = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(paths: CampaignPaths | None, cluster: Cluster, *, cluster_checks: bool, commands: Commands | None = None) -> list[CheckResult]:
    """All findings. Without a campaign its mount is not looked at. `cluster_checks` asks Slurm, and starts one job of seconds on two nodes.

    A cluster that does not answer is a finding, not an exception.
    """
    found = check_this_machine(cluster, paths.root if paths else Path.cwd())
    of_slurm = check_slurm(paths, cluster, commands) if cluster_checks else []
    if paths is not None:
        seen_by_others = any(each.check == VISIBLE and each.level != "error" for each in of_slurm)
        found += check_mount(paths.root, many_machines=(cluster.executor == "slurm" or cluster_checks) and not seen_by_others)
    return found + of_slurm


def exit_code(results: Iterable[CheckResult]) -> int:
    """2 where something will fail, else 0."""
    return 2 if worst(results) == 2 else 0


def check_this_machine(cluster: Cluster, folder: Path) -> list[CheckResult]:
    """Interpreter, packages and room, as they are looked for before a campaign starts."""
    try:
        check_machine(cluster, folder)
    except NotReady as error:
        return [CheckResult("machine", "error", line) for line in str(error).splitlines()]
    if cluster.python is not None:
        return [_interpreter(cluster.python)]
    return [CheckResult("machine", "ok", f"{sys.executable} has the packages that jobs need")]


def _interpreter(python: str) -> CheckResult:
    remedy = "cluster.yaml: python: an interpreter into which evo-hpc is installed"
    try:
        command = [shutil.which(python) or python, "-c", "import evo_hpc"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult("machine", "error", f"{python} does not run ({error})", remedy)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        return CheckResult("machine", "error", f"{python} cannot import evo_hpc ({said})", remedy)
    return CheckResult("machine", "ok", f"{python} runs and has evo_hpc")


def check_slurm(paths: CampaignPaths | None, cluster: Cluster, commands: Commands | None = None) -> list[CheckResult]:
    """The profile against the live cluster, Slurm's own verdict on each kind of job, the mount between two nodes, saves against the grace."""
    found: list[CheckResult] = []
    try:
        commands = commands or Commands.of(cluster.slurm)
        site = read_site(commands)
        found += check(cluster.slurm, site)
        found += ask_slurm(cluster, commands, paths)
        if paths is not None:
            found += check_saving(newest_save_seconds(paths), cluster, site)
            found += check_between_nodes(paths.root, cluster, site, commands)
    except SlurmUnavailable as error:
        found.append(CheckResult(
            "slurm", "error",
            str(error),
            "nothing can be submitted before it answers: `scontrol ping` says whether slurmctld is up",
        ))
    except EvoError as error:
        found.append(CheckResult("slurm", "error", str(error)))
    return found


def ask_slurm(cluster: Cluster, commands: Commands, paths: CampaignPaths | None) -> list[CheckResult]:
    """`sbatch --test-only` on the script of each kind: nothing is queued."""
    found: dict[tuple[Level, str], list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="evo-doctor-") as folder:
        for kind in cluster.slurm.kinds:
            script = Path(folder) / f"{kind}.sh"
            level: Level = "error"
            try:
                script.write_text(example_script(cluster, Asked(kind, cluster.slurm), paths.root if paths else Path(folder)))
                answer = commands.run("sbatch", "--test-only", str(script))
                said = clean(answer.err)
                level = "ok" if answer.code == 0 else "error"
            except BadScript as error:
                said = str(error)
            found.setdefault((level, "would be accepted" if level == "ok" else said), []).append(kind)
    return [
        CheckResult(f"{', '.join(kinds)}: sbatch", level, text if level == "ok" else f"sbatch --test-only: {text}",
                    None if level == "ok" else "cluster.yaml: what the findings above name, or ask the cluster's staff")
        for (level, text), kinds in found.items()
    ]


def example_script(cluster: Cluster, asked: Asked, root: Path) -> str:
    """A script of that kind as it would be submitted, for a job that does not exist."""
    paths, python = CampaignPaths(root), [cluster.python or sys.executable]
    if asked.kind == "controller":
        return controller_script(asked.resources, name="evo-doctor", log=paths.controller_log, python=python, campaign=root)
    job = paths.base.job(asked.kind, 0)
    shards = cluster.slurm.shards if asked.kind == "evaluate" else 1
    tasks = [Task(index if shards > 1 else None, job.root, "evo-doctor", 0) for index in range(shards)]
    return job_script(asked.resources, name="evo-doctor", log=job.slurm_log, python=python, tasks=tasks, generation=0)


def check_between_nodes(folder: Path, cluster: Cluster, site: Site, commands: Commands) -> list[CheckResult]:
    """A race between two nodes for the same names in the campaign's folder, and how soon one sees what the other writes.

    On nodes where training runs, if two are free, else on those of the other kinds of jobs.
    """
    python, why = cluster.python or sys.executable, ""
    tried: list[list[str]] = []
    for asked in (Asked(kind, cluster.slurm) for kind in BETWEEN_NODES):
        if not can_span(asked, site) or (placed := placement(asked)) in tried:
            continue
        tried.append(placed)
        try:
            with workplace(folder) as place:
                peer = [python, "-m", "evo_hpc.store.mount", str(place), "--peer", str(PEERS), "--patience", str(PATIENCE_SECONDS)]
                answer = commands.run(*placed, *peer, seconds=START_SECONDS + 2 * PATIENCE_SECONDS + RACE_SECONDS)
        except OSError as error:
            return [CheckResult("nodes: race", "error", f"{folder}: {error.strerror}")]
        if reports := parse_reports(answer.out):
            return judge(reports, PEERS)
        why = clean(answer.err) or f"srun ended with {answer.code}"
    if not tried:
        return [CheckResult("nodes: race", "warning", f"not tested between nodes: no partition of the profile has {PEERS} of them that are up")]
    return [CheckResult("nodes: race", "warning", f"not tested between nodes ({why})",
                        f"run it again when {PEERS} nodes are free; the interpreter {python} must start on them, too")]


def can_span(asked: Asked, site: Site) -> bool:
    """Whether a kind of job may run on two nodes that are up."""
    return any(
        sum(site.nodes[name].usable for name in partition.nodes) >= PEERS and (partition.max_nodes or PEERS) >= PEERS
        for partition in _partitions(asked, site)
    )


def placement(asked: Asked) -> list[str]:
    """srun of one small task on each of two nodes where that kind of job runs, in its container."""
    wanted = asked.resources
    placed = {"partition": wanted.partition, "account": wanted.account, "qos": wanted.qos, "constraint": wanted.constraint,
              "reservation": wanted.reservation, "exclude": wanted.exclude}
    return [
        "srun", f"--nodes={PEERS}", f"--ntasks={PEERS}", "--ntasks-per-node=1", "--job-name=evo-doctor", "--time=5", "--mem=256M",
        f"--immediate={START_SECONDS}", "--input=none", *(f"--{name}={value}" for name, value in placed.items() if value is not None),
        *(wanted.container or []),
    ]


def newest_save_seconds(paths: CampaignPaths) -> float | None:
    """How long the newest training job's last checkpoint took, of all versions; null where none was measured."""
    newest: tuple[float, float] | None = None
    jobs = [job for version in paths.versions() for job in version.jobs() if job.kind == "train"]
    for incarnation in (each for job in jobs for each in job.incarnations()):
        seen = _save_of(incarnation)
        if seen is not None and (newest is None or seen > newest):
            newest = seen
    return newest[1] if newest else None


def _save_of(incarnation: IncarnationPaths) -> tuple[float, float] | None:
    try:
        progress = read_json(incarnation.progress)
        return float(progress.get("time", 0.0)), float(progress[SAVE_SECONDS])
    except (StoreError, AttributeError, KeyError, TypeError, ValueError):  # not there yet, or of a job that has not saved
        return None


def check_saving(seconds: float | None, cluster: Cluster, site: Site) -> list[CheckResult]:
    """Whether a save fits between the warning and the end: of the time limit, and of a preemption's grace."""
    asked = Asked("train", cluster.slurm)
    if seconds is None:
        return [CheckResult(
            "train: save", "ok",
            f"how long a checkpoint takes was not measured yet; it has {asked.warning_seconds} s before a time limit",
        )]
    found = []
    if seconds > asked.warning_seconds:
        found.append(CheckResult(
            "train: save", "warning",
            f"a checkpoint took {seconds:.1f} s, the warning before a time limit comes {asked.warning_seconds} s ahead: the steps since the last "
            "one will be lost",
            f"{asked.where('warning_seconds')}: {2 * seconds:.0f}",
        ))
    else:
        found.append(CheckResult(
            "train: save", "ok",
            f"a checkpoint took {seconds:.1f} s, the warning before a time limit comes {asked.warning_seconds} s ahead",
        ))
    for partition in _partitions(asked, site):
        preemption = preemption_of(asked, site, partition)
        if preemption is None or preemption.mode == "suspend" or not site.warns_of_preemption:
            continue
        fits = seconds <= preemption.grace_seconds
        found.append(CheckResult(
            "train: save", "ok" if fits else "warning",
            f"a preemption in {partition.name} leaves {preemption.grace_seconds:.0f} s, a checkpoint took {seconds:.1f} s: "
            + ("at most one step is lost" if fits else "the steps since the last checkpoint are lost"),
            None if fits else "save more often (recipe: checkpoint.every), or take a partition with a longer GraceTime"))
    return found


def _partitions(asked: Asked, site: Site) -> Sequence[Partition]:
    return [site.partitions[name] for name in asked.partition_names(site) if name in site.partitions]


def record(results: Sequence[CheckResult]) -> dict[str, Any]:
    """For --json."""
    count = {level: sum(result.level == level for result in results) for level in _STYLE}
    return {"checks": [asdict(result) for result in results], "errors": count["error"], "warnings": count["warning"], "exit_code": exit_code(results)}


def view(results: Sequence[CheckResult]) -> RenderableType:
    """For people: one line a finding, its remedy below it, and the sum."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(overflow="fold")
    for result in results:
        text = Text(result.text)
        if result.remedy:
            text.append(f"\n-> {result.remedy}", "bold" if result.level == "error" else "")
        table.add_row(Text(result.level, _STYLE[result.level]), Text(result.check), text)
    told = record(results)
    style = "red" if told["errors"] else "yellow" if told["warnings"] else "green"
    return Group(table, Text(), Text(f"{told['errors']} errors, {told['warnings']} warnings.", style))
