"""Slurm's own notations, read: times, generic resources, TRES, lists of nodes, constraints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

_UNITS_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_TIME = re.compile(r"^(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})$")
_GRES = re.compile(r"^(?P<name>[^:()=]+)(?:[:=](?!\d+[KMGTP]?$)(?P<kind>[^:()=]+))?(?:[:=](?P<count>\d+)(?P<unit>[KMGTP]?))?$")
_PARENTHESES = re.compile(r"\([^()]*\)")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")
_FEATURE = re.compile(r"[^\s&|,()\[\]*]+")
MOST_NODES = 100_000
"""A list of nodes that names more is cut off there."""


@dataclass(frozen=True)
class Gres:
    """Generic resources of one type on a node, there or asked for."""

    name: str
    kind: str | None
    count: int

    def __str__(self) -> str:
        return ":".join(filter(None, [self.name, self.kind, str(self.count)]))


def parse_seconds(text: str) -> float:
    """`90`, `00:01:30`, `1-00:00:00` (man slurm.conf: GraceTime) in seconds; what is no time is 0."""
    found = _TIME.match(text.strip())
    if not found:
        return 0.0
    clock = [int(part) for part in found["clock"].split(":")]
    if found["days"] is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = (*clock, 0, 0)[:3]
        return int(found["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    return float(sum(part * 60**power for power, part in enumerate(reversed(clock))))


def parse_minutes(text: str) -> float | None:
    """A limit as scontrol and sacctmgr print it (`1-00:00:00`, `30:00`, `10`: minutes); null for UNLIMITED, NONE and the like."""
    text = text.strip()
    if not _TIME.match(text):
        return None
    return float(text) if text.isdigit() else parse_seconds(text) / 60


def parse_mib(text: str) -> float:
    """`64G`, `4000`, `4000M` in MiB; Slurm's unit without a letter is M."""
    found = re.match(r"^(\d+(?:\.\d+)?)([KMGTP]?)$", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not an amount of memory")
    return float(found[1]) * _UNITS_MIB[found[2] or "M"]


def parse_tres(text: str) -> dict[str, float]:
    """`cpu=32,mem=16000M,gres/gpu=8`: numbers by name, memory in MiB; what is no number is left out."""
    found = {}
    for word in split_list(text):
        name, _, value = word.rpartition("=")
        try:
            found[name] = parse_mib(value) if name == "mem" else float(value)
        except ValueError:
            continue
    return found


def parse_gres(text: str) -> tuple[Gres, ...]:
    """`gpu:h100:8(S:0-1),nvme:1` as sinfo shows it and as --gres takes it; a name alone counts one."""
    found = []
    for word in split_list(_PARENTHESES.sub("", text)):
        match = _GRES.match(word.removeprefix("gres/").removeprefix("gres:"))
        if match is None:
            raise ValueError(f"{word!r} is not a generic resource: write gpu:4 or gpu:h100:4")
        scale = 1024 ** ("KMGTP".index(match["unit"]) + 1) if match["unit"] else 1
        found.append(Gres(match["name"], match["kind"], int(match["count"] or 1) * scale))
    return tuple(found)


def split_list(text: str) -> tuple[str, ...]:
    """`a,b`; empty for `(null)`, N/A and nothing."""
    if text.strip() in ("(null)", "N/A"):
        return ()
    return tuple(word.strip() for word in text.split(",") if word.strip())


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names that a list of nodes stands for: `n[1-3,05],login` (man scontrol: show hostnames)."""
    words = [] if text.strip() == "(null)" else [word.strip() for word in _OUTER_COMMA.split(text) if word.strip()]
    return tuple(islice((name for word in words for name in _expanded(word)), MOST_NODES))


def _expanded(word: str) -> Iterator[str]:
    found = _BRACKETS.search(word)
    if not found:
        yield word
        return
    before, after = word[: found.start()], list(islice(_expanded(word[found.end() :]), MOST_NODES))
    for part in found[1].split(","):
        low, dash, high = part.partition("-")
        is_range = bool(dash and low.isdecimal() and high.isdecimal())
        numbers = (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)) if is_range else iter([part])
        for number in numbers:
            yield from (f"{before}{number}{rest}" for rest in after)


def features_of(constraint: str) -> tuple[str, ...]:
    """Every feature that a constraint names, counts (`rack1*2`) left out."""
    return tuple(_FEATURE.findall(re.sub(r"\*\d+", "", constraint)))


def satisfies(constraint: str) -> Callable[[frozenset[str]], bool]:
    """Whether a node with these features can be one of a job's (man sbatch: --constraint).

    `a&b` and `a,b` need both, `a|b` one of them. Where a constraint speaks of several nodes at once (`[rack1|rack2]`, `a*2&b*1`,
    parentheses) a node that has any of the features will do: what the set of them must be is left to Slurm.
    """
    names = features_of(constraint)
    if re.search(r"[\[(*]", constraint):
        return lambda features: any(name in features for name in names)
    alternatives = [frozenset(features_of(each)) for each in constraint.split("|")]
    return lambda features: any(each <= features for each in alternatives)
