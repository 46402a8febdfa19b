"""`evo-hpc analyze`: the analyzers as they lie on disk now, on versions that are over; for looking, nothing is kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from evo_hpc.controller.state import CampaignState
from evo_hpc.errors import UserError
from evo_hpc.harness.analysis import version_inputs
from evo_hpc.harness.runner import analyse


def analyse_now(state: CampaignState, version: str | None) -> dict[str, Any]:
    """Findings and measures by version, for --json and the terminal. Raises UserError when a version has nothing to look at yet."""
    chosen = [v for v in state.versions.values() if v.over] if version is None else [state.named(version)]
    if version is not None and not chosen[0].over:
        raise UserError(f"{chosen[0].id}: not trained and evaluated yet; `evo-hpc status` shows how far it is")
    if not chosen:
        raise UserError(f"{state.paths.root}: no version is trained and evaluated yet; `evo-hpc run` brings it forward")
    told = []
    for each in chosen:
        with tempfile.TemporaryDirectory() as folder:
            reports = analyse(state.found.analyzers, version_inputs(each.node.paths), Path(folder), version=each.id, up_to_step=None)
        told.append({
            "version": each.id, "findings": [f.model_dump(mode="json") for r in reports for f in r.findings],
            "measures": {f"{r.analyzer}.{name}": m.model_dump(mode="json") for r in reports for name, m in r.measures.items()},
        })
    return {"campaign": str(state.paths.root), "analyzers": [each.name for each in state.found.analyzers], "versions": told}
