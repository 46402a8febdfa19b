"""Atomic files: replaceable ones by rename, write-once ones by link; every write ends on disk or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from evo_hpc.errors import Failure, UserError
from evo_hpc.paths import TEMP_PREFIX

NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What link(2) says on a filesystem that has none; a folder that may not be written to says EACCES or EROFS."""

_HOST = socket.gethostname().split(".")[0]


class StoreError(Failure):
    """A file could not be written, or what is there is not what it should be."""


class Damaged(UserError, StoreError):
    """A record that is not what it was written as: cut short, or edited by hand."""


class AlreadyWritten(StoreError):
    """A write-once record exists already with other content."""


def fsync_folder(folder: Path) -> None:
    """Make renames and links inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot sync a folder
            raise
    finally:
        os.close(fd)


def temp_path(final: Path) -> Path:
    """A name in the same folder that no other writer can have."""
    return final.with_name(f"{TEMP_PREFIX}{final.name}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}")


def _write_temp(final: Path, data: bytes, mode: int, durable: bool) -> Path:
    temp = temp_path(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)  # the umask applies
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise _explained(error, final) from error
    return temp


def _explained(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"{path}: no space left on this filesystem (or quota reached). Free some, then run again: "
                          "nothing that was committed is lost.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreError(f"{path}: not writable ({error.strerror}). Check the folder's owner and mode.")
    return StoreError(f"{path}: {error.strerror}")


def write_bytes(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace `path` by `data` in one step; `durable=False` for heartbeats, which may be lost with the machine.

    Raises StoreError when the filesystem refuses (full, read-only); the old content is then still there.
    """
    temp = _write_temp(path, data, mode, durable)
    try:
        os.replace(temp, path)
        if durable:
            fsync_folder(path.parent)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise _explained(error, path) from error


def write_once(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Commit a record that may never change.

    Raises AlreadyWritten when another writer was first, StoreError on a filesystem without hard links. A retry that
    finds its own link (a lost NFS reply) is no conflict, nor is a record with the very same bytes.
    """
    temp = _write_temp(path, data, mode, durable=True)
    try:
        try:
            os.link(temp, path)
        except FileExistsError:
            if os.stat(temp).st_ino != os.stat(path).st_ino and path.read_bytes() != data:
                raise AlreadyWritten(f"{path}: already written, with other content; a write-once record is never "
                                     "replaced") from None
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            raise StoreError(f"{path}: this filesystem does not support hard links ({error.strerror}), by which write-once records "
                             "are committed; the campaign must lie on one that does") from error
        fsync_folder(path.parent)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        temp.unlink(missing_ok=True)


def dump_json(value: Any) -> bytes:
    """Canonical enough to read by eye and to compare by bytes; NaN is refused."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """write_bytes of JSON."""
    write_bytes(path, dump_json(value), durable=durable)


def write_json_once(path: Path, value: Any) -> None:
    """write_once of JSON."""
    write_once(path, dump_json(value))


def read_json(path: Path) -> Any:
    """The JSON in `path`; StoreError names the file and line when it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise Damaged(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Damaged(f"{path}:{error.lineno}: not valid JSON ({error.msg}); the file was cut short or edited: restore it from a backup, or remove it if "
                      "it can be made again") from error


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line to a journal for people; a torn last line of an earlier crash is closed first."""
    line = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell() and _last_byte(file) != b"\n":
                line = b"\n" + line
            file.write(line)
    except OSError as error:
        raise _explained(error, path) from error


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def sweep_temps(folder: Path, *, older_than_seconds: float = 3600.0) -> list[Path]:
    """Remove this package's leftover temporaries (files and folders) below `folder` that no live write can own; returns them."""
    swept = []
    now = time.time()
    for path in sorted(folder.rglob(f"{TEMP_PREFIX}*")):
        try:
            own = f".{_HOST}." in path.name and not _alive(path)
            if own or now - path.stat().st_mtime > older_than_seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                swept.append(path)
        except FileNotFoundError:
            continue
    return swept


def _alive(temp: Path) -> bool:
    pid = temp.name.split(".")[-2]
    return pid.isdigit() and Path("/proc", pid).exists()
