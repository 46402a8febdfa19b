"""Identity of a process that survives pid reuse, reboots and hosts of one name: host, machine, boot, pid, start time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ProcessIdentity(BaseModel):
    """One process on one host during one boot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    machine: str = ""
    """Content of /etc/machine-id; empty where the machine has none."""
    boot: str
    pid: int
    start_ticks: int
    """Clock ticks after boot at which it started (field 22 of /proc/PID/stat)."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """A live process of this host. Raises ProcessLookupError when there is none."""
        return cls(host=socket.gethostname(), machine=_machine(), boot=_boot(), pid=pid, start_ticks=_start_ticks(pid))

    def here(self) -> bool:
        """Whether it is a process of this machine, about which this machine can tell.

        Cloned nodes and containers may share a hostname: the machine id must agree too, and where there is none only
        the same boot proves the same machine.
        """
        if self.host != socket.gethostname() or self.machine != _machine():
            return False
        return bool(self.machine) or self.boot == _boot()

    def alive(self) -> bool:
        """Whether it still runs (zombies do not). Only meaningful when `here()`."""
        if self.boot != _boot():
            return False
        try:
            return _start_ticks(self.pid) == self.start_ticks
        except ProcessLookupError:
            return False


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _machine() -> str:
    try:
        text = Path("/etc/machine-id").read_text().strip()
    except FileNotFoundError:
        return ""
    return "" if text == "uninitialized" else text  # what systemd writes before the first boot of an image


def _start_ticks(pid: int) -> int:
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(pid) from error
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise ProcessLookupError(pid)
    return int(fields[19])


def find_by_argument(*arguments: str) -> list[int]:
    """Pids of this user's live processes whose command line holds all `arguments` as whole words."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            _start_ticks(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if all(a.encode() in words for a in arguments):
            found.append(int(entry.name))
    return found
