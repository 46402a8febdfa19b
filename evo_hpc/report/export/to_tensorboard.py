"""Training runs as TensorBoard event files: one folder and one file a version, whose bytes follow from the metric tables alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evo_hpc.paths import event_file
from evo_hpc.report.export.event_file import scalar_event, version_event
from evo_hpc.report.export.points import RunPoints
from evo_hpc.store.atomic import StoreError, write_bytes


def export(runs: Sequence[RunPoints], out: Path) -> list[dict[str, Any]]:
    """Write or bring up to date the event file of each run below `out`; what was done, run by run. Raises StoreError."""
    return [_export(run, event_file(out, run.version)) for run in runs]


def _export(run: RunPoints, path: Path) -> dict[str, Any]:
    data = version_event(run.steps[0].time) + b"".join(scalar_event(s.time, s.step, s.values) for s in run.steps if s.values)
    return {"version": run.version, "steps": len(run.steps), "points": run.count(), "last_step": run.last_step, "where": str(path), "written": _bring(path, data)}


def _bring(path: Path, data: bytes) -> str:
    """Have the file hold `data`: `unchanged`, `extended` or `new`.

    A file that holds the beginning of it gets the rest, since a TensorBoard that is running goes on reading the file that it has
    open; also after a kill within a write. Bytes go to their place rather than to the end, so two exports at once do no harm.
    Where the file is `new` in place of another, a TensorBoard that is running has to be started again.
    """
    before = path.read_bytes() if path.exists() else None
    if before == data:
        return "unchanged"
    if before is None or not data.startswith(before):  # another run, or a resumed one that did some steps again
        write_bytes(path, data)
        return "new"
    try:
        descriptor = os.open(path, os.O_WRONLY)
        try:
            at = len(before)
            while at < len(data):
                at += os.pwrite(descriptor, data[at:], at)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"{path}: cannot be extended ({error.strerror}); remove it and export again") from error
    return "extended"
