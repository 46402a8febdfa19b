"""Node names in /etc/hosts, so that programs in jobs can find each other by them; root's clusters only."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

HOSTS = Path("/etc/hosts")
MARK = "# evo-hpc test cluster "


def add_hosts(prefix: Path, addresses: Mapping[str, str]) -> None:
    """Add a line a node, marked with the prefix. Names that several clusters share get several loopback addresses, and any will do."""
    lines = "".join(f"{address} {name} {MARK}{prefix}\n" for name, address in addresses.items())
    _rewrite(lambda text: without(text, prefix) + lines)


def remove_hosts(prefix: Path) -> None:
    """Remove the lines of this cluster, and those of clusters whose folders are gone."""
    _rewrite(lambda text: without(text, prefix))


def without(text: str, prefix: Path) -> str:
    """`text` without the lines that carry the mark of `prefix`, or of a prefix that does not exist."""
    kept = []
    for line in text.splitlines(keepends=True):
        marked = re.search(f"{MARK}(.*)$", line)
        if marked is None or (marked[1] != str(prefix) and Path(marked[1]).exists()):
            kept.append(line if line.endswith("\n") else line + "\n")
    return "".join(kept)


def _rewrite(change: Callable[[str], str]) -> None:
    """In place and locked: in a container the file is a mount, which no other file can replace."""
    if os.getuid() != 0 or not os.access(HOSTS, os.W_OK):
        return
    with HOSTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read()
        after = change(before)
        if after != before:
            file.seek(0)
            file.write(after)
            file.truncate()
