"""Whether files changed, told by what stat says of them: far cheaper than to read them, and a person's edit shows as well."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """What stat said of a folder's files and folders at one time."""

    names: tuple[str, ...]
    """Relative to the folder; the empty name is the folder itself. A folder's own times show what was added to it or taken from it."""
    value: int | None
    """Of change time, size and inode of each; null where one was gone by then."""
    newest: int
    """The latest change time among them, in nanoseconds."""
    taken: int
    """When it was begun, by this host's clock, in nanoseconds."""

    def settled(self, margin_ns: int) -> bool:
        """Whether a later change must show: one in the same tick of the filesystem's clock, of the same size, would not."""
        return self.newest + margin_ns < self.taken


def take(root: str, leave_out: Callable[[str], bool]) -> Signature:
    """The signature of all below `root`, links followed, but for what `leave_out` says by its name relative to `root`.

    To be taken before the files are read: what changes in between shows the next time.
    """
    names, folders, seen = [""], [""], set()
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(f"{root}/{folder}") as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if leave_out(name):
                        continue
                    names.append(sys.intern(name))
                    if entry.is_dir() and (place := os.path.realpath(entry.path) if entry.is_symlink() else name) not in seen:
                        seen.add(place)
                        folders.append(name)
        except OSError:
            continue  # gone meanwhile: of no value
    return again(root, tuple(names))


def again(root: str, names: tuple[str, ...]) -> Signature:
    """The signature of the same names now."""
    found: list[int] = []
    newest, taken = 0, time.time_ns()
    try:
        for name in names:
            stat = os.stat(f"{root}/{name}")
            found += (stat.st_ctime_ns, stat.st_size, stat.st_ino)
            newest = max(newest, stat.st_ctime_ns)
    except OSError:
        return Signature(names, None, newest, taken)
    return Signature(names, hash(tuple(found)), newest, taken)
