"""Signs of life of a job's workers: which of them have work and do not go on with it. The launcher's clock counts, not the files' times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from evo_hpc.store.atomic import StoreError, read_json


@dataclass
class _Last:
    seen: tuple[int, int]
    at: float
    busy: bool


@dataclass
class Pulses:
    """What was last seen of each worker."""

    last: float = 0.0
    """Reading of the clock when any of them was last seen to have gone on with its work."""
    _of: dict[str, _Last] = field(default_factory=dict)

    def silent_seconds(self, name: str, path: Path, now: float) -> float:
        """Seconds since a worker that has work last said so; 0 for one without work, or that has not begun to speak."""
        try:
            found = path.stat()
            if (seen := (found.st_ino, found.st_mtime_ns)) != (self._of[name].seen if name in self._of else None):
                self._of[name] = _Last(seen, now, bool(read_json(path)["busy"]))
                if self._of[name].busy:
                    self.last = now
        except (FileNotFoundError, StoreError):  # not there yet, or replaced between two looks: the next one will tell
            return 0.0
        last = self._of[name]
        return now - last.at if last.busy else 0.0

    def forget(self, name: str, now: float) -> None:
        """The worker is started again: nothing is known of it, and the job has gone on."""
        self._of.pop(name, None)
        self.last = now
