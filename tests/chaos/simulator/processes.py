"""The processes of a job: who they are, and signals to them."""

from __future__ import annotations

import os
import _signal as signal  # without its enums
import time


def born(pid: int) -> int | None:
    """Start time of a living process in clock ticks; None when it is dead, or waits to be reaped."""
    found = _stat(pid)
    return None if found is None or found[0] == "Z" else found[3]


def alive(pid: int | None, since: int | None) -> bool:
    """Whether the process of this number is still that one."""
    return pid is not None and born(pid) == since


def members(step: int | None, since: int | None, marker: str) -> list[int]:
    """All processes of a job's start but the step daemon: its session, its descendants, and whoever has its mark in the environment."""
    if step is not None and (found := _stat(step)) is not None and found[3] != since:
        step = None  # dead, all its session too, and the number given to somebody else
    every = {int(name): found for name in os.listdir("/proc") if name.isdigit() and (found := _stat(int(name)))}
    mark = f"SIM_JOB={marker}".encode()
    ours = set()
    for pid, (state, _, session, _) in every.items():
        if state == "Z" or pid == step or pid == os.getpid():
            continue
        if step and (session == step or _descends(pid, step, every)):
            ours.add(pid)
        else:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        ours.add(pid)
            except OSError:
                continue
    return sorted(ours)


def _descends(pid: int, ancestor: int, every: dict[int, tuple[str, int, int, int]]) -> bool:
    for _ in range(64):
        if pid not in every:
            return False
        pid = every[pid][1]
        if pid == ancestor:
            return True
    return False


def kill_step(step: int | None, since: int | None, marker: str) -> None:
    """SIGKILL to the step daemon and to all that it started."""
    if step is not None and alive(step, since):
        send([step], signal.SIGKILL)
    sweep(step, since, marker)


def send(pids: list[int], number: int) -> None:
    """A signal to each that still lives."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def sweep(step: int | None, since: int | None, marker: str, seconds: float = 2.0) -> None:
    """SIGKILL until nobody is left."""
    end = time.monotonic() + seconds
    while (left := members(step, since, marker)) and time.monotonic() < end:
        send(left, signal.SIGKILL)
        time.sleep(0.005)


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    """State, parent, session, start time."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return words[0].decode(), int(words[1]), int(words[3]), int(words[19])
