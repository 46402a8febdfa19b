"""The decision on a version: what its looks at dev and its findings say, and the evidence that an agent is given. Pure but for probe scores."""

from __future__ import annotations

from collections.abc import Mapping

from evo_hpc.agent.evidence import Evidence, VersionEvidence
from evo_hpc.agent.merge import merge_partner
from evo_hpc.agent.predict import check_prediction
from evo_hpc.agent.rules import SCORES
from evo_hpc.controller.gate import METHOD, SCORE_DIFFERENCE
from evo_hpc.controller.readings import readings_of
from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.evaluation.scores import scores_by_task
from evo_hpc.lineage.decision import KEPT, Decision, DecisionKind, PredictionCheck, Reading, conclude
from evo_hpc.lineage.findings import Measure
from evo_hpc.lineage.tree import node_changes
from evo_hpc.lineage.version import Prediction
from evo_hpc.seeds import derive_seed
from evo_hpc.stats import paired_bootstrap


def decide(state: CampaignState, version: VersionState) -> Decision:
    """What becomes of a version whose training is over and whose looks are taken. Reads the probe scores that a prediction names."""
    readings = readings_of(state, version)
    outcome = "stopped_early" if version.stopped_early is not None else "completed"
    kind, promoted = conclude(outcome, readings)
    partners: list[str] = []
    if kind in KEPT:
        partners = merge_partner(_with_decision(state, version, kind), version.id)
        kind = "merge" if partners else kind
    analysis = version.analysis
    return Decision(
        version=version.id, decision=kind, promoted=promoted, merge_with=partners, outcome=outcome, gate=readings,
        because=_because(version, kind, promoted, partners, readings), prediction=_check(state, version),
        evidence=analysis.citations(state.paths.root) if analysis else [], harness=analysis.harness if analysis else None,
    )


def _with_decision(state: CampaignState, version: VersionState, kind: DecisionKind) -> Mapping[str, VersionEvidence]:
    """What the agent would see if `version` were kept by now, for the search for siblings to join it with."""
    known = dict(evidence_of(state, before=version.id).versions)
    decision = Decision(version=version.id, decision=kind, because="kept")
    known[version.id] = _evidence(state, version, decision)
    for parent in version.node.version.parents:  # a version by hand may have a parent of a higher id
        known.setdefault(parent, _evidence(state, state.versions[parent], None))
    return known


def _because(version: VersionState, kind: DecisionKind, promoted: bool, partners: list[str], readings: list[Reading]) -> str:
    if version.stopped_early is not None:
        look = version.stopped_early
        return (f"Stopped early at step {look.step} by the rule declared beforehand ({', '.join(look.futile)}): "
                f"{'; '.join(f.text for f in look.findings if f.id in look.futile)} Its score on dev was never read.")
    told = "; ".join(_told(reading) for reading in readings)
    ending = {
        "keep": "Kept", "merge": f"Kept, to be joined with {', '.join(partners)}", "revert": "Shown to do harm: its change is undone",
        "prune": "No gain shown: pruned",
    }[kind]
    return f"{told}. {ending}{', and the incumbent from here on' if promoted else ''}."


def _told(reading: Reading) -> str:
    words = {"better": "Better than", "worse": "Worse than", "not shown": "Not shown to differ from"}[reading.verdict]
    return (f"{words} {reading.against} ({reading.role}): {100 * reading.difference:+.1f} points on dev, [{100 * reading.ci_low:+.1f}, "
            f"{100 * reading.ci_high:+.1f}] at alpha {reading.alpha:.4f} (look {reading.look}), n = {reading.n_tasks} tasks")


def _check(state: CampaignState, version: VersionState) -> PredictionCheck | None:
    prediction = version.node.version.prediction
    if prediction is None:
        return None
    parent = state.versions[version.node.version.parents[0]]
    if prediction.metric in SCORES and version.stopped_early is not None:
        return PredictionCheck(
            prediction=prediction, against=parent.id, outcome="failed",
            why=f"The run was stopped at step {version.stopped_early.step}, so the score was never read; a run that has to be stopped has failed.",
        )
    if prediction.metric in SCORES:
        return _check_score(state, parent, version, prediction)
    before, after = (_measure(v, prediction.metric) for v in (parent, version))
    return check_prediction(prediction, parent.id, before, after, None)


