"""`evo-hpc finalize`: one test on the sealed tasks, declared before any of them is read; after a crash it goes on with that one."""

from __future__ import annotations

import time

from evo_hpc.controller.books import settle
from evo_hpc.controller.claim import FinalResult, describe, final_claim, final_result
from evo_hpc.controller.final_job import FinalJob
from evo_hpc.controller.gate import METHOD, SCORE_DIFFERENCE, draws_for
from evo_hpc.controller.loop import Watcher
from evo_hpc.controller.ownership import owned
from evo_hpc.controller.plan import ROOT
from evo_hpc.controller.preflight import check_machine
from evo_hpc.controller.state import CampaignState, read_state
from evo_hpc.controller.tasks import domain_of
from evo_hpc.errors import UserError
from evo_hpc.evaluation.epoch import differing
from evo_hpc.evaluation.scores import EvaluationRecord, scores_in_folder
from evo_hpc.lineage.comparison import Interval
from evo_hpc.lineage.decision import Verdict
from evo_hpc.lineage.reads import Candidate, Estimate, Read, ReadResult, other_read
from evo_hpc.lineage.sealed import BadSealedLedger, Entry, declare_read, place_of, read_ledger, sealed_problems, write_result
from evo_hpc.paths import CampaignPaths
from evo_hpc.seeds import derive_seed
from evo_hpc.stats import mean_interval, paired_bootstrap
from evo_hpc.stats.intervals import Method
from evo_hpc.store.atomic import append_line, sweep_temps
from evo_hpc.store.lease import Lease

ALPHA = 0.05
"""Of the one two-sided test."""


class FinalRefused(UserError):
    """Sealed is not read: nothing to claim, something still running, or it was read for another candidate."""


def finalize(
    paths: CampaignPaths, candidate: str | None = None, *, again: str | None = None, watch: Watcher = lambda state, plan, events: None,
    take_over: bool = False,
) -> FinalResult:
    """The claim about `candidate` (null: the incumbent) against the root version on sealed.

    A read that this campaign has declared and not finished goes on first, whatever `candidate` is now. A finished read
    for the same policy is returned as it is. Another candidate is read for only with a reason, `again`. Raises
    FinalRefused, BadSealedLedger, LeaseHeld, and what a failing job raises.
    """
    if again is not None and not again.strip():
        raise FinalRefused("--again needs a reason in words: it is written into the ledger and shown with the claim")
    state = read_state(paths, hashes=True)
    task_set = _task_set(state)
    now = _candidate(state, candidate or state.incumbent_before(None))
    entries = _ledger(paths, task_set)
    found = choose(entries, place_of(paths), now, again)
    if found is not None and found.result is not None:
        notes = [f"--again was not needed: {now.version} has its claim already; nothing was read."] if again else []
        return final_result(found, entries, notes=notes)
    if running := [status for status in state.all_jobs() if status.live]:
        raise FinalRefused(f"{running[0].job.root}: still runs; let the campaign come to its end first: `evo-hpc run`")
    check_machine(state.settings.cluster, paths.root)
    with owned(paths, take_over=take_over) as ownership:
        sweep_temps(paths.workspace.sealed(task_set))
        state = read_state(paths)
        found = choose(_ledger(paths, task_set), place_of(paths), now, again)
        read = found.read if found is not None else _declare(state, task_set, now, again, ownership.lease)
        _check_unchanged(state, read)
        evaluations = FinalJob(state, read, ownership, watch).run()
        settle([job for job in paths.final.jobs() if job.record.exists()], state.settings.cluster.slurm, ownership.lease)
        entries = _ledger(paths, task_set)
        result = entries[read.number - 1].result or _conclude(paths, read, entries, evaluations, ownership.lease)
    notes = [] if found is None else [f"Read {read.number}, declared earlier, was finished now."]
    if read.candidate.policy != now.policy:
        notes.append(f"The incumbent is {now.version} by now; this claim is about {read.candidate.version}, which it was declared for.")
    return final_result(Entry(read, result), _ledger(paths, task_set), fresh=True, notes=notes)


def choose(entries: list[Entry], place: str, candidate: Candidate, again: str | None) -> Entry | None:
    """The read of this campaign (`place`) to go on with or to show; None: declare a new one. Pure. Raises FinalRefused."""
    own = [entry for entry in entries if entry.read.place == place]
    for entry in own:
        if entry.result is None:
            return entry
    for entry in reversed(own):
        if entry.read.candidate.policy == candidate.policy:
            return entry
    if own and again is None:
        last = own[-1].read
        raise FinalRefused(f"this campaign has its claim already: read {last.number}, {last.candidate.version} against {last.baseline.version}. To "
                           f"read the same tasks again for {candidate.version}, say why: --again REASON (it is written into the ledger and shown)")
    return None


def _task_set(state: CampaignState) -> str:
    if state.tasks is None:
        raise FinalRefused(f"{state.paths.root}: its tasks are not made yet; `evo-hpc run` first")
    sealed = state.tasks.splits["sealed"]
    if sealed.tasks < 2:
        raise FinalRefused(f"{state.paths.campaign_yaml}: {sealed.tasks} sealed tasks give no claim; a campaign is made with them (`sealed` in "
                           "domain.config), in a new folder")
    if not state.paths.workspace.sealed_tasks(sealed.task_set).is_file():
        raise FinalRefused(f"{state.paths.workspace.sealed_tasks(sealed.task_set)}: missing; it lies in the workspace, not in the campaign. Restore "
                           f"it, or remove {state.paths.tasks_folder} and run `evo-hpc run` to have all tasks made again")
    return sealed.task_set


