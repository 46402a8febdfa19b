"""The controller as a Slurm job of its own: its launch, and what a launch would do."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from evo_hpc.config.base import Config
from evo_hpc.controller.blockers import blocked
from evo_hpc.controller.names import check_names
from evo_hpc.controller.plan import FIRST, make_plan
from evo_hpc.controller.settings import Settings
from evo_hpc.controller.state import CampaignState, read_state
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.environment import environment_for_jobs
from evo_hpc.dispatch.slurm.errors import SlurmUnavailable
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.slurm.script import Task, controller_script, job_script
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.dispatch.slurm.submit import submit
from evo_hpc.errors import Failure, UserError
from evo_hpc.jobs.spec import JobKind, job_name, name_prefix
from evo_hpc.paths import CampaignPaths, JobPaths
from evo_hpc.store.atomic import AlreadyWritten, write_json_once
from evo_hpc.store.lease import Owner, current_owner, owner_may_live

CLOCK_SKEW_SECONDS = 60.0
"""How far the clock of Slurm's host may be behind this one's."""
LOOK_SECONDS = 2.0
"""Between two looks into the queue, or two tries."""

Clock = Callable[[], float]
Sleep = Callable[[float], None]


class ControllerLives(UserError):
    """A controller of the campaign runs, waits in the queue, or may."""


class NothingToLaunch(UserError):
    """The campaign is done."""


class LaunchUncertain(Failure):
    """sbatch did not answer, and no job has shown up."""


class LaunchRecord(Config):
    """`launch-N.json`, write-once, before the N-th controller is submitted."""

    number: int
    slurm_name: str
    """Name of its Slurm job, the same each time."""
    written_at: float


@dataclass(frozen=True)
class Launched:
    """A controller in the queue."""

    record: LaunchRecord
    job_id: str
    script: Path
    log: Path
    note: str = ""
    """What is to be said about how it got there."""


@dataclass(frozen=True)
class Script:
    """A batch script that would be submitted."""

    name: str
    """Of the Slurm job."""
    path: Path
    """Where it would be written."""
    text: str


def controller_name(paths: CampaignPaths, campaign: str) -> str:
    """Name of the campaign's controllers in Slurm, which no other campaign's has."""
    return f"{name_prefix(str(paths.root.resolve()), campaign)}controller"


def launch(
    paths: CampaignPaths, *, take_over: bool = False, until: str | None = None, commands: Commands | None = None, now: Clock = time.time,
    sleep: Sleep = time.sleep,
) -> Launched:
    """Submit the controller of a campaign as a job that `slurm: controller:` of cluster.yaml describes.

    It works with `executor: local`, too: jobs then run beside the controller, in its allocation, as on one machine.

    Raises UserError for a campaign that `evo-hpc run` would refuse, NothingToLaunch for one that is done, ControllerLives; what
    sbatch says (SlurmRefused, SlurmBusy, SlurmMissing); SlurmUnavailable when the queue could not be asked, before anything was
    submitted; LaunchUncertain when sbatch did not answer and no job shows up within `settle_seconds`.
    """
    state = _checked(paths, until)
    campaign, slurm = state.settings.campaign, state.settings.cluster.slurm
    commands = commands or Commands.of(slurm)
    name = controller_name(paths, campaign.name)
    text = _controller_text(paths, state.settings, take_over, until)
    _refuse_a_second(paths, commands.queue(), name, take_over, now())
    record = next_launch(paths, name, now)
    try:
        job_id, note = submit(environment_for_jobs(slurm), text, paths.controller_script, seconds=slurm.command_seconds), ""
    except SlurmUnavailable as error:
        found = _look(commands, record, slurm.settle_seconds, now, sleep)
        if found is None:
            raise LaunchUncertain(
                f"{paths.root}: sbatch did not answer ({error}), and within {slurm.settle_seconds:.0f} s no job named {name} has shown up. "
                f"See later with `squeue --name={name}`, and launch again if there is none: should both come, the first cancels the other."
            ) from error
        job_id, note = found.job_id, f"sbatch did not answer ({error}), but the job is in the queue"
    return Launched(record, job_id, paths.controller_script, paths.controller_log, note)


def dry_run(paths: CampaignPaths, *, take_over: bool = False, until: str | None = None) -> list[Script]:
    """Every script that a launch leads to, written nowhere: the controller's, and where jobs go to Slurm one of each kind, for the
    first job of that kind. Asks Slurm nothing that the state of the campaign does not need. Raises UserError as `launch` does."""
    settings = _checked(paths, until).settings
    name = controller_name(paths, settings.campaign.name)
    found = [Script(name, paths.controller_script, _controller_text(paths, settings, take_over, until))]
    if settings.cluster.executor == "slurm":
        first = paths.version(FIRST)
        shards = settings.cluster.slurm.shards
        evaluations = [first.job("evaluate", 0, shard) for shard in range(shards)] if shards > 1 else [first.job("evaluate", 0)]
        examples: dict[JobKind, list[JobPaths]] = {
            "supervise": [paths.base.job("supervise", 0)], "train": [first.job("train", 0)], "evaluate": evaluations,
        }
        if settings.cluster.slurm.analyse is not None:
            examples["analyse"] = [first.job("analyse", 0)]
        found += [_example(paths, settings, kind, jobs) for kind, jobs in examples.items()]
    return found


def _checked(paths: CampaignPaths, until: str | None) -> CampaignState:
    """The state of a campaign that a controller would go on with."""
    state = read_state(paths, hashes=True)
    check_names(state)
    owner = current_owner(paths)
    plan = make_plan(state, 1 + (owner.generation if owner is not None else 0), until)  # a person's new try
    if plan.done:
        what = f"nothing is left to do{f' until {until}' if until else ''}"
        raise NothingToLaunch(f"{paths.root}: {what}; see `evo-hpc status {shlex.quote(str(paths.root))}`")
    if plan.blockers and not plan.running and not plan.waiting and not plan.actions:
        raise blocked(plan.blockers)
    return state


def _controller_text(paths: CampaignPaths, settings: Settings, take_over: bool, until: str | None) -> str:
    return controller_script(
        settings.cluster.slurm.of("controller"), name=controller_name(paths, settings.campaign.name), log=paths.controller_log,
        python=[sys.executable], campaign=paths.root,
        arguments=[*(["--take-over"] if take_over else []), *(["--until", until] if until else [])],
    )


def _example(paths: CampaignPaths, settings: Settings, kind: JobKind, jobs: list[JobPaths]) -> Script:
    root, campaign = str(paths.root.resolve()), settings.campaign.name
    tasks = [
        Task(index if len(jobs) > 1 else None, job.root.absolute(), job_name(root, campaign, job.owner.name, job.root.name), start=0)
        for index, job in enumerate(jobs)
    ]
    name = f"{tasks[0].job_name}-s0"
    text = job_script(
        settings.cluster.slurm.of(kind), name=name, log=jobs[0].slurm_log, python=[settings.cluster.python or sys.executable], tasks=tasks,
        generation=1,
    )
    return Script(name, jobs[0].script(0), text)


def _refuse_a_second(paths: CampaignPaths, queue: Iterable[SlurmJob], name: str, take_over: bool, now: float) -> None:
    """Raise ControllerLives when one is in the queue, or owns the campaign and may live."""
    live = [job for job in queue if life(job.state) != "terminal"]
    root, log = shlex.quote(str(paths.root)), shlex.quote(str(paths.controller_log))
    for job in live:
        if job.name == name:
            waits = life(job.state) == "queued"
            reason = f", {job.reason}" if waits and job.reason not in ("", "None") else ""
            watch, stop = (f"squeue --job={job.id}", f"scancel {job.id}") if waits else (f"tail -f {log}", f"evo-hpc stop {root}")
            raise ControllerLives(f"{paths.root}: its controller is Slurm job {job.id} already ({job.state}{reason}). Watch it with `{watch}`, "
                                  f"or stop it with `{stop}`.")
    owner = current_owner(paths)
    if owner is None or owner.released:
        return
    job_words = f"Slurm job {owner.slurm_job_id}, " if owner.slurm_job_id else ""
    where = f"{job_words}process {owner.process.pid} on {owner.process.host} (generation {owner.generation})"
    age = now - owner.heartbeat_at

    def ask(owner: Owner) -> bool:
        return any((job.id, job.name) == (owner.slurm_job_id, owner.slurm_job_name) for job in live)

    if owner_may_live(owner, now, ask):
        raise ControllerLives(f"{paths.root}: a controller runs this campaign: {where}, last heard of {age:.0f} s ago. Watch it with "
                              f"`evo-hpc status {root}`, or stop it with `evo-hpc stop {root}`; if it has just died, launch again in a moment.")
    if not owner.process.here() and owner.slurm_job_id is None and not take_over:
        raise ControllerLives(f"{paths.root}: owned by {where}, silent for {age:.0f} s; this host cannot tell whether it is dead. If you know "
                              "that it is, launch again with --take-over.")


def next_launch(paths: CampaignPaths, name: str, now: Clock) -> LaunchRecord:
    """The next record, on disk. Of two launches at once each has its own: singleton lets one of their jobs run."""
    while True:
        number = 1 + max((number for number, _ in paths.launches()), default=-1)
        record = LaunchRecord(number=number, slurm_name=name, written_at=now())
        try:
            write_json_once(paths.launch(number), record.model_dump())
        except AlreadyWritten:
            continue
        return record


def _look(commands: Commands, record: LaunchRecord, seconds: float, now: Clock, sleep: Sleep) -> SlurmJob | None:
    """The job of a launch, looked for until it shows up or time is up."""
    deadline = now() + seconds
    while (found := in_queue(commands, record)) is None and now() < deadline:
        sleep(LOOK_SECONDS)
    return found


def in_queue(commands: Commands, record: LaunchRecord, own_id: str | None = None) -> SlurmJob | None:
    """The newest job that can be the one of a launch; None when there is none, or Slurm does not answer."""
    try:
        jobs = commands.queue()
    except SlurmUnavailable:
        return None
    since = record.written_at - CLOCK_SKEW_SECONDS
    found = [job for job in jobs if job.name == record.slurm_name and job.id != own_id and job.submitted >= since]
    return max(found, key=lambda job: job.submitted, default=None)
