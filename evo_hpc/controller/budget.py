"""Whether a campaign may use more: its caps against what it has spent. Pure, but for the lines of campaign.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evo_hpc.config.campaign import Budget
from evo_hpc.config.yaml_io import line_of, load_tree
from evo_hpc.controller.spending import Spent
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.cost import Source
from evo_hpc.paths import VERSION_ID, CampaignPaths

CAMPAIGN = "campaign"
CAPS: Mapping[str, tuple[bool, str, str]] = {
    "gpu_hours": (False, "gpu_hours", "GPU hours"), "wall_hours": (False, "wall_hours", "hours of jobs"),
    "version_gpu_hours": (True, "gpu_hours", "GPU hours"), "version_wall_hours": (True, "wall_hours", "hours of jobs"),
}
"""Field of the budget: whether it is each version's, the field of a cost that it bounds, and its unit in words."""


@dataclass(frozen=True)
class Overrun:
    """A cap that is reached."""

    scope: str
    """`campaign`, or a version id."""
    cap: str
    """Field of the budget."""
    used: float
    """Hours."""
    limit: float
    """Hours: the cap."""
    last: float
    """Hours: the cap and its grace."""
    source: Source

    @property
    def stops(self) -> bool:
        """Whether running jobs have used up the grace too."""
        return self.used >= self.last


def check(budget: Budget, spent: Spent) -> list[Overrun]:
    """Every cap that is reached, the campaign's first, then by version. Pure."""
    found = []
    for cap, (of_version, field, _) in CAPS.items():
        limit = getattr(budget, cap)
        if limit is not None:
            costs = spent.owners.items() if of_version else [(CAMPAIGN, spent.campaign)]
            found += [
                Overrun(scope, cap, used, limit, limit * (1 + budget.grace), cost.source)
                for scope, cost in costs if (used := getattr(cost, field)) >= limit and (not of_version or VERSION_ID.match(scope))
            ]
    return sorted(found, key=lambda overrun: (overrun.scope != CAMPAIGN, overrun.scope))


def may_start(overruns: Iterable[Overrun], owner: str) -> bool:
    """Whether an attempt of this owner (a version id, `base`, `final`) may be submitted, for the first time or once more. Pure."""
    return not any(overrun.scope in (CAMPAIGN, owner) for overrun in overruns)


def to_stop(overruns: Iterable[Overrun], live: Iterable[JobStatus]) -> list[JobStatus]:
    """Of the jobs that run or wait, those that are to save and end now. Pure."""
    scopes = {overrun.scope for overrun in overruns if overrun.stops}
    return [status for status in live if scopes & {CAMPAIGN, status.job.owner.name}]


def describe(overrun: Overrun, where: str) -> str:
    """What is used up, what follows, and what to do; `where` is the place of the cap. Pure."""
    unit = CAPS[overrun.cap][2]
    told = "by Slurm's accounting" if overrun.source == "accounted" else "partly estimated" if overrun.source == "mixed" else "estimated"
    follows = (
        f"the {overrun.last:.4g} that running jobs may use up are reached too: they save and end" if overrun.stops
        else f"nothing more is submitted; running jobs may go on up to {overrun.last:.4g}"
    )
    without = f"list {overrun.scope} under `cancel` in control.yaml to go on without it"
    leave = "leave it and the campaign ends here" if overrun.scope == CAMPAIGN else without
    used = f"{overrun.scope} has used {overrun.used:.4g} of {overrun.limit:.4g} {unit} ({told})"
    return f"{where}: {used}: {follows}. Raise budget.{overrun.cap}, or {leave}"


def place_of(paths: CampaignPaths, cap: str) -> str:
    """Where a cap stands: file:line. Raises ConfigError."""
    return f"{paths.campaign_yaml}:{line_of(load_tree(paths.campaign_yaml), ['budget', cap])}"


def problems(paths: CampaignPaths, overruns: Iterable[Overrun]) -> list[str]:
    """One message for each cap that is reached."""
    return [describe(overrun, place_of(paths, overrun.cap)) for overrun in overruns]
