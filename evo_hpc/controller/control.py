"""What control.yaml means for a plan, and how a version that a person cancels ends. Pure, but for reading and writing the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evo_hpc.config.control import Control, changed, read_control
from evo_hpc.config.yaml_io import ConfigError
from evo_hpc.controller.actions import Action, Cancel, GiveUp, Plan, Propose, Start, Stop, Submit
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.lineage.decision import Decision
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import write_bytes

if TYPE_CHECKING:
    from evo_hpc.controller.state import CampaignState, VersionState

NEW = (Submit, Start, Propose)
"""What begins something new: a job, once more or for the first time, or a round of proposals."""
_UNSAID = "no reason is given in control.yaml"


@dataclass(frozen=True)
class Steered:
    """What a controller does of a plan under a person's wish."""

    actions: tuple[Action, ...]
    stops: tuple[JobStatus, ...]
    """Jobs to be told to save and end; asked again every time, whatever was asked before."""
    ends: bool
    """Whether the controller ends once the actions are carried out."""
    waits: bool
    """Whether it stays even where its work is blocked, for the person who paused it to mend that."""


def apply(control: Control, plan: Plan) -> Steered:
    """A plan as far as it is wished. Pure.

    run: all of it.
    pause: nothing new is submitted. Jobs that run or wait in the queue go on (Slurm requeues one that it preempts by itself),
        what they make is committed, analysed and decided, and the controller stays, also where it would end because it is blocked.
    drain: nothing new is submitted. Jobs end in their own time and are committed; when none is left and nothing can be done
        without a new one the controller ends, with exit code 0: Slurm then takes its job as COMPLETED and does not requeue it.
    stop: nothing more is done. The campaign's own jobs are told to save and end, those that wait in the queue are taken out of
        it; when none is left the controller ends, with exit code 0. What they have finished is committed by the next run.

    A controller that starts while the file says drain or stop does the same, and so ends soon. `plan.running` are all jobs
    that run or wait.
    """
    allowed = tuple(action for action in plan.actions if not isinstance(action, NEW))
    match control.state:
        case "run":
            return Steered(plan.actions, (), plan.done, False)
        case "pause":
            return Steered(allowed, (), plan.done, True)
        case "drain":
            return Steered(allowed, (), not plan.running and not allowed, False)
        case "stop":
            return Steered((), plan.running, not plan.running, False)


def wish_of(state: CampaignState) -> tuple[Control, str | None]:
    """The wish on file, and what is wrong with it, for people.

    One that cannot be read (half saved, a typing error, a version that is not there) is a pause: something other than
    `run` was wished, nobody knows what, and running jobs are not to be lost over it. Nothing is cancelled by it.
    """
    if not state.paths.control_yaml.exists():
        return Control(), None
    try:
        return read_control(state.paths, {version.id: version.node.version.parents for version in state.versions.values()}), None
    except ConfigError as error:
        return Control(state="pause"), f"{error}\nUntil that is mended nothing new is submitted; running jobs go on."


def write_control(paths: CampaignPaths, versions: Mapping[str, Sequence[str]] | None = None, **changes: Any) -> Control:
    """Change fields of control.yaml in one step, its comments kept; where there is none it is made, unless nothing is wished.

    versions: parents by version id, to check `cancel` by. Raises ConfigError, the file untouched, when it cannot be read or a
    change does not fit, StoreError when the filesystem refuses.
    """
    control, text = changed(paths, versions, **changes)
    if paths.control_yaml.exists() or control != Control():
        write_bytes(paths.control_yaml, text)
    return control


def is_cancelled(version: VersionState, control: Control) -> bool:
    """Whether a version is to end, or has ended, because a person says so: nothing more is submitted, looked at or decided for it.

    So it is from the wish on, and for good once the decision is written (`outcome: cancelled`). A decision.yaml that a person
    writes by hand does the same. Undone by removing both the decision and the wish. A run that its watch has stopped is not
    cancelled: it ends by itself, as the rule declared beforehand says. One that is decided already stays as it is.
    """
    if version.cancelled:
        return True
    return version.stopped_early is None and version.decision is None and version.id in control.cancel


def cancellation(version: VersionState, control: Control) -> list[Action]:
    """What ends a version for which is_cancelled holds, all of it at once; empty when it has ended. Pure.

    Its decision first, which makes the wish durable; then its jobs are stopped, and those that have ended are given up:
    what they made is not published, it stays in their folders.
    """
    found: list[Action] = []
    if version.decision is None:
        found.append(Cancel(version.id, decision_of(version, control)))
    for status in _unrecorded(version):
        if status.phase == "unknown" or status.intent is None:
            continue  # nobody can tell at present; without an intent it was never submitted
        if status.live:
            found.append(Stop(version.id, status))
        else:
            found.append(GiveUp(status, "user", f"cancelled: {control.reason or _UNSAID}"))
    return found


def decision_of(version: VersionState, control: Control) -> Decision:
    """What becomes of a version that a person cancels: pruned, by no look at dev. Pure."""
    scored = version.evaluations.get("dev") is not None
    told = "after it was scored, before the gate looked" if scored else "after its training" if version.trained else "before its training was over"
    analysis = version.analysis
    return Decision(
        version=version.id, decision="prune", by="person", outcome="cancelled", because=f"Cancelled by hand {told}: {control.reason or _UNSAID}.",
        harness=analysis.harness if analysis else None,
    )


def _unrecorded(version: VersionState) -> Iterable[JobStatus]:
    return [status for attempts in version.jobs.values() for status in attempts if status.phase != "recorded"]
