"""`evo-hpc export`: from a campaign's tables to a tracker, as a record and as text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from evo_hpc.controller.state import CampaignState
from evo_hpc.errors import UserError
from evo_hpc.report.export import to_tensorboard, to_trackio, to_wandb
from evo_hpc.report.export.points import read_runs
from evo_hpc.report.words import shell_word, visible

Tracker = Literal["tensorboard", "wandb", "trackio"]


def tracker_named(name: str) -> Tracker:
    """Raises UserError, naming those that there are."""
    for tracker in get_args(Tracker):
        if name == tracker:
            return tracker
    raise UserError(f"{name}: no such tracker; there are: {', '.join(get_args(Tracker))}")


def export(state: CampaignState, tracker: Tracker, versions: Sequence[str], out: Path | None) -> dict[str, Any]:
    """Export the runs of these versions, or of all; what was done. Raises UserError and StoreError."""
    runs = read_runs(state, versions)
    with contextlib.redirect_stdout(sys.stderr):  # trackers print; what goes to stdout is for scripts
        if tracker == "tensorboard":
            out = out or state.paths.export(tracker)
            done = to_tensorboard.export(runs, out)
        elif tracker == "wandb":
            done = to_wandb.export(runs, out)
        else:
            done = to_trackio.export(runs, out)
    return {"tracker": tracker, "campaign": str(state.paths.root), "out": str(out) if out else None, "runs": done}


def export_text(record: dict[str, Any]) -> str:
    """The record for people."""
    lines = [f"{run['version']}: {run['written']}, {run['steps']} steps, {run['points']} points, up to step {run['last_step']}: {visible(run['where'])}"
             for run in record["runs"]]
    if record["tracker"] == "tensorboard":
        lines.append(f"Look at them with: tensorboard --logdir {shell_word(record['out'])}")
    return "\n".join(lines)
