"""What an attempt's files and Slurm's answers mean together: a pure function, and the one place that decides it.

A result that the job wrote outranks all that Slurm says. Slurm's word that a job has ended counts only from a queue that
answered: a failing squeue says nothing about the jobs in it. What is not known yet is `unknown`, and nothing is done about it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.attempt import Attempt
from evo_hpc.dispatch.retries import backoff
from evo_hpc.dispatch.slurm.records import Found, SlurmJob
from evo_hpc.dispatch.slurm.states import ending, held, life
from evo_hpc.dispatch.status import FRESH_BEAT_SECONDS, JobStatus
from evo_hpc.jobs.spec import Ending, Identity, Result, Start

RERUN: tuple[str, ...] = ("PREEMPTED", "NODE_FAIL", "REQUEUED", "REQUEUE_FED")
"""States after which Slurm may put the very job back into the queue a moment later."""
RERUN_SECONDS = 15.0
NODES_FAULT: tuple[str, ...] = ("NODE_FAIL", "BOOT_FAIL")
"""States that end a job for its nodes' sake, whatever it says itself."""
NODES_SECONDS = 600.0
"""How long a failed job is waited for that does not come to its end, or was requeued and is held: longer than Slurm takes to notice a node."""
SAVED_NOT_REQUEUED = 75
"""Exit code of a launcher that has written that it was stopped."""
SLOW: tuple[Ending, ...] = ("infrastructure", "node_fail", "oom", "code_error")
"""Endings after which a new start waits."""


@dataclass(frozen=True)
class Dead:
    """The end of a start that left no final result."""

    ending: Ending | None
    """Null for one that was stopped and has saved, or that Slurm was too busy to take."""
    why: str
    at: float
    """Unix time."""
    busy: bool = False
    refused: bool = False


def judge(attempt: Attempt, found: Found | None, slurm: Slurm, now: float) -> JobStatus:
    """How far an attempt is. `found` is what is known of the jobs of its last start; null where that was never asked."""
    job, starts = attempt.job, attempt.starts
    status = JobStatus(job, "planned", intent=attempt.intent, starts=len(starts), stale=attempt.stale)
    if not starts:
        return status
    last = starts[-1]
    endings = tuple(start.after for start in starts if start.after is not None)
    newest = attempt.claims[-1] if attempt.claims else None
    if newest is not None and (result := attempt.results.get(newest[0])) is not None:
        status = replace(status, result=result)
        if result.outcome != "stopped" and not _may_be_the_nodes(result, newest[1], last, found, now):
            return replace(status, phase="finished", incarnation=newest[0], endings=endings)
    own = attempt.of_start(last.number)
    status = replace(status, incarnation=own[0] if own else None, endings=endings)
    verdict = _verdict(attempt, last, found, slurm, now)
    if isinstance(verdict, Dead):
        endings = endings if verdict.ending is None else (*endings, verdict.ending)
        return replace(
            status, phase="dead", endings=endings, said=verdict.why, said_at=verdict.at,
            not_before=_not_before(verdict, endings, starts, slurm), slurm_id=_known_id(attempt, last, found), refused=verdict.refused, ended=verdict.ending is not None,
        )
    return replace(
        status, phase=verdict[0], said=verdict[1], said_at=found.asked_at if found else None, slurm_id=_known_id(attempt, last, found),
        silent=_silent(attempt, last, found, now) if verdict[0] == "running" else 0.0,
    )


def _may_be_the_nodes(result: Result, identity: Identity, last: Start, found: Found | None, now: float) -> bool:
    """Whether a failure that a job reported may be that of a node of it, which Slurm notices later than the ranks that lost it: while
    its job is not over, for a time, and when that ended, or was requeued, by a node. It was where the attempt has been started again."""
    if result.outcome != "failed" or result.blame != "infrastructure":
        return False
    if identity.start < last.number:
        return True
    if found is None or not found.jobs:
        return found is not None and found.error is not None and now < result.finished_at + NODES_SECONDS
    if life(found.jobs[-1].state) != "terminal":
        return now < result.finished_at + NODES_SECONDS
    return found.jobs[-1].state in NODES_FAULT


