"""What an attempt costs: by Slurm's accounting where it knows, else by the attempt's own files; and keeping what accounting said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.slurm import Resources
from evo_hpc.dispatch.attempt import Attempt, read_attempt
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.jobs.cost import AccountedRun, Cost, CostRecord, total
from evo_hpc.jobs.spec import Identity, JobSpec, Start, load_spec
from evo_hpc.paths import JobPaths
from evo_hpc.store.atomic import AlreadyWritten, write_json_once
from evo_hpc.store.lease import Lease

SETTLE_SECONDS = 300.0
"""How long after an attempt's record accounting may take to say the last of it; sacct lags by seconds, by more after an outage."""
_SKEW_SECONDS = 60.0
"""How far the clocks of the controller and of slurmctld may differ."""
_CLAIM_SKEW_SECONDS = 5.0
"""The same between a node, which dates the claim, and slurmctld, which dates the start."""
_GPU = "gres/gpu"


@dataclass(frozen=True)
class Asked:
    """What an attempt's cluster profile asks for, at each start."""

    gpus: float
    nodes: float


def gpus_of(resources: Resources) -> int:
    """GPUs on each node, as the profile asks for them; those asked for in `sbatch_arguments` are not seen. Pure."""
    words = [] if resources.gpus_per_node is None else [f"gpu:{each}" for each in resources.gpus_per_node.split(",")]
    words += [] if resources.gres is None else resources.gres.split(",")
    found = 0
    for word in words:
        name, *rest = re.split(r"[:=]", word.removeprefix("gres/").removeprefix("gres:"))
        if name == "gpu":
            found += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return found


def asked_of(spec: JobSpec, executor: str) -> Asked:
    """What a job asked for. GPUs of this machine are nobody's allocation: the local executor's jobs have none."""
    if executor == "local":
        return Asked(0.0, 1.0)
    resources = Cluster.model_validate(spec.cluster).slurm.of(spec.kind)
    nodes = resources.nodes or 1
    return Asked(float(nodes * gpus_of(resources)), float(nodes))


def runs_of(start: Start, accounted: Iterable[SlurmJob]) -> list[SlurmJob]:
    """Accounting's runs of a start's job, one for each requeue, earliest first. Pure. A job of that name from before the start is another's."""
    found = {
        (job.job_id, job.started): job for job in accounted
        if (job.name, job.array_index) == (start.slurm_name, start.array_index) and job.source == "sacct" and job.started is not None
        and job.submitted >= start.written_at - _SKEW_SECONDS
    }
    return sorted(found.values(), key=lambda job: job.started or 0.0)


def cost_of(attempt: Attempt, asked: Asked, accounted: Iterable[SlurmJob] = ()) -> Cost:
    """What an attempt has cost by now. Pure.

    accounted: jobs as sacct shows them, others' among them. A run that has ended there counts as accounting has it; what
    accounting does not know, or not to the end, is estimated from the incarnation's claim, heartbeats and result.
    """
    accounted = [job for job in accounted if job.source == "sacct"]
    parts: list[Cost] = []
    for start in attempt.starts:
        runs = runs_of(start, accounted)
        matched = _matched(_incarnations(attempt, start), runs)
        parts += [_by_accounting(run, asked) for run in runs if run.ended is not None]
        parts += [_hours(_seconds(attempt, number), asked) for number, run in matched.items() if run is None or run.ended is None]
        # Allocated already, but nothing of ours has claimed it yet.
        claimed = {id(run) for run in matched.values()}
        parts += [_hours(run.elapsed, asked) for run in runs if run.ended is None and id(run) not in claimed]
    return total(parts).model_copy(update={"starts": len(attempt.starts)})


def settled(attempt: Attempt, accounted: Iterable[SlurmJob]) -> bool:
    """Whether accounting has the end of every incarnation's run, or is none to ask. Pure."""
    if attempt.intent is None or attempt.intent.executor == "local":
        return True
    accounted = list(accounted)
    for start in attempt.starts:
        runs = runs_of(start, accounted)
        matched = _matched(_incarnations(attempt, start), runs)
        if None in matched.values() or any(run.ended is None for run in runs):
            return False
    return True


def _incarnations(attempt: Attempt, start: Start) -> list[tuple[int, Identity]]:
    return sorted(((n, who) for n, who in attempt.claims if who.start == start.number), key=lambda each: each[1].claimed_at)


