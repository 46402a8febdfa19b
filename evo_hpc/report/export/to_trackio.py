"""Training runs in Trackio: one run a version, in its local database, replaced as a whole at each export.

Read against trackio 0.43: a run is found again by its name, and its points are appended to whatever is there; steps that it has
already are not noticed. So a run of the same name is deleted first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evo_hpc.errors import UserError
from evo_hpc.report.export.optional import require
from evo_hpc.report.export.points import RunPoints

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_FOLDER = "TRACKIO_DIR"


def export(runs: Sequence[RunPoints], out: Path | None) -> list[dict[str, Any]]:
    """Write the runs to Trackio's database in `out`, or where it usually is.

    Raises UserError where trackio is not installed, would log to a server, or refuses a name.
    """
    if set_now := [name for name in _ELSEWHERE if os.environ.get(name)]:
        raise UserError(f"{set_now[0]} is set: an export replaces what is in a local database, and cannot on a server. Unset it, export, then "
                        "`trackio sync` the project")
    if out is not None:
        os.environ[_FOLDER] = str(out)  # read when trackio is imported
    trackio = require("trackio")
    try:
        return [_export(trackio, run) for run in runs]
    except ValueError as error:  # a project name that it reserves
        raise UserError(f"trackio: {error}") from error


def _export(trackio: Any, run: RunPoints) -> dict[str, Any]:
    name = f"{run.version}-{run.id}"
    before = [each for each in _runs(trackio, run.campaign) if each.name == name]
    for each in before:
        each.delete()
    tracked = trackio.init(
        project=run.campaign, name=name, group=run.version, resume="never", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        config={"campaign": run.campaign, "version": run.version},
    )
    for step in run.steps:
        tracked.log(step.values, step=step.step)
    trackio.finish()
    return {
        "version": run.version, "steps": len(run.steps), "points": run.count(), "last_step": run.last_step, "where": f"{run.campaign}/{name}",
        "written": "replaced" if before else "new",
    }


def _runs(trackio: Any, project: str) -> list[Any]:
    try:
        return list(trackio.Api().runs(project))
    except ValueError:  # how it says that there is no such project yet
        return []
