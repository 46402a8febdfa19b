"""What /proc says about processes, and how to signal the very process that was looked at; a zombie counts as gone, since PID 1 may reap late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A live process as it was seen. `started` tells it from a later one of the same pid; `uts` is None where it cannot be read."""

    pid: int
    parent: int
    started: str
    executable: str = ""
    uts: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Collection[str] = ()


def pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def look(pid: int) -> Process | None:
    """The process, with the open files of step daemons only; None when it is gone or a zombie."""
    fields = _stat(pid)
    if not fields or fields[0] in "ZX":
        return None
    name = executable(pid)
    return Process(pid, int(fields[1]), fields[19], name, uts_namespace(pid), environment(pid),
                   open_files(pid) if name.startswith("slurmstepd") else ())


def snapshot() -> dict[int, Process]:
    """All live processes by pid."""
    return {pid: process for pid in pids() if (process := look(pid)) is not None}


def executable(pid: int) -> str:
    """Name of the program's file, or "" for a process that is gone, a zombie, or not ours to see."""
    try:
        return os.path.basename(os.readlink(PROC / str(pid) / "exe")).removesuffix(" (deleted)")
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    """The environment that the program was started with; empty when gone, not ours, or overwritten by its title."""
    try:
        pairs = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def open_files(pid: int) -> list[str]:
    """Targets of its file descriptors."""
    try:
        return [os.readlink(entry) for entry in (PROC / str(pid) / "fd").iterdir()]
    except OSError:
        return []


def uts_namespace(pid: int) -> str | None:
    """Identity of the namespace, or None: a process that is gone and one that may not be seen (PID 1, often) must never look alike."""
    try:
        return os.readlink(PROC / str(pid) / "ns/uts") or None
    except OSError:
        return None


def is_gone(pid: int) -> bool:
    """Whether it has ended, reaped or not."""
    fields = _stat(pid)
    return not fields or fields[0] in "ZX"


def ancestors(table: Mapping[int, Process], pid: int) -> set[int]:
    """The process itself and all that it descends from, with PID 1 and the kernel's."""
    found = {0, 1, 2}
    while pid not in found:
        found.add(pid)
        pid = table[pid].parent if pid in table else 0
    return found


def send(pid: int, number: signal.Signals, still: Callable[[], bool]) -> bool:
    """Signal the process if `still` says, once its pid can no longer pass to another, that it is the one that is meant."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False  # it has ended
    try:
        if not still():
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def send_to(process: Process, number: signal.Signals) -> bool:
    """Signal this very process, not one that got its pid since."""
    def still() -> bool:
        now = look(process.pid)
        return now is not None and now.started == process.started

    return send(process.pid, number, still)


def wait_until(holds: Callable[[], bool], seconds: float, *, pause: float = 0.05) -> bool:
    """Whether `holds` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _stat(pid: int) -> list[str]:
    """State, parent, … start time (the 20th): the fields after the name, which may itself hold spaces and brackets."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
