"""Shipped data is found, and a missing or unknown folder is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc import assets
from evo_hpc.assets import ASSETS, AssetError, asset_dir


@pytest.mark.parametrize("name", ASSETS)
def test_a_checkout_gives_its_own_folders(name: str, repository: Path) -> None:
    assert asset_dir(name) == repository / name


@pytest.mark.parametrize("name", ["", "..", "evo_hpc", "templates/sbatch"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(AssetError, match="there are: templates"):
        asset_dir(name)


def test_without_symbolic_links_a_checkout_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "evo_hpc")
    (tmp_path / "templates").mkdir()
    with pytest.raises(AssetError, match="install again"):
        asset_dir("templates")
    (tmp_path / "setup.cfg").touch()
    assert asset_dir("templates") == tmp_path / "templates"