def _candidate(state: CampaignState, candidate: str) -> Candidate:
    """What would be claimed now. Raises FinalRefused when there is nothing."""
    if candidate == ROOT or ROOT not in state.versions:
        raise FinalRefused(f"{state.paths.root}: no version has been promoted over {ROOT}, so there is nothing to claim and sealed is not read")
    if candidate not in state.versions:
        raise FinalRefused(f"{candidate}: no such version in {state.paths.root}; there are: {', '.join(state.versions)}")
    identity, base = state.versions[candidate].policy_identity, state.versions[ROOT].policy_identity
    if identity is None or base is None:
        raise FinalRefused(f"{state.paths.version(candidate if identity is None else ROOT).root}: has no trained policy; `evo-hpc run` first")
    if identity == base:
        raise FinalRefused(f"{candidate} and {ROOT} are the same policy: there is nothing to claim")
    return Candidate(version=candidate, policy=identity)


def _ledger(paths: CampaignPaths, task_set: str) -> list[Entry]:
    """The ledger, once it agrees with this campaign's own scores on sealed."""
    if problems := sealed_problems(paths, task_set):
        raise BadSealedLedger("\n".join(problems))
    return read_ledger(paths.workspace, task_set)


def _evaluator(state: CampaignState) -> dict[str, str]:
    """Settings that determine the scores on sealed."""
    campaign = state.settings.campaign
    domain, _ = domain_of(state.paths, campaign)
    settings = {name: repr(value) for name, value in campaign.evaluation.model_dump(mode="json", exclude={"suites"}).items()}
    return {**settings, "campaign_seed": str(campaign.seed), **{f"verifier.{name}": value for name, value in domain.identity().items()}}


def _declare(state: CampaignState, task_set: str, candidate: Candidate, again: str | None, lease: Lease) -> Read:
    campaign = state.settings.campaign
    base = state.versions[ROOT].policy_identity
    assert base is not None
    draft = Read(
        number=0, task_set=task_set, campaign=campaign.name, place=place_of(state.paths), folder=str(state.paths.root.resolve()),
        baseline=Candidate(version=ROOT, policy=base), candidate=candidate, alpha=ALPHA, method=METHOD,
        draws=draws_for(campaign, ALPHA),
        seed=derive_seed(campaign.seed, "final", base, candidate.policy, task_set) % 2**32,
        evaluator=_evaluator(state), why=again, generation=lease.generation, declared_at=0.0,
    )
    lease.check()
    read = declare_read(state.paths.workspace, draft)
    append_line(state.paths.events, {
        "time": time.time(), "generation": lease.generation, "event": "DeclareRead", "read": read.number, "version": candidate.version,
        "against": ROOT,
    })
    return read


def _check_unchanged(state: CampaignState, read: Read) -> None:
    """Raise FinalRefused unless the candidates and the settings are those that were declared."""
    where = state.paths.workspace.sealed_read(read.task_set, read.number)
    for candidate in (read.baseline, read.candidate):
        version = state.versions.get(candidate.version)
        if version is None or version.policy_identity != candidate.policy:
            raise FinalRefused(f"{state.paths.version(candidate.version).root}: {'removed' if version is None else 'its policy changed'} since read "
                               f"{read.number} was declared for it ({where}); restore it, so that this read can be finished")
    if changed := differing(read.evaluator, _evaluator(state)):
        raise FinalRefused(f"{state.paths.campaign_yaml}: changed since read {read.number} was declared ({where}): {'; '.join(changed)}. Restore "
                           "it, so that this read can be finished")


def _conclude(
    paths: CampaignPaths, read: Read, entries: list[Entry], evaluations: tuple[EvaluationRecord, EvaluationRecord], lease: Lease
) -> ReadResult:
    """The declared test, computed from the published scores, and its record. The same scores give the same result."""
    names = (read.baseline.version, read.candidate.version)
    scores = [scores_in_folder(paths.final.evaluation(read.number, name)) for name in names]
    tasks, k = evaluations[0].task_ids, evaluations[0].k

    def interval(method: Method) -> Interval:
        found = paired_bootstrap(
            *scores, tasks=tasks, k=k, draws=read.draws, alpha=read.alpha, seed=read.seed, method=method, bounds=SCORE_DIFFERENCE,
        )
        return Interval.of(found)

    def estimate(index: int) -> Estimate:
        found = mean_interval(
            scores[index], tasks=tasks, k=k, draws=read.draws, alpha=read.alpha, seed=read.seed, method=read.method, bounds=(0.0, 1.0),
        )
        return Estimate(mean=found.mean, ci_low=found.ci_low, ci_high=found.ci_high, missing=found.missing, note=found.note)

    comparison = interval(read.method)
    verdict: Verdict = "not shown" if not comparison.excludes_zero else "better" if comparison.difference > 0 else "worse"
    lease.check()
    return write_result(paths.workspace, read, ReadResult(
        read=read.number, read_digest=read.digest, evaluator_epoch=evaluations[0].epoch, evaluations=(evaluations[0].id, evaluations[1].id),
        n_tasks=len(tasks), k=k, baseline=estimate(0), candidate=estimate(1), comparison=comparison, comparison_t=interval("t"),
        verdict=verdict, earlier=[other_read(entry.read) for entry in entries if entry.read.number < read.number],
        generation=lease.generation, finished_at=time.time(),
    ))


__all__ = ["FinalRefused", "FinalResult", "choose", "describe", "final_claim", "finalize"]
