"""Trackers are not dependencies of this package: who wants one installs it."""

from __future__ import annotations

import importlib
from typing import Any

from evo_hpc.errors import UserError


def require(name: str) -> Any:
    """The tracker's module. Raises UserError, saying what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise UserError(f"{name} is installed, but lacks {error.name}: pip install {error.name}") from error
        raise UserError(f"{name} is not installed in this Python: pip install {name} (or export to tensorboard, which needs no package)") from error
