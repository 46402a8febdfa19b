"""What Slurm costs a campaign: goodput, what a preemption loses and takes, and submissions a second against bare sbatch.

Usage: slurm_figures.py campaign CAMPAIGN [--json]; slurm_figures.py submissions [--count N] [--json], on a cluster (SLURM_CONF).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.slurm import Resources, Slurm
from evo_hpc.config.yaml_io import load_tree
from evo_hpc.controller.act import spec_of
from evo_hpc.controller.actions import Submit
from evo_hpc.controller.books import accounted_now
from evo_hpc.controller.skeleton import copy_campaign
from evo_hpc.controller.state import read_state
from evo_hpc.dispatch.attempt import Attempt, load, read_attempt
from evo_hpc.dispatch.intent import declare
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.environment import environment_for_jobs
from evo_hpc.dispatch.slurm.executor import SlurmExecutor
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.cost import AccountedRun, CostRecord
from evo_hpc.jobs.spec import Submission
from evo_hpc.paths import CampaignPaths, IncarnationPaths, VersionPaths
from evo_hpc.report.cost_view import cost_record
from evo_hpc.store.lease import acquire
from evo_hpc.store.schemas import STEP
from evo_hpc.store.tables import read_tables

CLOCK_SECONDS = 5.0
"""Between the clock of a node, which dates a claim, and that of slurmctld; Slurm's own times are whole seconds."""
CAUSES = ("saving", "ending", "queue", "python", "loading", "engine")
"""What passes between the warning and the first possible sample, in this order."""


@dataclass(frozen=True)
class Interruption:
    """One end of a training job and its next start: what was lost, and what the time went into (seconds)."""

    version: str
    incarnation: int
    """The one that ended."""
    outcome: str
    """What it said last: `stopped`, or `killed` where it said nothing."""
    restart: int
    """How often Slurm had requeued the next one's job."""
    reached: int
    """Last step that it had done."""
    resumed: int
    """Step that the next one went on from."""
    lost_seconds: float
    """Work thrown away: from the end of the last step that counts to the warning."""
    saving: float
    """Warning to its result: the step at hand is dropped or done, the checkpoint is written, the engine ends."""
    ending: float | None
    """From then until Slurm has ended the job. This and the next two are null where there is no accounting."""
    queue: float | None
    """Until Slurm starts it again."""
    python: float | None
    """Start of the batch script to the roles' own first lines: two interpreters one after the other."""
    loading: float
    """Imports of torch and Megatron, the policy and the checkpoint; the engine starts meanwhile."""
    engine: float
    """What the engine takes beyond that."""
    total: float
    """Warning to the engine being ready: from there on it trains."""

    @property
    def lost_steps(self) -> int:
        return self.reached - self.resumed


def interruptions(paths: CampaignPaths) -> list[Interruption]:
    """Of all published training runs of a campaign, from their files. Raises StoreError when one is damaged."""
    found = []
    for version in paths.versions():
        for job in version.jobs() if version.train_complete.exists() else []:
            if job.kind == "train":
                attempt = read_attempt(job)
                numbers = [number for number, _ in attempt.claims]
                found += [_interruption(version, attempt, a, b) for a, b in zip(numbers, numbers[1:], strict=False)
                          if _ready_at(job.incarnation(b)) is not None]
    return found


