"""What a role process of a job knows and may do: its paths, its spec, progress, and whether it must stop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.errors import Failure
from evo_hpc.jobs.claims import check_claim
from evo_hpc.jobs.spec import JobSpec
from evo_hpc.paths import CampaignPaths, ExchangePaths, IncarnationPaths, JobPaths
from evo_hpc.store.atomic import write_json


_SHOW_SECONDS = 0.2
"""Progress is written at most this often within a stage."""
_LOOK_SECONDS = 0.5
"""The stop file is looked for at most this often."""


class Stopped(Failure):
    """The job was told to stop and has saved what it can; not an error."""


@dataclass
class RoleContext:
    """Handed to each role's entry point."""

    role: str
    job: JobPaths
    incarnation: IncarnationPaths
    spec: JobSpec
    exchange: ExchangePaths
    started: float = field(default_factory=time.monotonic)
    """When the role's process got going, on the monotonic clock."""
    rank: int = 0
    """Of this process among those of its role."""
    told_to_stop: bool = False
    """Set by SIGTERM."""
    _looked: float = float("-inf")
    _progress: dict[str, Any] = field(default_factory=dict)
    _shown: float = float("-inf")

    @property
    def stop_requested(self) -> bool:
        """Whether the job was told to stop, by a signal or by a file; long work looks at it between steps."""
        now = time.monotonic()
        if not self.told_to_stop and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if self.incarnation.stop.exists():  # never set to False: SIGTERM may have come since
                self.told_to_stop = True
        return self.told_to_stop

    @stop_requested.setter
    def stop_requested(self, value: bool) -> None:
        self.told_to_stop = value

    @property
    def campaign_paths(self) -> CampaignPaths:
        return CampaignPaths.of_job(self.job)

    @property
    def campaign(self) -> Campaign:
        return Campaign.model_validate(self.spec.config)

    @property
    def cluster(self) -> Cluster:
        return Cluster.model_validate(self.spec.cluster)

    def resolve(self, path: str) -> Path:
        """A path of the spec: relative ones start at the campaign."""
        return self.campaign_paths.root / path

    def relative(self, path: Path) -> str:
        """The other way: how the spec and results name a path inside the campaign."""
        return path.relative_to(self.campaign_paths.root).as_posix()

    def seconds(self) -> float:
        """Since the role's process got going, for its own account."""
        return round(time.monotonic() - self.started, 1)

    def check_claim(self) -> None:
        """Raise Superseded unless this incarnation may still commit."""
        check_claim(self.job, self.incarnation)

    def raise_if_stopped(self) -> None:
        """Raise Stopped when the job was told to stop."""
        if self.stop_requested:
            raise Stopped(f"{self.role}: stopped on request")

    def progress(self, **values: Any) -> None:
        """Show how far the work is (stage, step, steps, ...); also what the stall watchdog looks at."""
        if self.rank:  # the first rank speaks for all
            return
        now = time.monotonic()
        same_stage = values.get("stage", self._progress.get("stage")) == self._progress.get("stage")
        self._progress.update(values)
        if same_stage and now - self._shown < _SHOW_SECONDS:
            return
        self._shown = now
        write_json(self.incarnation.progress, {**self._progress, "role": self.role, "time": time.time()}, durable=False)
