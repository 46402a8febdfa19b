"""Puts a ready campaign into a workspace; what a person has edited there is never overwritten."""

from __future__ import annotations

from pathlib import Path

from evo_hpc.assets import asset_dir
from evo_hpc.paths import Workspace
from evo_hpc.store.atomic import write_bytes


def copy_campaign(name: str, workspace: Path) -> Path:
    """Copy the files of a ready campaign that the workspace lacks; returns the campaign's folder. Idempotent."""
    source, target = asset_dir("campaigns") / name, Workspace(workspace).campaigns / name
    for file in sorted(p for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        copy = target / file.relative_to(source)
        if not copy.exists():
            write_bytes(copy, file.read_bytes())
    return target
