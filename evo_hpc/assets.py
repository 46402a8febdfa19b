"""Finds the data that ships with the package: templates, built-in analyzers, ready campaigns, seed memory."""

from __future__ import annotations

from pathlib import Path

from evo_hpc.errors import UserError

ASSETS = ("templates", "analyzers", "campaigns", "memory")
_PACKAGE = Path(__file__).resolve().parent


class AssetError(UserError):
    """A folder of shipped data is unknown or not there."""


def asset_dir(name: str) -> Path:
    """Folder of one kind of shipped data: the checkout's own in an editable install, the copy in an installed wheel.

    Raises AssetError for a name outside ASSETS, and where the folder is absent.
    """
    if name not in ASSETS:
        raise AssetError(f"no shipped data is called {name!r}; there are: {', '.join(ASSETS)}")
    linked = _PACKAGE / "_assets" / name
    # A checkout made where symbolic links are not possible holds text files in their place.
    beside = _PACKAGE.parent / name
    if linked.is_dir():
        return linked.resolve()
    if (_PACKAGE.parent / "setup.cfg").is_file() and beside.is_dir():
        return beside
    raise AssetError(f"{linked}: the shipped folder {name!r} is missing; install again from a complete checkout")
