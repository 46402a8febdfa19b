"""The campaign's accounts while it runs: what recorded attempts cost is written down, and what is used up is known at each tick."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from evo_hpc.config.slurm import Slurm
from evo_hpc.controller.budget import Overrun, check
from evo_hpc.controller.cost import asked_since, write_cost
from evo_hpc.controller.spending import CostBook, Spent
from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.dispatch.slurm.commands import Commands, NoAccounting, SlurmError
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.paths import JobPaths
from evo_hpc.store.lease import Lease

_LAST_PAUSES = (2.0, 3.0, 5.0)
"""Seconds that accounting is given at the end."""
_ASK_SECONDS = 30.0
"""Accounting is asked about recorded attempts no oftener: it lags by seconds, and nothing waits for the answer."""
_COUNTING_SHARE = 50
"""Times as long as the last count of what is used took, until it is counted again."""
_COUNT_SECONDS = 60.0
"""But not later than that."""


@dataclass
class Books:
    """One controller's."""

    _book: CostBook = field(default_factory=CostBook)
    _written: set[Path] = field(default_factory=set)
    _settled: dict[str, VersionState] = field(default_factory=dict)
    """Versions none of whose attempts was due, as they were then."""
    _asked_at: float = float("-inf")
    _spent: Spent | None = None
    _count_at: float = float("-inf")
    """Reading of the monotonic clock at which it is counted again."""

    def keep(self, state: CampaignState, lease: Lease) -> list[Overrun]:
        """Write down the costs that are settled; every cap of the budget that is reached."""
        due = self._due(state)
        here, there = [s for s in due if not _on_slurm(s)], [s for s in due if _on_slurm(s)]
        self._write([s.job for s in here], lease, None, state.now)
        if there and state.now - self._asked_at >= _ASK_SECONDS:
            self._asked_at = state.now
            jobs = [s.job for s in there]
            try:
                self._write(jobs, lease, _accounted(state.settings.cluster.slurm, jobs), state.now)
            except SlurmError:
                pass  # asked again later
        budget = state.settings.campaign.budget
        if not any(cap is not None for name, cap in budget.model_dump().items() if name != "grace"):
            return []
        return check(budget, self._spent_by_now(state))

    def _spent_by_now(self, state: CampaignState) -> Spent:
        """What is used, counted anew when what the last count took is a small share of the time since: with many live jobs, whose
        records are read for it, it takes longer than all the rest of a tick."""
        if self._spent is None or time.monotonic() >= self._count_at:
            began = time.monotonic()
            owners = {"base": state.base_jobs, **{version.id: version.jobs for version in state.versions.values()}}
            self._spent = self._book.spent({owner: [s.job for each in jobs.values() for s in each] for owner, jobs in owners.items()})
            ended = time.monotonic()
            self._count_at = ended + min(_COUNTING_SHARE * (ended - began), _COUNT_SECONDS)
        return self._spent

    def close(self, state: CampaignState, lease: Lease) -> None:
        """The last look at the accounts before the controller ends: accounting lags by seconds, so it is given some."""
        settle([s.job for s in self._due(state)], state.settings.cluster.slurm, lease)

    def _due(self, state: CampaignState) -> list[JobStatus]:
        """Recorded attempts whose cost is not written down yet. Versions of which nothing changed since none was due are passed over."""
        unsettled = {name: version.jobs for name, version in state.versions.items() if self._settled.get(name) is not version}
        found: list[JobStatus] = []
        for owner, jobs in {"base": state.base_jobs, **unsettled}.items():
            due = [s for attempts in jobs.values() for s in attempts if s.record is not None and s.job.root not in self._written]
            if not due and owner in state.versions:
                self._settled[owner] = state.versions[owner]
            found += due
        return found

    def _write(self, jobs: list[JobPaths], lease: Lease, accounted: list[SlurmJob] | None, now: float) -> None:
        self._written |= {job.root for job in jobs if write_cost(job, lease, accounted, now)}


def settle(jobs: Iterable[JobPaths], slurm: Slurm, lease: Lease) -> None:
    """Write down what recorded attempts cost, as far as accounting tells in a few seconds; what is not written down is estimated."""
    left = list(jobs)
    for patience in (0.0, *_LAST_PAUSES):
        time.sleep(patience)
        try:
            accounted = _accounted(slurm, left)
        except SlurmError:
            return
        left = [job for job in left if not write_cost(job, lease, accounted, time.time())]
        if not left:
            return


def accounted_now(state: CampaignState) -> list[SlurmJob]:
    """What accounting says of the attempts whose cost is not written down yet; nothing where there is none, or no answer."""
    jobs = [s.job for s in state.all_jobs() if _on_slurm(s) and not s.job.cost.exists()]
    try:
        return (_accounted(state.settings.cluster.slurm, jobs) or []) if jobs else []
    except SlurmError:
        return []


def _on_slurm(status: JobStatus) -> bool:
    return status.intent is not None and status.intent.executor == "slurm"


def _accounted(slurm: Slurm, jobs: list[JobPaths]) -> list[SlurmJob] | None:
    """What accounting says of these attempts; null where there is none. Raises SlurmError when it does not answer."""
    since = asked_since(jobs)
    try:
        return [] if since is None else list(Commands.of(slurm).accounting(since))
    except NoAccounting:
        return None