def _interruption(version: VersionPaths, attempt: Attempt, before: int, after: int) -> Interruption:
    job, claims = attempt.job, dict(attempt.claims)
    first, second = job.incarnation(before), job.incarnation(after)
    result = attempt.results.get(before)
    last_seen = result.finished_at if result else attempt.beats.get(before, claims[before].claimed_at)
    warned = first.stop.stat().st_mtime if first.stop.exists() else last_seen
    run, next_run = (_run_of(attempt, number) for number in (before, after))
    steps = {row["step"]: row for row in _steps(version)}
    resumed = min((step for step, row in steps.items() if row["incarnation"] >= after), default=1) - 1
    kept_until = steps[resumed]["time"].timestamp() if resumed in steps else claims[before].claimed_at
    ready, loaded = _ready_at(second), second.effective("trainer").stat().st_mtime
    assert ready is not None
    began = ready - _start_seconds(second)
    return Interruption(
        version=version.id, incarnation=before, outcome=result.outcome if result else "killed", restart=claims[after].restart,
        reached=max(resumed, attempt.steps.get(before, 0)), resumed=resumed, lost_seconds=max(0.0, warned - kept_until),
        saving=last_seen - warned,
        ending=max(0.0, run.started + run.elapsed - last_seen) if run else None,
        queue=next_run.started - max(last_seen, run.started + run.elapsed) if run and next_run else None,
        python=began - next_run.started if next_run else None,
        loading=loaded - began, engine=max(0.0, ready - loaded), total=max(ready, loaded) - warned,
    )


def _steps(version: VersionPaths) -> list[dict[str, Any]]:
    return read_tables(sorted(version.steps.glob("*.parquet")), STEP, ["step", "time", "incarnation", "seconds_step"]).to_pylist()


def _ready_at(incarnation: IncarnationPaths) -> float | None:
    """When its engine could sample: that is when it describes itself."""
    path = incarnation.effective("rollout")
    return path.stat().st_mtime if path.exists() else None


def _start_seconds(incarnation: IncarnationPaths) -> float:
    """Seconds that the role with the engine took until then."""
    return float(load_tree(incarnation.effective("rollout"))["start_seconds"])


def _run_of(attempt: Attempt, number: int) -> AccountedRun | None:
    """Slurm's record of the run that an incarnation claimed in, from what the campaign keeps of accounting."""
    if not attempt.job.cost.exists():
        return None
    at = dict(attempt.claims)[number].claimed_at
    runs = [run for run in load(CostRecord, attempt.job.cost).runs if run.started - CLOCK_SECONDS <= at <= run.started + run.elapsed + CLOCK_SECONDS]
    return min(runs, key=lambda run: abs(run.started - at), default=None)


def campaign_figures(paths: CampaignPaths) -> dict[str, Any]:
    """Goodput by kind of work and in all, wall time, and the interruptions."""
    cost = cost_record(paths, accounted_now(read_state(paths)))
    events = [json.loads(line)["time"] for line in paths.events.read_text(encoding="utf-8").splitlines()]
    rows = [*cost["kinds"], {"kind": "all", **cost["total"]}]
    return {
        "campaign": str(paths.root), "seconds": events[-1] - events[0],
        "work": [{name: row[name] for name in ("kind", "useful_seconds", "allocated_seconds", "goodput", "starts", "source")} for row in rows],
        "interruptions": [{**asdict(each), "lost_steps": each.lost_steps} for each in interruptions(paths)],
    }


