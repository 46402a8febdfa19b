"""What a worker has in its engine: the batches and how far they are; and the sign of life that its launcher looks at."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evo_hpc.domains.base import Task
from evo_hpc.rollout.episodes import Episode
from evo_hpc.rollout.exchange import BatchRequest
from evo_hpc.rollout.groups import Group, Sampler
from evo_hpc.store.atomic import write_json

_PULSE_SECONDS = 0.5


@dataclass
class Batch:
    """One claimed batch in the engine."""

    request: BatchRequest
    groups: list[Group]
    episodes: list[Episode]
    """Every rollout, in the order of groups and samples."""

    @classmethod
    def of(cls, request: BatchRequest, tasks: Mapping[str, Task], sampler: Sampler) -> Batch:
        groups = [Group(g.group_id, tasks[g.task_id], tuple(g.seeds)) for g in request.groups]
        return cls(request, groups, sampler.episodes(groups))

    @property
    def is_complete(self) -> bool:
        return all(episode.stop_reason is not None for episode in self.episodes)


class Pulse:
    """Says whether the worker has work, and that it still does it; a worker without work may be silent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._said: bool | None = None
        self._at = float("-inf")

    def busy(self) -> None:
        """A batch was begun, or the engine has made a step."""
        if self._said is not True or time.monotonic() - self._at > _PULSE_SECONDS:
            self._say(True)

    def idle(self) -> None:
        """Nothing is asked for."""
        if self._said is not False:
            self._say(False)

    def _say(self, busy: bool) -> None:
        self._said, self._at = busy, time.monotonic()
        write_json(self._path, {"busy": busy, "time": time.time()}, durable=False)
