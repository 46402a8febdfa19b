"""Reading and removing checkpoints as wholes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from evo_hpc.paths import CHECKPOINT_EXTRA, step_of
from evo_hpc.store.atomic import StoreError, read_json, temp_path
from evo_hpc.training.checkpoint import remove_partial


def read_extra(folder: Path) -> dict[str, Any]:
    """The caller's own state of a checkpoint, without loading the rest."""
    return read_json(folder / CHECKPOINT_EXTRA)


def checkpoints(parent: Path) -> list[Path]:
    """Checkpoint folders below `parent`, whole or not; nothing else that lies there."""
    return [path for path in parent.iterdir() if step_of(path) is not None] if parent.is_dir() else []


def prune(parents: list[Path], keep: int, run: str) -> None:
    """Keep the `keep` newest checkpoints of a run over all its incarnations, and no leftovers of interrupted saves.

    Those of other runs of the version, and what cannot be read, are left alone: they say nothing of how far this run is. Called by the
    one holder of the claim right after a save that it knows to be whole.
    """
    found = [path for parent in parents for path in checkpoints(parent) if _run_of(path) == run]
    for old in sorted(found, key=lambda path: (step_of(path) or 0, path.stat().st_mtime))[:-keep]:
        remove(old)
    for parent in parents:
        remove_partial(parent)


def _run_of(folder: Path) -> str | None:
    try:
        return read_extra(folder).get("run")
    except StoreError:
        return None


def remove(folder: Path) -> None:
    """Delete a checkpoint. Renamed first, so that a kill in the middle leaves no torn checkpoint under its name."""
    going = temp_path(folder)
    os.rename(folder, going)
    shutil.rmtree(going)
