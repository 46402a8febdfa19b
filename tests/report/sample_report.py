"""A campaign as a report's record, made up but plausible: kept, pruned, reverted and stopped versions, two kept siblings and their merge."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from evo_hpc.agent.proposal import Considered, Proposal, Round
from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.comparison import Comparison, Interval
from evo_hpc.lineage.decision import Decision, PredictionCheck, Reading
from evo_hpc.lineage.factors import Change
from evo_hpc.lineage.findings import AnalyzerReport, Citation, Finding, Measure
from evo_hpc.lineage.looks import Look
from evo_hpc.lineage.reads import Estimate, ReadResult
from evo_hpc.lineage.version import Prediction, Version
from evo_hpc.report.model import CampaignReport, Curves, Score, SealedRead, StoppedEarly, VersionReport, build
from evo_hpc.stats import alpha_for_look

ALPHA, TASKS, K, STARTED = 0.05, 160, 8, 1_796_010_483.0
SCORES = {"v0000": 0.369, "v0001": 0.746, "v0002": 0.812, "v0003": 0.751, "v0004": 0.803, "v0005": 0.688, "v0007": 0.861}
CHANGES = {
    "v0001": [Change("steps", 0, 60, "budget")],
    "v0002": [Change("optimizer.lr", 5e-05, 2e-04, "optimizer")],
    "v0003": [Change("optimizer.kl_coef", 0.001, 0.0, "optimizer")],
    "v0004": [Change("rollout.group_size", 8, 16, "rollout")],
    "v0005": [Change("data_filter.difficulty.digits", None, [4], "data_filter")],
    "v0006": [Change("optimizer.lr", 5e-05, 2e-03, "optimizer")],
    "v0007": [Change("rollout.group_size", 8, 16, "rollout")],
}
PARENTS = {"v0000": [], "v0001": ["v0000"], **{f"v000{i}": ["v0001"] for i in (2, 3, 4, 5, 6)}, "v0007": ["v0002", "v0004"]}
HYPOTHESES = {
    "v0000": "The base policy as it is, without RL.",
    "v0001": "GRPO with the campaign's recipe raises the score on dev over the base policy.",
    "v0002": "A fourfold learning rate raises dev/avg_at_k, because gradient norms stay far below the bound and the KL to the init stays under 0.02.",
    "v0003": "Without the KL term the policy moves further and scores higher, because the term holds it near a weak init.",
    "v0004": "Groups of 16 halve the share of zero-variance groups, because a prompt that is solved one time in eight is seen to be solved.",
    "v0005": "Training on four-digit sums alone raises the score, because three-digit sums are nearly all solved.",
    "v0006": "A fortyfold learning rate finds the plateau sooner.",
    "v0007": "The higher learning rate and the larger groups act on different parts of the signal, so their gains add up.",
}
FINDINGS = {
    "v0001": [
        ("optimisation.inert_clip", "warning", "optimisation.clip_fraction", 0.0004, None, 0.001,
         "The clip bounds bind on 0.04 % of tokens: clip_low and clip_high are inert."),
        ("signal.dead_groups", "critical", "signal.dead_group_fraction", 0.53, 0.5, None,
         "53 % of groups have rewards that are all equal: more than half of the rollouts teach nothing."),
    ],
    "v0002": [("signal.dead_groups", "warning", "signal.dead_group_fraction", 0.41, 0.3, None, "41 % of groups have rewards that are all equal.")],
    "v0003": [("optimisation.kl_drift", "warning", "optimisation.kl_last", 0.083, 0.05, None, "KL to the init ends at 0.083 nat.")],
    "v0004": [],
    "v0005": [("score.forgetting", "critical", "score.easy_drop", 0.12, 0.05, None,
               "Three-digit sums, no longer trained on, fell by 12 points on probe.")],
    "v0006": [("score.collapse", "critical", "score.train_drop", 0.31, 0.1, None, "Train score fell by 31 points from its best in 15 steps."),
              ("optimisation.entropy_collapse", "critical", "optimisation.entropy_last", 0.004, None, 0.02,
               "Entropy is 0.004 nat: the policy has stopped exploring.")],
    "v0007": [("signal.dead_groups", "warning", "signal.dead_group_fraction", 0.34, 0.3, None, "34 % of groups have rewards that are all equal.")],
}
LOOKS = [("v0001", "v0000"), ("v0002", "v0001"), ("v0003", "v0001"), ("v0004", "v0001"), ("v0005", "v0001"), ("v0007", "v0002"), ("v0007", "v0004")]


def interval(before: float, after: float, alpha: float) -> Interval:
    """A plausible one: wider at a smaller alpha."""
    half = 0.0155 * math.sqrt(-2 * math.log(alpha)) / 1.2
    difference = after - before
    low, high = difference - half, difference + half * 0.97
    return Interval(
        n_tasks=TASKS, k=K, mean_a=before, mean_b=after, difference=difference, ci_low=low, ci_high=high, alpha=alpha, p_value=0.01,
        method="studentized", missing_a=0, missing_b=3, draws=10_000, seed=1, degenerate=False, note="", excludes_zero=low > 0 or high < 0,
    )


def claimed(before: float, after: float) -> ReadResult:
    """On 256 sealed tasks."""
    found = interval(before, after, 0.05).model_copy(update={"n_tasks": 256})
    sides = [Estimate(mean=mean, ci_low=mean - 0.03, ci_high=mean + 0.03, missing=0, note="") for mean in (before, after)]
    return ReadResult(
        read=2, read_digest="d", evaluator_epoch="5ea1ed", evaluations=("a", "b"), n_tasks=256, k=K, baseline=sides[0], candidate=sides[1],
        comparison=found, comparison_t=found, verdict="better", earlier=[], generation=1, finished_at=STARTED + 7200,
    ).signed()


def look(number: int) -> Look:
    version, against = LOOKS[number - 1]
    return Look(
        number=number, version=version, against=against, suite="dev", evaluator_epoch="6c0bf4ace0b6ea19", evaluations=(f"e{against}", f"e{version}"),
        total_alpha=ALPHA, alpha=alpha_for_look(number, ALPHA), generation=1, declared_at=STARTED + 600 * number,
    )


def comparison(number: int) -> Comparison:
    version, against = LOOKS[number - 1]
    taken = look(number)
    pair = SCORES[against], SCORES[version]
    return Comparison(
        version=version, against=against, suite="dev", evaluator_epoch=taken.evaluator_epoch, look=taken, claim="higher score on dev (exploratory)",
        interval=interval(*pair, 0.05), at_look_alpha=interval(*pair, taken.alpha), interval_t=interval(*pair, 0.05),
    ).signed()


def curves(seed: int, steps: int, top: float, *, collapse: bool = False) -> Curves:
    """Noisy learning curves; `collapse`: the score falls and entropy goes to nothing in the last third."""
    rng = random.Random(seed)
    values: dict[str, list[float | None]] = {name: [] for name in (
        "score_mean", "reward_mean", "entropy", "kl", "grad_norm", "clip_fraction_low", "clip_fraction_high", "zero_variance_fraction",
        "response_tokens_mean", "truncated_fraction")}
    for step in range(1, steps + 1):
        gone = 1 - math.exp(-3 * step / 60)
        fall = max(0.0, step / steps - 0.6) / 0.4 if collapse else 0.0
        score = min(1.0, max(0.0, 0.37 + (top - 0.37) * gone - 0.5 * fall + rng.gauss(0, 0.035)))
        values["score_mean"].append(score)
        values["reward_mean"].append(score + 0.09 + rng.gauss(0, 0.005))
        values["entropy"].append(max(0.002, (0.32 - 0.14 * gone) * (1 - 0.98 * fall) + rng.gauss(0, 0.006)))
        values["kl"].append(0.001 + 0.03 * top * gone * (1 + 3 * fall) + abs(rng.gauss(0, 0.002)))
        values["grad_norm"].append(0.4 + 0.2 * rng.random() + 3 * fall * rng.random())
        values["clip_fraction_low"].append(0.0002 * rng.random())
        values["clip_fraction_high"].append(0.001 * rng.random() + 0.01 * fall)
        values["zero_variance_fraction"].append(min(1.0, 0.3 + 0.25 * gone * top + rng.gauss(0, 0.05)))
        values["response_tokens_mean"].append(31 + 3 * gone + rng.gauss(0, 0.4))
        values["truncated_fraction"].append(max(0.0, 0.04 * (1 - gone) + 0.3 * fall + rng.gauss(0, 0.004)))
    return Curves(tuple(range(1, steps + 1)), {name: tuple(found) for name, found in values.items()})


def decision(version: str) -> Decision | None:
    if version == "v0000":
        return None
    readings = [
        Reading(
            against=c.against, look=c.look.number,
            role="parent and incumbent" if c.against in ("v0000", "v0002") or version in ("v0002", "v0003") else "parent",
            alpha=c.look.alpha, difference=c.at_look_alpha.difference, ci_low=c.at_look_alpha.ci_low, ci_high=c.at_look_alpha.ci_high, n_tasks=TASKS,
            verdict="better" if c.at_look_alpha.ci_low > 0 else "worse" if c.at_look_alpha.ci_high < 0 else "not shown",
        )
        for c in comparisons(version)
    ]
    if version == "v0006":
        return Decision(
            version=version, decision="prune", outcome="stopped_early",
            because="Stopped early at step 35 by the rule declared beforehand (score.collapse): Train score fell by 31 points "
            "from its best in 15 steps. Its score on dev was never read.", harness="h0001",
        )
    kind = {"better": "keep", "worse": "revert", "not shown": "prune"}[readings[0].verdict]
    assert version in SCORES
    parent = PARENTS[version][0]
    found = interval(SCORES[parent], SCORES[version], 0.05)
    held = "held" if found.ci_low >= 0.01 else "failed" if found.ci_high < 0.01 else "inconclusive"
    check = PredictionCheck(
        prediction=Prediction(metric="dev/avg_at_k", direction="up", by=0.01), against=parent, before=found.mean_a, after=found.mean_b,
        difference=found.difference, ci_low=found.ci_low, ci_high=found.ci_high, outcome=held,  # type: ignore[arg-type]
        why="The interval against the predicted 1.0 points decides.",
    )
    words = {"keep": "Kept", "revert": "Shown to do harm: its change is undone", "prune": "No gain shown: pruned"}[kind]
    return Decision(
        version=version, decision="merge" if version == "v0004" else kind,  # type: ignore[arg-type]
        merge_with=["v0002"] if version == "v0004" else [], promoted=version in ("v0001", "v0002", "v0007"),
        because=f"{words}: {100 * found.difference:+.1f} points on dev.", gate=readings, prediction=check, harness="h0001",
    )


def comparisons(version: str) -> tuple[Comparison, ...]:
    return tuple(comparison(i) for i, (name, _) in enumerate(LOOKS, start=1) if name == version)


def analysis(version: str) -> tuple[AnalyzerReport, ...]:
    found = [
        Finding(id=i, severity=s, measure=m, value=v, above=a, below=b, text=t) for i, s, m, v, a, b, t in FINDINGS[version]  # type: ignore[arg-type]
    ]
    return tuple(
        AnalyzerReport(analyzer=name, layer=name, version=version, up_to_step=None, measures={"rows": Measure(value=60.0)},
                       findings=[f for f in found if f.id.startswith(name)], rows=60)
        for name in ("optimisation", "score", "signal")
    )


def version(name: str) -> VersionReport:
    parents, steps = PARENTS[name], 0 if name == "v0000" else 60
    evidence = [
        Citation(finding=i, version="v0001", severity=s, value=v, threshold=a if a is not None else b, text=t,  # type: ignore[arg-type]
                 source=f"versions/v0001/analysis/h0001/{i.split('.')[0]}/findings.json")
        for i, s, _, v, a, b, t in FINDINGS["v0001"][1:] if name == "v0004"
    ]
    author = "campaign" if name in ("v0000", "v0001") else "person" if name == "v0006" else "agent"
    rules = {"v0002": "raise_lr", "v0003": "drop_kl", "v0004": "larger_groups", "v0005": "harder_tasks", "v0007": "merge_kept"}
    changes = {parent: tuple(CHANGES[name]) for parent in parents}
    if name == "v0007":
        changes = {"v0002": tuple(CHANGES["v0004"]), "v0004": tuple(CHANGES["v0002"])}
    half = 0.027
    scores = {} if name not in SCORES else {
        suite: Score(SCORES[name] + shift, SCORES[name] + shift - half, SCORES[name] + shift + half * 0.95, n, K,
                     3 if (name, suite) == ("v0003", "dev") else 0, epoch)
        for suite, shift, n, epoch in (("dev", 0.0, TASKS, "6c0bf4ace0b6ea19"), ("probe", 0.006, 48, "0d3a1be2c4f59876"))
    }
    return VersionReport(
        version=Version(
            id=name, parents=parents, author=author, hypothesis=HYPOTHESES[name], rule=rules.get(name), evidence=evidence,  # type: ignore[arg-type]
            prediction=Prediction(metric="dev/avg_at_k", direction="up", by=0.01) if parents else None,
            rollback=f"Go on from {parents[0]}." if parents else "",
        ),
        recipe_steps=steps, seed=0, init="base", stage="evaluated", changes=changes, scores=scores,
        over_base=interval(SCORES["v0000"], SCORES[name], 0.05) if name in SCORES and parents else None,
        comparisons=comparisons(name), decision=decision(name),
        curves=None if not steps else curves(int(name[1:]), 35, 0.8, collapse=True) if name == "v0006" else curves(int(name[1:]), 60, SCORES[name]),
        harness="h0001" if parents else None, analyses=analysis(name) if parents else (),
        stopped_early=StoppedEarly(35, ("score.collapse",)) if name == "v0006" else None,
        seconds={"train": 82.0 if name != "v0006" else 51.0, "evaluate": 13.0} if steps else {"evaluate": 13.0},
        failed_attempts=1 if name == "v0003" else 0,
    )


def rounds() -> list[Round]:
    def proposal(name: str) -> Proposal:
        return Proposal(version=version(name).version, recipe=Recipe())

    passed = [
        Considered(rule="raise_clip_high", outcome="passed over", why="needs optimisation.clip_saturated, which v0001 does not have"),
        Considered(rule="longer_responses", outcome="passed over", why="needs length.truncated above 0.15; v0001 has 0.02"),
    ]
    told = [
        ("v0001", ["v0001"], ["v0002", "v0003"], passed), ("v0002", ["v0001", "v0002", "v0003"], ["v0004", "v0005"], passed[:1]),
        ("v0002", list(SCORES)[1:6], ["v0007"], []), ("v0007", list(PARENTS)[1:], [], passed),
    ]
    return [
        Round(number=number, harness="h0001", incumbent=incumbent, decided=decided, proposals=[proposal(name) for name in proposed],
              considered=considered, generation=1)
        for number, (incumbent, decided, proposed, considered) in enumerate(told, start=1)
    ]


def sample(*, sealed: bool = True) -> CampaignReport:
    """The finished campaign."""
    reads = [
        SealedRead(1, "demo-last-week", False, "v0000", "v0003", STARTED - 500_000),
        SealedRead(2, "addition", True, "v0000", "v0007", STARTED + 7000, result=claimed(0.372, 0.848)),
    ]
    return build(
        name="addition", description="Digit-by-digit addition by a tiny policy, trained with GRPO from a short supervised start.", folder="addition",
        domain="arithmetic", seed=7, alpha=ALPHA, versions=[version(name) for name in PARENTS], looks=[look(i) for i in range(1, len(LOOKS) + 1)],
        rounds=rounds(), sealed=reads if sealed else [], tasks={"dev": TASKS, "probe": 48, "sealed": 256, "train": 4096}, other_seconds=41.0,
        epochs={"6c0bf4ace0b6ea19": {"suite": "dev", "temperature": "1.0", "engine.engine_version": "0.32.0"},
                "0d3a1be2c4f59876": {"suite": "probe", "temperature": "1.0", "engine.engine_version": "0.32.0"}},
        software={"engine": ("vllm 0.32.0",), "torch": ("2.13.0+cpu",), "megatron-core": ("0.16.1",)}, times=[STARTED, STARTED + 7300],
    )


def with_hostile_texts(report: CampaignReport, hostile: str) -> CampaignReport:
    """The same campaign with `hostile` in every text that a file could bring."""
    folder = hostile.replace("\ud800", "\udcff")  # folders are named by bytes: no half of a pair, but a stray byte
    versions = [
        replace(
            v, stage=hostile, version=v.version.model_copy(update={"hypothesis": hostile, "rule": hostile, "rollback": hostile}),
            changes={parent: tuple(Change(hostile, hostile, [hostile], c.factor) for c in found) for parent, found in v.changes.items()},
            decision=v.decision.model_copy(update={"because": hostile}) if v.decision else None,
            analyses=tuple(
                a.model_copy(update={"findings": [f.model_copy(update={"text": hostile, "measure": hostile}) for f in a.findings]})
                for a in v.analyses
            ),
        )
        for v in report.versions
    ]
    considered = Considered(rule=hostile, outcome="passed over", why=hostile)
    return replace(
        report, name=hostile, description=hostile, folder=folder, domain=hostile, versions=tuple(versions), software={hostile: (hostile,)},
        rounds=tuple(r.model_copy(update={"considered": [considered]}) for r in report.rounds), epochs={"e": {hostile: hostile}},
        sealed=tuple(replace(read, campaign=hostile, candidate=hostile, why=hostile) for read in report.sealed),
    )
