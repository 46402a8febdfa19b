"""Reads what squeue and sacct print: each line is a record or a problem, and no text whatever raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.slurm.states import LIVES, life

QUEUE_FORMAT = "%F|%K|%j|%T|%r|%V|%S|%e|%N|%D|%i"
"""Base id, array index, name, state, reason, submit, start, end, nodes, node count, shown id (man squeue)."""
ACCOUNTING_FORMAT = "JobIDRaw,JobID,JobName,State,ExitCode,Submit,Start,End,ElapsedRaw,AllocTRES,NodeList"
MOST_TASKS = 100_000
"""Tasks of one line of accounting that stands for many; Slurm's own limit of an array's size is of this order."""

_WORD = re.compile(r"[A-Z][A-Z_]*\Z")
_ACCOUNTING_LINE = re.compile(
    # JobIDRaw; JobID: 12, 12_3, or 12_[3-5] for tasks that wait; the name; the state, `CANCELLED by 1000`; exit code; times.
    r"[0-9]{1,12}\|([0-9]{1,12})(?:_(?:([0-9]{1,9})|\[([0-9,:%-]+)\]))?\|(.*)\|([A-Z][A-Z_]*)(?: [^|]*)?\|([0-9]{1,9}):([0-9]{1,9})"
    r"\|([0-9]{1,12})\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\Z",
    re.DOTALL,
)
_RANGE = re.compile(r"^([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?$")
_AMOUNT = re.compile(r"^([0-9]{1,18}(?:\.[0-9]{1,9})?)([KMGTP]?)$")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


class Listing(list[SlurmJob]):
    """The jobs of one answer."""

    def __init__(self, jobs: Iterable[SlurmJob] = (), problems: Sequence[str] = ()) -> None:
        super().__init__(jobs)
        self.problems: tuple[str, ...] = tuple(problems)
        """The lines that could not be read."""


def parse_queue(text: str) -> Listing:
    """What squeue printed in QUEUE_FORMAT, times in Unix seconds."""
    return _parse(text, _queue_line)


def parse_accounting(text: str) -> Listing:
    """What sacct printed in ACCOUNTING_FORMAT; every run of a requeued job is a record. Pending tasks that share a line are told apart."""
    return _parse(text, _accounting_line)


def _parse(text: str, read: Callable[[str], list[SlurmJob]]) -> Listing:
    jobs: list[SlurmJob] = []
    problems: list[str] = []
    for line in text.split("\n"):  # not splitlines(): it also divides at characters that a name may hold
        if line:
            try:
                jobs += read(line)
            except ValueError:
                problems.append(line)
    return Listing(jobs, problems)


def _queue_line(line: str) -> list[SlurmJob]:
    job_id, index, rest = line.split("|", 2)
    middle, submitted, started, ended, nodes, _, _ = rest.rsplit("|", 6)
    name, state, reason = _name_state_reason(middle)
    if not (_digits(job_id) and _digits(submitted) and (index == "N/A" or _digits(index))):
        raise ValueError("fields")
    how = life(state)
    return [SlurmJob(
        name, job_id, None if index == "N/A" else int(index), state, float(submitted), "" if reason == "None" else reason,
        # Of a waiting job the expected start is shown, and of a running one the end of its time limit.
        started=_time(started) if how != "queued" else None, ended=_time(ended) if how == "terminal" else None, nodes=nodes,
    )]


def _name_state_reason(middle: str) -> tuple[str, str, str]:
    """Names and reasons may hold the separator; the state is the one field between that is a state."""
    fields = middle.split("|")
    if len(fields) == 3:
        at = 1
    else:
        known = [n for n in range(1, len(fields) - 1) if fields[n] in LIVES]
        if len(known) != 1:
            raise ValueError("fields")
        at = known[0]
    if not _WORD.match(fields[at]):
        raise ValueError("state")
    return "|".join(fields[:at]), fields[at], "|".join(fields[at + 1 :])


def _accounting_line(line: str) -> list[SlurmJob]:
    found = _ACCOUNTING_LINE.match(line)
    if found is None:
        raise ValueError("fields")
    base, index, block, name, state, code, killed, submitted, started, ended, elapsed, tres, nodes = found.groups()
    ended_at = _time(ended)
    over = ended_at is not None
    signal = int(killed)
    indexes: Iterable[int | None] = (None if index is None else int(index),) if block is None else _block(block)
    return [
        SlurmJob(
            name, base, each, state, float(submitted), "", _time(started), ended_at, int(code) if over else None, signal if over and signal else None,
            float(elapsed) if _digits(elapsed) else 0.0, parse_tres(tres), "" if nodes == "None assigned" else nodes, "sacct",
        )
        for each in indexes
    ]


def _block(text: str) -> list[int]:
    """`2-5,8,10-20:5%3`: indexes of tasks that share a line while they wait."""
    indexes: list[int] = []
    for part in text.partition("%")[0].split(","):
        found = _RANGE.match(part)
        if found is None:
            raise ValueError("range")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if step == 0 or (last - first) // step >= MOST_TASKS - len(indexes):
            raise ValueError("range")
        indexes += range(first, last + 1, step)
    return indexes


@lru_cache(maxsize=1024)
def parse_tres(text: str) -> dict[str, float]:
    """`cpu=4,mem=1.50G,gres/gpu=2` as numbers, memory in bytes; what is no number is left out (some energies are placeholders).

    The same dict for the same text: not to be changed.
    """
    found = {}
    for word in text.split(","):
        key, _, value = word.partition("=")
        if (amount := _AMOUNT.match(value)) is not None:
            found[key] = float(amount[1]) * _UNITS[amount[2] or ("M" if key == "mem" else "")]
    return found


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def _time(text: str) -> float | None:
    if _digits(text):
        return float(text)
    if text in ("N/A", "Unknown", "None", "NONE", "Invalid"):
        return None
    raise ValueError("time")
