"""Scores the two candidates of a declared read on sealed: one job, started again until it has a result, published whole."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evo_hpc.controller.act import Event, carry_out_job, short_name
from evo_hpc.controller.commit import write_record
from evo_hpc.controller.loop import POLL_SECONDS, Watcher
from evo_hpc.controller.blockers import blocked, refuse_what_runs_elsewhere
from evo_hpc.controller.ownership import Interrupted, Ownership
from evo_hpc.controller.actions import Action, Commit, GiveUp, Kill, Plan, Start, Submit
from evo_hpc.controller.plan import Planner
from evo_hpc.controller.state import CampaignState
from evo_hpc.dispatch.attempt import load_result
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm.commands import SlurmBusy, SlurmError, SlurmUnavailable
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.errors import UserError
from evo_hpc.evaluation.epoch import differing
from evo_hpc.evaluation.scores import EvaluationRecord, read_evaluation_folder
from evo_hpc.evaluation.sealed import SEALED
from evo_hpc.evaluation.shards import publish_scores
from evo_hpc.jobs.outputs import EvaluateOutputs, parse_outputs
from evo_hpc.lineage.identity import digest
from evo_hpc.lineage.reads import Candidate, Read
from evo_hpc.paths import JobPaths
from evo_hpc.store.atomic import StoreError, append_line
from evo_hpc.store.manifest import read_complete

OWNER = "final"


class BadScores(UserError, StoreError):
    """Scores on sealed that are not those of the declared read."""


@dataclass
class FinalJob:
    """The piece of work of one read."""

    state: CampaignState
    read: Read
    ownership: Ownership
    watch: Watcher

    def __post_init__(self) -> None:
        self.paths = self.state.paths.final
        self.dispatch = Dispatch(self.state.settings.cluster)
        self.params = self._params()
        self.work = digest([self.read.digest, self.params])

    def run(self) -> tuple[EvaluationRecord, EvaluationRecord]:
        """The two evaluations, the baseline's first. Raises UserError or Failure when they cannot be had, Interrupted on a signal."""
        while True:
            statuses = [self.dispatch.observe(job) for job in self.paths.jobs()]
            refuse_what_runs_elsewhere(statuses)
            plan = self._plan(statuses)
            if plan.done:
                baseline, candidate = (read_evaluation_folder(self._folder(c), c.version) for c in self._candidates())
                return baseline, candidate
            if self.ownership.stop is not None:
                self._stop(plan)
            events = [event for action in plan.actions if (event := self._carry_out(action)) is not None]
            self.watch(self.state, plan, events)
            if plan.blockers and not plan.running and not plan.waiting and not plan.actions:
                raise blocked(plan.blockers)
            self.ownership.beat()
            self.dispatch.reap()
            if not events:
                time.sleep(POLL_SECONDS)

    def _candidates(self) -> tuple[Candidate, Candidate]:
        return self.read.baseline, self.read.candidate

    def _folder(self, candidate: Candidate) -> Path:
        return self.paths.evaluation(self.read.number, candidate.version)

    def _params(self) -> dict[str, Any]:
        """The baseline comes first: a base model from elsewhere has no probe, by which a second one is verified in the same engine."""
        versions = [self.state.versions[candidate.version] for candidate in self._candidates()]
        return {
            "evaluations": [
                {"version": v.id, "policy": v.policy, "policy_step": v.node.policy_step, "suite": SEALED, **v.node.recipe.tool_use.of_evaluation()}
                for v in versions
            ],
            "sealed": {"task_set": self.read.task_set, "number": self.read.number, "digest": self.read.digest},
        }

    def _plan(self, statuses: list[JobStatus]) -> Plan:
        """As the controller plans any other job; what is published is not made again."""
        planner = Planner(replace(self.state, now=self.dispatch.now()), self.ownership.lease.generation, None)
        for status in statuses:
            if status.phase == "finished":
                if status.intent is not None and status.intent.work == self.work:
                    planner.end(status)
                else:
                    planner.actions.append(GiveUp(status, "user", "it belongs to another read, or to a copy of this campaign"))
        published = all(self._folder(candidate).exists() for candidate in self._candidates())
        if not published and not planner.actions:
            last = statuses[-1] if statuses else None
            if last and last.record and last.record.state == "done" and last.intent and last.intent.work == self.work:
                planner.actions.append(Commit(last))  # never sampled twice: what was removed is published again from the job's own copy
            else:
                planner.work(OWNER, "evaluate", statuses, self.params, self.work)
        running = tuple(s for s in statuses if s.live)
        return Plan(tuple(planner.actions), running, tuple(planner.waiting), tuple(planner.blockers), done=published and not planner.actions)

    def _carry_out(self, action: Action) -> Event | None:
        """What came of one action; None for a repeated request, and while Slurm is away: the next look has it again."""
        try:
            return self._carried_out(action)
        except (SlurmUnavailable, SlurmBusy):
            return None

    def _carried_out(self, action: Action) -> Event | None:
        event: Event = {"event": type(action).__name__}
        lease = self.ownership.lease
        match action:
            case Submit() | Start() | GiveUp():
                event.update(carry_out_job(action, self.state, self.dispatch, lease))
            case Kill():
                if not self.dispatch.executor_of(action.status).end(action.status, "infrastructure", action.why):
                    return None
                event.update(job=short_name(action.status.job), why=action.why)
            case Commit():
                self._commit(action.status)
                event["job"] = short_name(action.status.job)
        append_line(self.state.paths.events, {"time": time.time(), "generation": lease.generation, **event})
        return event

    def _commit(self, status: JobStatus) -> None:
        """Publish both evaluations, then write the job's record. Raises BadScores unless they are the read's, of one evaluator epoch."""
        assert status.incarnation is not None
        root, job = self.state.paths.root, status.job
        outputs = status.result.outputs if status.result else load_result(job.incarnation(status.incarnation)).outputs
        made = {e.version: root / e.folder for e in parse_outputs(EvaluateOutputs, outputs, job, root).evaluations if e.suite == SEALED}
        again = f"remove {job.root} and finalize again: both are scored anew, for the same read"
        try:
            metas = [read_complete(made[candidate.version], hashes=True)["meta"] for candidate in self._candidates()]
        except (StoreError, KeyError) as error:
            raise BadScores(f"{job.root}: its scores are damaged or not there ({error}); {again}") from error
        if [meta["policy_identity"] for meta in metas] != [candidate.policy for candidate in self._candidates()]:
            raise BadScores(f"{job.root}: scored other policies than were declared; restore them, {again}")
        if metas[0]["epoch"] != metas[1]["epoch"]:
            what = "; ".join(differing(metas[0]["epoch_components"], metas[1]["epoch_components"]))
            raise BadScores(f"{job.root}: the two were scored under different evaluator epochs ({what}); {again}")
        self.ownership.lease.check()
        for candidate in self._candidates():
            publish_scores(self._folder(candidate), [made[candidate.version]], {"job": job.root.name, "read": self.read.digest})
        if status.record is None:
            write_record(status, self.ownership.lease, state="done")

    def _stop(self, plan: Plan) -> None:
        for status in plan.running:
            try:
                self.dispatch.stop(status)
            except SlurmError:  # it goes on; what is said below is true of it, too
                pass
        deadline = time.time() + self.state.settings.cluster.grace_seconds + 10
        jobs: list[JobPaths] = [status.job for status in plan.running]
        while jobs and time.time() < deadline:
            time.sleep(POLL_SECONDS)
            jobs = [job for job in jobs if self.dispatch.observe(job).live]
        words = "; ".join(f"{job.root} still runs" for job in jobs) or "no job runs"
        raise Interrupted(f"stopped by {signal.Signals(self.ownership.stop or 0).name}; {words}. Read {self.read.number} stays declared. Run the "
                          "same command to go on.")
