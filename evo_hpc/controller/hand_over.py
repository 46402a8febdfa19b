"""How a controller whose own Slurm job is about to end goes on: that job again, or a successor, and never both."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evo_hpc.config.slurm import Slurm
from evo_hpc.controller.launch import LOOK_SECONDS, Clock, Sleep, in_queue, next_launch
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.environment import environment_for_jobs
from evo_hpc.dispatch.slurm.errors import SlurmBusy, SlurmRefused, SlurmUnavailable
from evo_hpc.dispatch.slurm.states import life
from evo_hpc.dispatch.slurm.submit import submit
from evo_hpc.errors import EvoError, Failure
from evo_hpc.paths import CampaignPaths

_GLANCE_SECONDS = 0.5


class NotHandedOver(Failure):
    """Neither a requeue nor a successor: the controller ends with its job."""


@dataclass(frozen=True)
class HandOver:
    """How the controller goes on."""

    how: Literal["requeued", "successor"]
    """`requeued`: Slurm will end this job and start it again: wait for that, an exit would be its end. `successor`: another job
    starts when this one ends: give the lease back, then end. (Slurm lets it start when this one is COMPLETING, its processes
    perhaps still there: that there is one controller is the lease's doing.)"""
    job_id: str


def hand_over(
    paths: CampaignPaths, slurm: Slurm, commands: Commands, *, name: str, own_id: str, seconds: float, now: Clock = time.time,
    sleep: Sleep = time.sleep,
) -> HandOver:
    """Let the controller go on after its own job's end: this job again, or where Slurm does not allow that a successor, which the
    same name makes wait. Called at the warning, with what is left of the warning time in `seconds`.

    Both can come of it, when a requeue was done that nobody confirmed: `cancel_successors` sees to that. Raises NotHandedOver.
    """
    deadline, told = now() + seconds, []
    while True:
        try:
            commands.requeue(own_id)
            return HandOver("requeued", own_id)
        except SlurmUnavailable as error:
            told.append(f"requeue: {error}")
            if now() + LOOK_SECONDS >= deadline - seconds / 2:  # the other half is for a successor
                break
            sleep(LOOK_SECONDS)
        except SlurmRefused as error:
            told.append(f"requeue: {error}")
            break
    return submit_successor(paths, slurm, commands, name=name, own_id=own_id, seconds=deadline - now(), told=told, now=now, sleep=sleep)


def submit_successor(
    paths: CampaignPaths, slurm: Slurm, commands: Commands, *, name: str, own_id: str, seconds: float, told: Sequence[str] = (), now: Clock = time.time,
    sleep: Sleep = time.sleep,
) -> HandOver:
    """Submit the controller once more; that job waits, by its name, for this one's end. `told`: what was tried before.

    Raises NotHandedOver.
    """
    deadline, told = now() + seconds, list(told)
    record = next_launch(paths, name, now)
    while True:
        try:
            text = paths.controller_script.read_text(encoding="utf-8")
            return HandOver("successor", submit(environment_for_jobs(slurm), text, paths.controller_script, seconds=slurm.command_seconds))
        except SlurmUnavailable as error:
            told.append(f"successor: {error}")
            if (found := in_queue(commands, record, own_id)) is not None:
                return HandOver("successor", found.job_id)
        except SlurmBusy as error:
            told.append(f"successor: {error}")
        except (SlurmRefused, OSError) as error:
            told.append(f"successor: {error}")
            break
        if now() + LOOK_SECONDS >= deadline:
            break
        sleep(LOOK_SECONDS)
    words = "; ".join(dict.fromkeys(told))
    raise NotHandedOver(f"{paths.root}: the controller ends with its job {own_id} ({words}). The jobs go on; run "
                        f"`evo-hpc launch {shlex.quote(str(paths.root))}` to have a controller again.")


def cancel_successors(commands: Commands, *, name: str, own_id: str) -> list[str]:
    """Cancel the jobs of the controller's name that wait for this one, its own left out; their ids. What a started controller does:
    it was requeued although a successor had been submitted, or launched twice."""
    waiting = [job.id for job in commands.queue() if job.name == name and job.id != own_id and life(job.state) == "queued"]
    if waiting:
        commands.cancel(waiting)
    return waiting


@dataclass
class Standby:
    """Sees to a successor while the controller is still busy with an action that may last longer than the time it was warned of.

    A thread of its own, that touches nothing but the queue: `sbatch` that does not answer, or a big policy that is being published,
    keep the loop from handing over itself.
    """

    warned: Callable[[], bool]
    """Whether the warning has come."""
    submit: Callable[[], HandOver]
    """Raises EvoError."""
    patience: float
    """Seconds after the warning that the loop has to let go of the campaign."""
    done: HandOver | None = None
    """The successor, once there is one."""
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on."""
        self._thread = threading.Thread(target=self._run, name="standby", daemon=True)
        self._thread.start()

    def end(self) -> HandOver | None:
        """The loop has let go: what was done until now, if anything; nothing will be done from now on."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        return self.done

    def _run(self) -> None:
        while not self.warned():
            if self._over.wait(_GLANCE_SECONDS):
                return
        if not self._over.wait(self.patience) and self.warned():  # not stopped meanwhile
            try:
                self.done = self.submit()
            except (EvoError, OSError):
                pass  # the loop tries again, and says what is wrong, when it gets that far