def _matched(incarnations: Sequence[tuple[int, Identity]], runs: Sequence[SlurmJob]) -> dict[int, SlurmJob | None]:
    """The run that each incarnation claimed in; each run takes one, for the launcher claims once."""
    free, found = list(runs), {}
    for number, who in incarnations:
        run = min((r for r in free if _within(who.claimed_at, r)), key=lambda r: abs(who.claimed_at - (r.started or 0.0)), default=None)
        found[number] = run
        if run is not None:
            free.remove(run)
    return found


def _within(claimed_at: float, run: SlurmJob) -> bool:
    assert run.started is not None
    return run.started - _CLAIM_SKEW_SECONDS <= claimed_at and (run.ended is None or claimed_at <= run.ended + _CLAIM_SKEW_SECONDS)


def _seconds(attempt: Attempt, number: int) -> float:
    """Wall time of an incarnation: by its result, or from claim to last heartbeat."""
    if number in attempt.results:
        return attempt.results[number].seconds
    claimed_at = dict(attempt.claims)[number].claimed_at
    return max(0.0, attempt.beats.get(number, claimed_at) - claimed_at)


def _hours(seconds: float, asked: Asked) -> Cost:
    hours = seconds / 3600
    return Cost(gpu_hours=hours * asked.gpus, node_hours=hours * asked.nodes, wall_hours=hours, source="estimated")


def _by_accounting(run: SlurmJob, asked: Asked) -> Cost:
    """Elapsed x allocated. A cluster accounts for GPUs only where AccountingStorageTRES names them: where not, they are those asked for."""
    hours, gpus = run.elapsed / 3600, allocated_gpus(run)
    guessed = gpus is None and asked.gpus > 0
    return Cost(
        gpu_hours=hours * (asked.gpus if gpus is None else gpus), node_hours=hours * run.tres.get("node", asked.nodes), wall_hours=hours,
        source="mixed" if guessed else "accounted",
    )


def allocated_gpus(run: SlurmJob) -> float | None:
    """GPUs that accounting says a run had; null where it does not speak of GPUs. Typed ones are listed beside their sum."""
    if _GPU in run.tres:
        return run.tres[_GPU]
    typed = [count for name, count in run.tres.items() if name.startswith(f"{_GPU}:")]
    return sum(typed) if typed else None


def waiting(jobs: Iterable[JobPaths]) -> list[JobPaths]:
    """Attempts with a record whose cost is not written yet."""
    return [job for job in jobs if job.record.exists() and not job.cost.exists()]


def asked_since(jobs: Iterable[JobPaths]) -> float | None:
    """The time from which accounting is to be asked about these attempts; null where none of them went to Slurm."""
    times = [start.written_at for job in jobs for start in read_attempt(job).starts if start.slurm_name is not None]
    return min(times) - _SKEW_SECONDS if times else None


def write_cost(job: JobPaths, lease: Lease, accounted: Iterable[SlurmJob] | None, now: float) -> bool:
    """Keep what a recorded attempt cost; whether that is done. Called again until it is, by whichever controller; then it changes nothing.

    accounted: jobs as sacct shows them; null where there is no accounting. A job's result is committed seconds before Slurm sees
    the job's end: until SETTLE_SECONDS after the record accounting is waited for. Nothing depends on this file: without it
    the cost is estimated anew.
    """
    if job.cost.exists():
        return True
    attempt, jobs = read_attempt(job), list(accounted or ())
    if accounted is not None and not settled(attempt, jobs) and now < job.record.stat().st_mtime + SETTLE_SECONDS:
        return False
    asked = asked_by(attempt)
    runs = [run for start in attempt.starts for run in runs_of(start, jobs)]
    record = CostRecord(
        cost=cost_of(attempt, asked, jobs), generation=lease.generation, written_at=now,
        runs=[
            AccountedRun(job_id=run.job_id, array_index=run.array_index, state=run.state, started=run.started or 0.0, elapsed=run.elapsed,
                         gpus=allocated_gpus(run) or 0.0, nodes=run.tres.get("node", 0.0))
            for run in runs if run.ended is not None
        ],
    )
    lease.check()
    try:
        write_json_once(job.cost, record.model_dump())
    except AlreadyWritten:
        pass  # an earlier try of this very write got that far
    return True


def asked_by(attempt: Attempt) -> Asked:
    """What an attempt asked for, by its spec. Raises ConfigError when that is damaged."""
    if attempt.intent is None or not attempt.starts:
        return Asked(0.0, 1.0)
    return asked_of(load_spec(attempt.job), attempt.intent.executor)
