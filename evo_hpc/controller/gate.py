"""A look at dev: the paired, task-clustered comparison of a version with its parent, declared before it is taken."""

from __future__ import annotations

import math

from evo_hpc.config.campaign import Campaign
from evo_hpc.controller.state import VersionState
from evo_hpc.errors import UserError
from evo_hpc.evaluation.epoch import differing
from evo_hpc.evaluation.scores import EvaluationRecord, scores_by_task
from evo_hpc.lineage.comparison import Comparison, Interval
from evo_hpc.lineage.looks import declare_look
from evo_hpc.paths import CampaignPaths
from evo_hpc.seeds import derive_seed
from evo_hpc.stats import paired_bootstrap
from evo_hpc.stats.intervals import Method
from evo_hpc.store.atomic import write_json_once
from evo_hpc.store.lease import Lease

SUITE = "dev"
METHOD: Method = "studentized"
"""Bootstrap-t over whole tasks; the t interval is reported beside it."""
REPORTED_ALPHA = 0.05
SCORE_DIFFERENCE = (-1.0, 1.0)
"""What the difference of two scores can be at all."""
_TAIL_DRAWS = 50
"""Resamples beyond each end of an interval, at least: the alpha of later looks is small."""


def draws_for(campaign: Campaign, alpha: float) -> int:
    """Resamples for an interval at 1 - alpha: as many as the campaign says, and enough beyond each end."""
    return max(campaign.gate.draws, math.ceil(2 * _TAIL_DRAWS / alpha))


class NotComparable(UserError):
    """Two evaluations of different epochs."""


def compare(paths: CampaignPaths, campaign: Campaign, parent: VersionState, child: VersionState, lease: Lease) -> Comparison:
    """Write the look down, take it, and commit the comparison; after a crash the look that was declared is the one taken.

    Raises NotComparable when the two were scored under different evaluator epochs.
    """
    before, after = parent.evaluations[SUITE], child.evaluations[SUITE]
    assert before is not None and after is not None
    require_same_epoch(before, after)
    scores = [scores_by_task(version.node.paths, SUITE) for version in (parent, child)]
    lease.check()
    look = declare_look(
        paths, version=child.id, against=parent.id, suite=SUITE, epoch=after.epoch, evaluations=(before.id, after.id),
        alpha=campaign.gate.alpha, generation=lease.generation,
    )

    def interval(alpha: float, method: Method = METHOD) -> Interval:
        seed = derive_seed(campaign.seed, "gate", child.id, parent.id, after.epoch) % 2**32
        draws = draws_for(campaign, alpha)
        found = paired_bootstrap(*scores, tasks=after.task_ids, k=after.k, draws=draws, alpha=alpha, seed=seed, method=method, bounds=SCORE_DIFFERENCE)
        return Interval.of(found)

    comparison = Comparison(
        version=child.id, against=parent.id, suite=SUITE, evaluator_epoch=after.epoch, look=look,
        claim="higher score on dev (exploratory); not a claim about the intervention",
        interval=interval(REPORTED_ALPHA), at_look_alpha=interval(look.alpha), interval_t=interval(REPORTED_ALPHA, "t"),
    )
    lease.check()
    write_json_once(child.node.paths.comparison(parent.id, SUITE, look.number), comparison.signed().record())
    return comparison.signed()


def require_same_epoch(a: EvaluationRecord, b: EvaluationRecord) -> None:
    """Raise NotComparable, naming what differs."""
    if a.epoch != b.epoch:
        what = "; ".join(differing(a.epoch_components, b.epoch_components))
        raise NotComparable(f"{a.version} and {b.version} on {b.suite} were scored under different evaluator epochs ({what}). Remove the "
                            f"older eval/{b.suite} folder: that version is evaluated again, as today's settings and engine say")