def _check_score(state: CampaignState, parent: VersionState, version: VersionState, prediction: Prediction) -> PredictionCheck:
    suite = prediction.metric.split("/")[0]
    before, after = (v.evaluations.get(suite) for v in (parent, version))
    values = [Measure(value=record.avg_at_k) if record else None for record in (before, after)]
    if before is None or after is None:
        return check_prediction(prediction, parent.id, *values, None)
    interval = None
    why = f"{parent.id} and {version.id} were scored on {suite} under different evaluator epochs, which are never compared."
    if before.epoch == after.epoch:
        interval = _interval(state, parent, version, suite)
        why = "Every task changed by the same amount, so nothing is known of the spread."
    if interval is None:
        return PredictionCheck(
            prediction=prediction, against=parent.id, before=before.avg_at_k, after=after.avg_at_k, outcome="inconclusive", why=why,
        )
    return check_prediction(prediction, parent.id, *values, interval)


def _measure(version: VersionState, name: str) -> Measure | None:
    return version.analysis.measures.get(name) if version.analysis else None


def _interval(state: CampaignState, parent: VersionState, version: VersionState, suite: str) -> tuple[float, float, float] | None:
    """Difference and 95 % interval of a score: of the look that was taken on dev, computed anew on probe; None without a spread."""
    if suite == "dev":
        comparison = version.comparison_with(parent)
        if comparison is None or comparison.interval.degenerate:
            return None
        return comparison.interval.difference, comparison.interval.ci_low, comparison.interval.ci_high
    after = version.evaluations[suite]
    assert after is not None
    seed = derive_seed(state.settings.campaign.seed, "prediction", version.id, parent.id, suite) % 2**32
    found = paired_bootstrap(
        *(scores_by_task(v.node.paths, suite) for v in (parent, version)), tasks=after.task_ids, k=after.k, alpha=0.05, seed=seed, method=METHOD, bounds=SCORE_DIFFERENCE,
        draws=state.settings.campaign.gate.draws,
    )
    return None if found.degenerate else (found.difference, found.ci_low, found.ci_high)


def evidence_of(state: CampaignState, before: str | None = None) -> Evidence:
    """What the agent may see: of all versions, or of those with lower ids than `before`."""
    known = {}
    for version in state.versions.values():
        if version.id == before:
            break
        known[version.id] = _evidence(state, version, version.decision)
    return Evidence(
        incumbent=state.incumbent_before(before), versions=known, domain=state.settings.campaign.domain.name,
        harness=state.harness.id if state.harness else "",
    )


def without_numbers(decision: Decision) -> Decision:
    """A decision as an agent may see it: what became of the version, and no number that was read on dev but the rounded estimate beside it."""
    hidden = {"before": None, "after": None, "difference": None, "ci_low": None, "ci_high": None, "why": ""}
    prediction = decision.prediction.model_copy(update=hidden) if decision.prediction else None
    return decision.model_copy(update={"gate": [], "because": "", "prediction": prediction})


def _evidence(state: CampaignState, version: VersionState, decision: Decision | None) -> VersionEvidence:
    parents, dev = version.node.version.parents, version.evaluations["dev"]
    return VersionEvidence(
        version=version.node.version, recipe=version.node.recipe, init=version.node.init,
        changes=tuple(node_changes(state.versions[parents[0]].node, version.node)) if parents else (),
        decision=without_numbers(decision) if decision else None,
        dev_estimate=round(dev.avg_at_k, 2) if dev else None, measures=version.analysis.measures if version.analysis else {},
        findings=tuple(version.analysis.citations(state.paths.root)) if version.analysis else (),
    )
