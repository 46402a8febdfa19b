"""Submits, stops and ends attempts on a Slurm cluster. What has become of them is judged elsewhere, from files and the queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evo_hpc.config.cluster import Cluster
from evo_hpc.dispatch.attempt import campaign_root, load
from evo_hpc.dispatch.intent import check_spec
from evo_hpc.dispatch.slurm.commands import Commands, SlurmBusy, SlurmRefused, SlurmUnavailable, environment_for_jobs
from evo_hpc.dispatch.slurm.script import Task, job_script
from evo_hpc.dispatch.slurm.submit import submit
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.spec import Ended, Ending, Intent, Start, Submission, job_name, load_spec
from evo_hpc.paths import JobPaths
from evo_hpc.store.atomic import write_json_once
from evo_hpc.store.lease import Lease


_ASK_AGAIN_SECONDS = 60.0
"""Between two requests to cancel one job."""


def slurm_base_name(job: JobPaths, intent: Intent) -> str:
    """The name that all Slurm jobs of an attempt begin with; of this very folder, also when the campaign was copied here."""
    root = campaign_root(job)
    if intent.root == root:
        return intent.name
    spec = load_spec(job)
    return job_name(root, spec.campaign, spec.owner, job.root.name)


@dataclass
class SlurmExecutor:
    """One controller's hand on the cluster."""

    cluster: Cluster
    commands: Commands
    forget: object = None
    """Called after each change in the queue, so that the next look at it is a fresh one."""
    _asked: set[tuple[Path, str, int | None, str]] = field(default_factory=set)
    _ended: dict[tuple[Path, str | None, int | None], float] = field(default_factory=dict)
    """When attempts were cancelled, by the monotonic clock."""

    def start(self, statuses: Sequence[JobStatus], lease: Lease) -> str:
        """Submit the next start of each, as one array where there are several; in words, what they are now.

        Every start is on disk before sbatch is called. Where its end is uncertain there is no submission record: the job is
        looked for by its name, and started again only when it has not shown up in time.
        """
        lease.check()
        starts = [self._next_start(status, lease) for status in statuses]
        name = starts[0].slurm_name
        assert name is not None
        if len(starts) > 1:
            starts = [start.model_copy(update={"slurm_name": name, "array_index": index}) for index, start in enumerate(starts)]
        first = statuses[0].job
        # The launcher goes by the profile of the spec: the script asks Slurm by the same one. Another profile is another attempt's.
        profile = Cluster.model_validate(load_spec(first).cluster)
        script = job_script(
            profile.slurm.of(first.kind), name=name, log=first.slurm_log, python=[profile.python or sys.executable],  # type: ignore[arg-type]
            tasks=[Task(start.array_index, status.job.root.absolute(), load(Intent, status.job.intent).name, start.number)
                   for status, start in zip(statuses, starts, strict=True)],
            generation=lease.generation,
        )
        for status, start in zip(statuses, starts, strict=True):
            write_json_once(status.job.start(start.number), start.model_dump())
        lease.check()
        try:
            job_id = submit(
                environment_for_jobs(profile.slurm), script, first.script(starts[0].number),
                seconds=profile.slurm.submit_seconds,
            )
            answer = {"job_id": job_id}
        except SlurmUnavailable as error:
            return f"submission of uncertain end ({error})"
        except SlurmBusy as error:
            answer = {"refused": str(error), "busy": True}
        except SlurmRefused as error:
            answer = {"refused": str(error)}
        finally:
            self._changed()
        for status, start in zip(statuses, starts, strict=True):
            record = Submission(number=start.number, written_at=time.time(), **answer)  # type: ignore[arg-type]
            write_json_once(status.job.submission(start.number), record.model_dump())
        return f"Slurm job {answer['job_id']}" if "job_id" in answer else f"refused by Slurm: {answer['refused']}"

    def _next_start(self, status: JobStatus, lease: Lease) -> Start:
        intent = load(Intent, status.job.intent)
        check_spec(status.job, intent)
        number = 1 + max((number for number, _ in status.job.starts()), default=-1)
        return Start(
            number=number, generation=lease.generation, written_at=time.time(), slurm_name=f"{slurm_base_name(status.job, intent)}-s{number}",
            after=status.endings[-1] if status.ended else None, why=status.said if number else "",
        )

    def stop(self, status: JobStatus) -> bool:
        """Ask an attempt to save and end; one that waits in the queue is cancelled. Whether it had not been asked before."""
        # Of each phase: a signal to what was requeued at that moment reaches nothing, and what waits is cancelled.
        if status.slurm_id is None or (key := (status.job.root, status.slurm_id, status.incarnation, status.phase)) in self._asked:
            return False
        if status.phase == "running":
            self.commands.cancel([status.slurm_id], signal="TERM", batch=True)
        else:
            self._will_end(status, None, "stopped before it ran")
            self.commands.cancel([status.slurm_id])
        self._asked.add(key)
        self._changed()
        return True

    def end(self, status: JobStatus, ending: Ending | None, why: str) -> bool:
        """Cancel an attempt that did not end by itself: nothing more is saved. `ending` is how that counts. Whether it was done
        just now: Slurm takes its time (KillWait, a dead node), and is not asked again meanwhile."""
        key = (status.job.root, status.slurm_id, status.incarnation)
        if status.slurm_id is None or time.monotonic() < self._ended.get(key, float("-inf")) + _ASK_AGAIN_SECONDS:
            return False
        self._will_end(status, ending, why)
        self.commands.cancel([status.slurm_id])
        self._ended[key] = time.monotonic()
        self._changed()
        return True

    def _will_end(self, status: JobStatus, ending: Ending | None, why: str) -> None:
        """Write it down first: Slurm says CANCELLED whoever did it."""
        number = status.job.starts()[-1][0]
        if not status.job.ended(number).exists():
            write_json_once(status.job.ended(number), Ended(number=number, ending=ending, why=why, written_at=time.time()).model_dump())

    def reap(self) -> None:
        """Slurm does that."""

    def _changed(self) -> None:
        if callable(self.forget):
            self.forget()
