"""Runs a controller that is killed (SIGKILL, by itself) at its n-th durable write: `KILL_AT=n KILL_WHEN=before|after`.

Prints how many writes there were when it got to the end alive. Lives in the tests: the package has no switch for this.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evo_hpc.store.atomic as atomic

KILL_AT, WHEN = int(os.environ["KILL_AT"]), os.environ.get("KILL_WHEN", "before")
count = 0


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        global count
        count += 1
        if count == KILL_AT and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if count == KILL_AT and WHEN == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


class CountedOs:
    """`os` as the store sees it: each call that changes a name on disk is a point to die at."""

    link, replace, rename = (staticmethod(counted(call)) for call in (os.link, os.replace, os.rename))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


if __name__ == "__main__":
    import subprocess

    import evo_hpc.store.manifest as manifest
    from evo_hpc.controller.loop import Controller
    from evo_hpc.paths import CampaignPaths

    import evo_hpc.lineage.tree as tree

    atomic.os = manifest.os = tree.os = CountedOs()  # type: ignore[assignment]
    subprocess.Popen = counted(subprocess.Popen)  # type: ignore[misc, assignment]
    Controller(CampaignPaths(Path(sys.argv[1])), lambda state, plan, events: None).run()
    print(count)
