"""Training runs in Weights & Biases: one run a version, under an id of its own, resumed at each export.

Read against wandb 0.31: `init(id=…, resume="allow")` continues a run that is there, whose `starting_step` is one more than the
last step it has; steps before that are dropped by the server, so they are not sent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evo_hpc.errors import UserError
from evo_hpc.report.export.optional import require
from evo_hpc.report.export.points import RunPoints


def export(runs: Sequence[RunPoints], out: Path | None) -> list[dict[str, Any]]:
    """Send what W&B does not have yet; wandb keeps its local files in `out`, or where it usually does.

    Raises UserError where wandb is not installed, not online, or refuses.
    """
    wandb = require("wandb")
    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        raise UserError(f"WANDB_MODE={mode}: only wandb's server knows which steps it has, so an export that is not online could double points. "
                        "Unset WANDB_MODE where there is a network, or export to tensorboard")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary folder where there is none
    try:
        return [_export(wandb, run, out) for run in runs]
    except wandb.Error as error:
        raise UserError(f"wandb: {error}") from error


def _export(wandb: Any, run: RunPoints, out: Path | None) -> dict[str, Any]:
    tracked = wandb.init(
        project=run.campaign, id=run.id, name=run.version, group=run.campaign, resume="allow", mode="online", reinit="create_new",
        config={"campaign": run.campaign, "version": run.version}, dir=str(out) if out is not None else None,
    )
    try:
        new = [step for step in run.steps if step.step >= tracked.starting_step]
        for step in new:
            tracked.log(step.values, step=step.step)
    except BaseException:
        tracked.finish(exit_code=1)
        raise
    tracked.finish()
    return {
        "version": run.version, "steps": len(new), "points": sum(len(step.values) for step in new), "last_step": run.last_step,
        "where": f"{run.campaign}/{run.id}", "written": "extended" if tracked.starting_step else "new" if new else "unchanged",
    }
