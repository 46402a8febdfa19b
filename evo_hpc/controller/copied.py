"""What a version's folder holds that belongs to another version: what `cp -r v0001 v0005` brings along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evo_hpc.config.yaml_io import ConfigError, load_tree
from evo_hpc.paths import COMPLETE, VersionPaths
from evo_hpc.store.atomic import StoreError, read_json


def results_of_others(version: VersionPaths) -> list[Path]:
    """The folders and files below a version that name another one as theirs; what cannot be read is left to its own reader."""
    return sorted({top for top, owner in _owners(version) if owner is not None and owner != version.id})


def _owners(version: VersionPaths) -> Iterator[tuple[Path, Any]]:
    """Top-level entry of the folder, and whose it says it is."""
    for job in version.jobs():
        yield job.root.parent, _field(job.intent, "owner")
    published = [version.train, *(p for _, p in version.watches()), *(p for _, p in version.analyses())]
    evaluations = version.evaluation("dev").parent
    published += [p for p in evaluations.iterdir() if p.is_dir()] if evaluations.is_dir() else []
    for folder in published:
        yield version.root / folder.relative_to(version.root).parts[0], _field(folder / COMPLETE, "meta", "version")
    for comparison in version.comparisons():
        yield comparison.parent, _field(comparison, "version")
    if version.decision_yaml.exists():
        try:
            yield version.decision_yaml, load_tree(version.decision_yaml).get("version")
        except ConfigError:
            pass


def _field(path: Path, *keys: str) -> Any:
    try:
        found = read_json(path) if path.exists() else None
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
    except StoreError:
        return None
    return found
