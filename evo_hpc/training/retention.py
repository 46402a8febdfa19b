"""Reading and removing checkpoints as wholes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from evo_hpc.store.atomic import read_json, temp_path
from evo_hpc.training.checkpoint import EXTRA


def read_extra(folder: Path) -> dict[str, Any]:
    """The caller's own state of a checkpoint, without loading the rest."""
    return read_json(folder / EXTRA)


def remove(folder: Path) -> None:
    """Delete a checkpoint. Renamed first, so that a kill in the middle leaves no torn checkpoint under its name."""
    going = temp_path(folder)
    os.rename(folder, going)
    shutil.rmtree(going)
