"""Records every point at which a controller can die: each change of a name on disk, each command it runs; and dies at one of them.

The points are found by running, not listed: whatever module writes or starts a program goes through `os` and `subprocess`, and
these are what is replaced here, in the controller's process alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evo_hpc.paths import TEMP_PREFIX

When = Literal["before", "after", "late"]
"""late: nothing dies there; the process stands still between its last check and this point until others have gone on without it."""
_TEMPORARY = re.compile(rf"{re.escape(TEMP_PREFIX)}(.*?)\.[^./]+\.\d+\.[0-9a-f]{{8}}")
_SCRATCH = re.compile(r"(evo-[a-z]+-)[A-Za-z0-9_]{8}")
KEPT = subprocess.Popen
"""The class as it was."""


@dataclass(frozen=True)
class Point:
    """The n-th time (from 1) that something is done."""

    label: str
    n: int

    def __str__(self) -> str:
        return f"{self.label} #{self.n}"


@dataclass
class Recorder:
    """Logs each point as it is reached and passed; kills this process (SIGKILL) at the one that it is told."""

    root: Path
    """The campaign; what lies in it is named relative to it."""
    log: Path
    kill_at: Point | None = None
    when: When = "before"
    context: str = ""
    """Who does what is logged, where that is of interest."""

    def __post_init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def begin(self, label: str) -> Point:
        """Something is about to be done."""
        self._seen[label] += 1
        point = Point(label, self._seen[label])
        self.note("begin", point)
        self._die(point, "before")
        if (point, self.when) == (self.kill_at, "late"):
            stand_still(self.log)
        return point

    def end(self, point: Point) -> None:
        """It is done, and nothing has followed from it yet."""
        self.note("end", point)
        self._die(point, "after")

    def note(self, word: str, point: Point) -> None:
        """A line of the log."""
        os.write(self._file, (json.dumps([word, point.label, point.n, time.time(), self.context]) + "\n").encode())

    def _die(self, point: Point, when: When) -> None:
        if (point, when) == (self.kill_at, self.when):
            os.kill(os.getpid(), signal.SIGKILL)

    def name(self, path: Any) -> str:
        """A path without what differs from run to run."""
        text = os.fspath(path)
        text = text.removeprefix(f"{self.root}/").replace(f"{self.root.parent}/", "../")
        return _SCRATCH.sub(r"\1*", _TEMPORARY.sub(r"~\1", text))

    def install(self) -> None:
        """Replace the calls; for the rest of this process's life."""
        for name in ("link", "replace", "rename"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        recorder = self

        class Popen(KEPT):  # type: ignore[type-arg]
            """A command is begun before it is started, and at its end when that is known and its answer not used."""

            def __init__(self, args: Any, *more: Any, **options: Any) -> None:
                self._point: Point | None = recorder.begin(recorder.command(args))
                super().__init__(args, *more, **options)

            def _ended(self) -> None:
                if self.returncode is not None and self._point is not None:
                    point, self._point = self._point, None
                    recorder.end(point)

            def communicate(self, *more: Any, **options: Any) -> Any:
                answer = super().communicate(*more, **options)
                self._ended()
                return answer

            def wait(self, *more: Any, **options: Any) -> Any:
                code = super().wait(*more, **options)
                self._ended()
                return code

        subprocess.Popen = Popen  # type: ignore[misc]

    def command(self, args: Any) -> str:
        """`sbatch` with its script, the others with their verbs."""
        words = [self.name(word) for word in args]
        words[0] = os.path.basename(words[0])
        if words[0] in ("squeue", "sacct"):
            return words[0]
        # Ids differ from run to run.
        return " ".join(re.sub(r"^\d+(_\d+)?$", "ID", word) for word in words[:4])

    def _counted(self, name: str, call: Any) -> Any:
        def wrapped(source: Any, target: Any, *more: Any, **options: Any) -> Any:
            point = self.begin(f"{name} {self.name(target)}")
            result = call(source, target, *more, **options)
            self.end(point)
            return result

        return wrapped


def stand_still(log: Path, seconds: float = 300) -> None:
    """Say that a process waits, and wait until it may go on."""
    log.with_suffix(".waits").touch()
    end = time.monotonic() + seconds
    while not log.with_suffix(".go").exists() and time.monotonic() < end:
        time.sleep(0.02)


@dataclass(frozen=True)
class Entry:
    """A line of the log."""

    word: Literal["begin", "end", "refused", "returned"]
    point: Point
    time: float
    context: str

    @property
    def lasting(self) -> bool:
        """Whether it is a write-once record, or a folder that appears: under its final name, in the campaign or beside it."""
        label = self.point.label
        return label.startswith(("link ", "rename ")) and not label.startswith(("link /", "rename /")) and "~" not in label and "*" not in label


def read_log(path: Path) -> list[Entry]:
    """What was recorded, in order."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Entry(word, Point(label, n), at, context) for word, label, n, at, context in map(json.loads, lines)]