def figures_text(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{figures['campaign']}: {figures['seconds']:.0f} s from the first event to the last"]
    for row in figures["work"]:
        share = "-" if row["goodput"] is None else f"{100 * row['goodput']:.0f} %"
        lines.append(f"  goodput of {row['kind']:<9} {share:>5}  ({row['useful_seconds'] or 0:.0f} of {row['allocated_seconds']:.0f} allocated "
                     f"seconds, {row['starts']} starts, {row['source']})")
    return "\n".join([*lines, *(interruption_text(each) for each in figures["interruptions"])])


def interruption_text(each: dict[str, Any]) -> str:
    """One interruption in two lines."""
    names = {
        "saving": "saving and ending itself", "ending": "being ended by Slurm", "queue": "waiting in the queue", "python": "start of Python",
        "loading": "loading", "engine": "engine start",
    }
    split = ", ".join(f"{names[cause]} {each[cause]:.1f}" for cause in CAUSES if each[cause] is not None)
    how = f"requeued by Slurm, restart {each['restart']}" if each["restart"] else "submitted anew"
    return (f"  {each['version']} was {each['outcome']} after step {each['reached']} and went on from step {each['resumed']} ({how}): "
            f"{each['lost_steps']} steps and {each['lost_seconds']:.1f} s of work lost\n"
            f"  {each['total']:.1f} s from the warning to training again: {split}")


def submission_figures(count: int, array: int = 10) -> dict[str, Any]:
    """Submissions a second through the controller's path (spec, intent, start, script, sbatch, answer: all on disk) and by sbatch alone,
    taking turns on one cluster; and as arrays of `array`. The jobs are held, and cancelled at the end."""
    slurm = Slurm(defaults=Resources(minutes=1, memory="10M", sbatch_arguments=["--hold"]))
    commands = Commands.of(slurm)
    ids: list[str] = []
    spent = {"ours": 0.0, "bare": 0.0, "arrays": 0.0}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = call()
        spent[name] += time.perf_counter() - began
        return found

    with tempfile.TemporaryDirectory() as folder:
        paths = CampaignPaths(copy_campaign("demo", Path(folder)))
        cluster = Cluster(executor="slurm", slurm=slurm)
        paths.cluster_yaml.write_text(json.dumps(cluster.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
        state, lease = read_state(paths), acquire(paths)
        executor, base = SlurmExecutor(cluster, commands), paths.base

        def declared(attempt: int) -> JobStatus:
            job = base.job("supervise", attempt)
            declare(job, spec_of(Submit("base", "supervise", attempt, {}, "figures"), state, job), "figures", lease, "slurm")
            return JobStatus(job, "planned")

        def ours(attempts: range) -> None:
            executor.start([declared(attempt) for attempt in attempts], lease)

        def bare(script: Path) -> str:
            done = subprocess.run(["sbatch", "--parsable", script], env=environment_for_jobs(slurm), capture_output=True, text=True, check=True)
            return done.stdout.strip()

        try:
            for attempt in range(count + 1):
                name = "ours" if attempt else "warm-up"
                spent.setdefault(name, 0.0)
                timed(name, lambda attempt=attempt: ours(range(attempt, attempt + 1)))
                answer = load(Submission, base.job("supervise", attempt).submission(0))
                ids.append(str(answer.job_id))
                script = base.job("supervise", attempt).script(0)
                ids.append(timed("bare" if attempt else "warm-up", lambda script=script: bare(script)))
            first = count + 1
            for begin in range(first, first + count, array):
                timed("arrays", lambda begin=begin: ours(range(begin, begin + array)))
                ids.append(str(load(Submission, base.job("supervise", begin).submission(0)).job_id))
        finally:
            commands.cancel(ids)
    made = {"ours": count, "bare": count, "arrays": -(-count // array) * array}
    rate = {name: made[name] / spent[name] for name in made}
    return {"count": count, "a_second": rate, "ratio": rate["ours"] / rate["bare"], "array": array, "array_ratio": rate["arrays"] / rate["bare"]}


def submissions_text(figures: dict[str, Any]) -> str:
    """The same for people."""
    rate = figures["a_second"]
    return (f"{figures['count']} submissions each, taking turns: {rate['ours']:.1f} a second through the controller's path, {rate['bare']:.1f} "
            f"by bare sbatch (ratio {figures['ratio']:.2f}); as arrays of {figures['array']}: {rate['arrays']:.0f} jobs a second "
            f"(ratio {figures['array_ratio']:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parts = parser.add_subparsers(dest="part", required=True)
    campaign = parts.add_parser("campaign", help="figures of a campaign that has run")
    campaign.add_argument("campaign", type=Path)
    submissions = parts.add_parser("submissions", help="submissions a second, on the cluster of SLURM_CONF")
    submissions.add_argument("--count", type=int, default=100)
    for each in (campaign, submissions):
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "campaign":
        found = campaign_figures(CampaignPaths(options.campaign.absolute()))
        print(json.dumps(found, indent=1) if options.json else figures_text(found))
    else:
        found = submission_figures(options.count)
        print(json.dumps(found, indent=1) if options.json else submissions_text(found))


if __name__ == "__main__":
    main()
