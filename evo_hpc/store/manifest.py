"""Completion records: a folder is what its COMPLETE.json lists (names, sizes, hashes), written last."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evo_hpc.paths import COMPLETE, QUARANTINE_SUFFIX, TEMP_PREFIX
from evo_hpc.store.atomic import StoreError, fsync_folder, read_json, temp_path, write_json_once


class Torn(StoreError):
    """A folder without a completion record, or whose files are not what the record says."""


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def describe(folder: Path, files: Iterable[Path], hashed: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Name (relative to `folder`), size in bytes and sha256 of each file; those in `hashed` (name -> sha256) are not read again."""
    known = hashed or {}
    named = [(file.relative_to(folder).as_posix(), file) for file in sorted(files)]
    return [{"name": name, "bytes": file.stat().st_size, "sha256": known.get(name) or sha256(file)} for name, file in named]


def content(folder: Path) -> list[Path]:
    """Files below `folder` that a record should list: no record, no temporaries."""
    return [
        p for p in folder.rglob("*")
        if p.is_file() and p.name != COMPLETE and not any(part.startswith(TEMP_PREFIX) for part in p.relative_to(folder).parts)
    ]


def complete(folder: Path, meta: Mapping[str, Any] | None = None, *, hashed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write the completion record of everything now in `folder`; `meta` is the writer's own part. Last step of a write.

    `hashed`: sha256 by name of files that whoever wrote them has hashed already.
    """
    for file in content(folder):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    record = {"schema_version": 1, "files": describe(folder, content(folder), hashed), "meta": dict(meta or {})}
    write_json_once(folder / COMPLETE, record)
    return record


def read_complete(folder: Path, *, hashes: bool = False) -> dict[str, Any]:
    """The completion record of `folder`, its files checked by size (and by content with `hashes`).

    Raises Torn, naming the file, when something is missing, short or changed.
    """
    path = folder / COMPLETE
    if not path.exists():
        raise Torn(f"{folder}: no {COMPLETE}; the write never finished")
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("files"), list) or "meta" not in record:
        raise Torn(f"{path}: not a completion record")
    for entry in record["files"]:
        file = folder / entry["name"]
        if not file.is_file():
            raise Torn(f"{file}: listed in {COMPLETE} but missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise Torn(f"{file}: {size} bytes, {COMPLETE} says {entry['bytes']}; truncated or changed")
        if hashes and sha256(file) != entry["sha256"]:
            raise Torn(f"{file}: content differs from the hash in {COMPLETE}")
    return record


def link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name, or copy it where the filesystem has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def publish_folder(final: Path, files: Mapping[str, Path], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Make `final` appear at once, holding `files` (relative name -> source) and their completion record.

    Idempotent: a folder that is already there and complete is left alone and its record returned. A torn one is set
    aside first, never deleted. Raises StoreError when the filesystem refuses.
    """
    if final.exists():
        try:
            return read_complete(final)
        except Torn:
            quarantine(final)
    temp = temp_path(final)
    temp.mkdir(parents=True)
    try:
        for name, source in files.items():
            link_or_copy(source, temp / name)
        record = complete(temp, meta)
        os.rename(temp, final)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        if final.exists():  # another process with the same right was first
            return read_complete(final)
        raise StoreError(f"{final}: could not be published ({error.strerror})") from error
    fsync_folder(final.parent)
    return record


def quarantine(path: Path) -> Path:
    """Set a damaged file or folder aside under a name that no reader takes; returns the new path."""
    number = 0
    while (target := path.with_name(f"{path.name}{QUARANTINE_SUFFIX}-{number}")).exists():
        number += 1
    os.rename(path, target)
    fsync_folder(path.parent)
    return target
