"""Runs a controller that is killed (SIGKILL, by itself) at the first point that it passes of those at which none has died yet.

A point is what is done, of which job, and when it dies: `before` it, `after` it; of a command `before` it is started, once it is
`started`, or when it has `answered`. Those that are spent are lines of the file $SPENT, to which it adds its own before it dies; so one
controller after the other, in one campaign, dies at the next kind of point, until one passes none that is new and comes to the end.
$KILL_POINT names one point, to die at that alone; $NOT_BEFORE is for how many seconds nobody dies.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evo_hpc.store.atomic as atomic

POINT, SPENT = os.environ.get("KILL_POINT"), Path(os.environ["SPENT"])
EARLIEST = time.monotonic() + float(os.environ.get("NOT_BEFORE", "0"))
spent = set(SPENT.read_text().split("\n")) if SPENT.exists() else set()
JOB = re.compile(r"(supervise|train|evaluate)-\d+")


def here(point: str) -> None:
    """Die here, if nobody has."""
    if point not in spent and POINT in (None, point) and time.monotonic() >= EARLIEST:
        with SPENT.open("a") as file:
            file.write(point + "\n")
        os.kill(os.getpid(), signal.SIGKILL)


def kind(path: Any) -> str:
    """A name on disk without its numbers, so that start-000001.json is a start; with the kind of job that it belongs to."""
    path = Path(os.fsdecode(path))
    jobs = [found[1] for part in path.parent.parts if (found := JOB.match(part))]
    return " ".join([*jobs[:1], re.sub(r"\d+", "N", path.name)])


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that changes a name on disk, as two points."""
    def wrapped(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        here(f"{kind(target)} before")
        result = call(source, target, *args, **kwargs)
        here(f"{kind(target)} after")
        return result

    return wrapped


class CountedOs:
    """`os` as the store sees it."""

    link, replace, rename = (staticmethod(counted(call)) for call in (os.link, os.replace, os.rename))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class CountedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A command, as three points."""

    def __init__(self, args: Any, *more: Any, **keywords: Any) -> None:
        self.named = " ".join([Path(args[0]).name, *([args[1]] if args[0] in ("scontrol", "scancel") else [kind(args[-1])] if args[0] == "sbatch" else [])])
        here(f"{self.named} before")
        super().__init__(args, *more, **keywords)
        here(f"{self.named} started")

    def communicate(self, *args: Any, **keywords: Any) -> Any:
        answer = super().communicate(*args, **keywords)
        here(f"{self.named} answered")
        return answer


if __name__ == "__main__":
    import evo_hpc.lineage.tree as tree
    import evo_hpc.store.manifest as manifest
    from evo_hpc.controller.loop import Controller
    from evo_hpc.paths import CampaignPaths

    atomic.os = manifest.os = tree.os = CountedOs()  # type: ignore[assignment]
    subprocess.Popen = CountedPopen  # type: ignore[misc]
    Controller(CampaignPaths(Path(sys.argv[1])), lambda state, plan, events: None).run()