def _verdict(attempt: Attempt, last: Start, found: Found | None, slurm: Slurm, now: float) -> tuple[Literal["queued", "running", "unknown"], str] | Dead:
    submission = attempt.submissions.get(last.number)
    if submission is not None and submission.refused is not None:
        return Dead(None, submission.refused, submission.written_at, busy=submission.busy, refused=not submission.busy)
    own = attempt.of_start(last.number)
    beat = attempt.beats.get(own[0]) if own else None
    if found is None or found.asked_at is None or (found.error is not None and found.asked_at < last.written_at):
        words = found.error if found is not None and found.error else "not asked yet"
        return ("running" if _fresh(beat, now) else "unknown"), f"Slurm does not answer ({words})"
    if (live := next((j for j in reversed(found.jobs) if life(j.state) != "terminal"), None)) is not None:
        return _live(live)
    ours = attempt.ended.get(last.number)
    if ours is not None and (found.jobs[-1].state == "CANCELLED" if found.jobs else not _fresh(beat, now)):
        return Dead(ours.ending, ours.why, ours.written_at)
    stopped = own is not None and own[0] in attempt.results and attempt.results[own[0]].outcome == "stopped"
    if found.jobs:
        by_hand = ours is None and found.jobs[-1].state == "CANCELLED"  # scancel's SIGTERM lets it save, too, and yet it is not to go on
        return _ended(found, found.jobs[-1], stopped and not by_hand, slurm, now)
    if _fresh(beat, now):
        return "running", "Slurm does not know it, but it shows life"
    if found.asked_at < last.written_at + slurm.settle_seconds + (slurm.submit_seconds if submission is None else 0.0):
        return "unknown", "not in the queue (yet)"
    if stopped:
        return Dead(None, "stopped and saved", last.written_at)
    if submission is None and own is None:
        return Dead("infrastructure", "was not taken by Slurm: the submission had no certain end, and no such job showed up", last.written_at)
    return Dead("infrastructure", "Slurm does not know it any more, and it left no result", beat or last.written_at)


def _live(job: SlurmJob) -> tuple[Literal["queued", "running"], str]:
    waits = life(job.state) == "queued"
    words = job.state.lower().replace("_", " ") + (f" ({job.reason})" if waits and job.reason not in ("", "None") else "")
    if waits and (hint := held(job)) is not None:
        words = f"{words}: {hint}"
    return ("queued" if waits else "running"), words


def _ended(found: Found, job: SlurmJob, stopped: bool, slurm: Slurm, now: float) -> tuple[Literal["unknown"], str] | Dead:
    words = job.state.lower().replace("_", " ")
    assert found.asked_at is not None
    if found.error is not None and job.source == "sacct":
        return "unknown", f"accounting says {words}, but squeue does not answer: it may be in the queue again"
    at = job.ended if job.ended is not None else found.asked_at
    if job.state in RERUN and found.asked_at < at + RERUN_SECONDS:
        return "unknown", f"{words}; Slurm may run it again"
    if stopped:
        return Dead(None, f"{words}, stopped and saved", at)
    if (job.state == "COMPLETED" or job.exit_code == SAVED_NOT_REQUEUED) and now < at + slurm.settle_seconds:
        return "unknown", f"{words}; its result has not shown up yet"  # a network filesystem can hide a new file for a while
    how = ending(job)
    code = f", killed by signal {job.signal}" if job.signal else f", exit code {job.exit_code}" if job.exit_code else ""
    return Dead(how, f"{words}{code} (Slurm job {job.id}{', ' + job.nodes if job.nodes else ''})", at)


def _silent(attempt: Attempt, last: Start, found: Found | None, now: float) -> float:
    """Seconds since a running job's last heartbeat, or since it started where it has shown none."""
    own = attempt.of_start(last.number)
    running = next((job for job in reversed(found.jobs) if life(job.state) != "terminal"), None) if found else None
    if running is not None and running.state != "RUNNING":
        return 0.0  # suspended, or ending: it cannot show any
    seen = [time for time in (attempt.beats.get(own[0]) if own else None, running.started if running else None) if time is not None]
    return max(0.0, now - max(seen)) if seen else 0.0


def _fresh(beat: float | None, now: float) -> bool:
    return beat is not None and now - beat < FRESH_BEAT_SECONDS


def _known_id(attempt: Attempt, last: Start, found: Found | None) -> str | None:
    if found is not None and found.jobs:
        live = [job for job in found.jobs if life(job.state) != "terminal"]
        return (live or list(found.jobs))[-1].id
    submission = attempt.submissions.get(last.number)
    if submission is None or submission.job_id is None:
        return None
    return submission.job_id if last.array_index is None else f"{submission.job_id}_{last.array_index}"


def _not_before(dead: Dead, endings: tuple[Ending, ...], starts: tuple[Start, ...], slurm: Slurm) -> float:
    """When it may be started again: at once after a preemption or a time limit; later and later after the machine's failures."""
    if dead.busy:
        times = _tail(starts)
    elif dead.ending in SLOW:
        times = next((n for n, each in enumerate(reversed(endings)) if each not in SLOW), len(endings))
    else:
        return 0.0
    return dead.at + backoff(slurm, times)


def _tail(starts: tuple[Start, ...]) -> int:
    """Starts in a row that followed no ending: those that Slurm was too busy to take, the last included."""
    return 1 + next((n for n, start in enumerate(reversed(starts)) if start.after is not None), len(starts) - 1)
