"""The test of a shared filesystem between nodes: processes race to link the same names, and time how soon they see each other's files."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from evo_hpc.store.checks import CheckResult, Level
from evo_hpc.store.mount import LARGEST_SKEW_SECONDS, SKEW_SECONDS

NAMES = 200
ROUND_TRIPS = 5
PATIENCE_SECONDS = 90.0
"""NFS may hide a new file for its acdirmax, a minute by default."""
SLOT_SECONDS = 0.005
"""Each name's turn comes so long after the one before, so that clocks that agree bring all peers to it at once."""
HEAD_START_SECONDS = 2.0
SLOW_SECONDS = 5.0
VISIBLE = "nodes: visible"
"""Name of the finding that tells whether other nodes see the folder."""


@dataclass(frozen=True)
class PeerReport:
    """What one process saw."""

    peer: int
    node: str
    wins: list[int] = field(default_factory=list)
    """Numbers of the names that its link got."""
    round_trips: list[float] = field(default_factory=list)
    """Seconds from a file of its own until it sees the files that the others make on seeing it."""
    clock_skew: float | None = None
    """Seconds that the filesystem's clock is ahead of the node's."""
    error: str | None = None


def take_part(
    folder: Path, peer: int, peers: int, *, names: int = NAMES, patience: float = PATIENCE_SECONDS, head_start: float = HEAD_START_SECONDS
) -> PeerReport:
    """Race and exchange files with the other peers in `folder`, which must exist; what goes wrong is in the report."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        _meet(folder, peer, peers, patience, head_start)
        skew = (folder / f"ready-{peer}").stat().st_mtime - float((folder / f"ready-{peer}").read_text())
        wins = _race(folder, peer, names)
        return PeerReport(peer, node, wins, _exchange(folder, peer, peers, patience), skew)
    except FileNotFoundError as error:
        return PeerReport(peer, node, error=f"{error.filename}: not there")
    except OSError as error:
        return PeerReport(peer, node, error=f"{error.filename or folder}: {error.strerror or error}")


def judge(reports: Sequence[PeerReport], peers: int, *, names: int = NAMES) -> list[CheckResult]:
    """Findings from all reports of one run."""
    if broken := [each for each in reports if each.error]:
        return [CheckResult(
            VISIBLE, "error",
            f"on node {each.node}: {each.error}",
            "put the campaign on a filesystem that all nodes share, under the same path, and see that no node hides it",
        )
                for each in broken]
    if len(reports) < peers:
        return [CheckResult(
            VISIBLE, "error",
            f"{peers} nodes were started, {len(reports)} reported",
            "see what srun said; a node that hangs on the filesystem reports nothing",
        )]
    where = ", ".join(sorted({each.node for each in reports}))
    winners = [sum(each.wins.count(name) for each in reports) for name in range(names)]
    found = []
    if wrong := [count for count in winners if count != 1]:
        found.append(_result(
            "race", "error",
            f"{len(wrong)} of {names} names that {where} raced to link were won by {min(wrong)} to {max(wrong)} of them instead of one: records "
            "could be committed twice",
            "do not run campaigns there",
        ))
    else:
        shares = "/".join(str(len(each.wins)) for each in sorted(reports, key=lambda each: each.peer))
        found.append(_result("race", "ok", f"each of {names} names that {where} raced to link was won by one ({shares})"))
    slowest = max((seconds for each in reports for seconds in each.round_trips), default=0.0)
    slow = slowest > SLOW_SECONDS
    found.append(CheckResult(
        VISIBLE, "warning" if slow else "ok",
        f"what one node writes is seen and answered by another within {slowest:.3f} s at most",
        "trainer and workers on several nodes wait that long at every step; mount with less caching (actimeo=1, lookupcache=none)" if slow else None,
    ))
    return [*found, _clocks(reports)]


def _clocks(reports: Sequence[PeerReport]) -> CheckResult:
    skews = {each.node: each.clock_skew for each in reports if each.clock_skew is not None}
    apart = max(skews.values()) - min(skews.values())
    if apart <= SKEW_SECONDS:
        return _result("clocks", "ok", f"of the nodes agree within {max(apart, 0.01):.2f} s")
    level: Level = "error" if apart > LARGEST_SKEW_SECONDS else "warning"
    return _result("clocks", level, f"of {' and '.join(sorted(skews))} are {apart:.0f} s apart", "have them set by NTP")


def _meet(folder: Path, peer: int, peers: int, patience: float, head_start: float) -> None:
    """Wait until all are there and know when to begin."""
    _write(folder / f"ready-{peer}", str(time.time()))
    _wait(folder, [f"ready-{each}" for each in range(peers)], patience)
    if peer == 0:
        _write(folder / "begin", str(time.time() + head_start))
    _wait(folder, ["begin"], patience)


def _race(folder: Path, peer: int, names: int) -> list[int]:
    begin = float((folder / "begin").read_text())
    wins = []
    for name in range(names):
        mine, final = folder / f"race-{name}-{peer}", folder / f"race-{name}"
        mine.write_text(str(peer))
        time.sleep(max(0.0, min(begin + name * SLOT_SECONDS - time.time(), HEAD_START_SECONDS)))
        try:
            os.link(mine, final)
            wins.append(name)
        except FileExistsError:
            if mine.stat().st_ino == final.stat().st_ino:  # the answer to a link that was made got lost (NFS)
                wins.append(name)
    return wins


def _exchange(folder: Path, peer: int, peers: int, patience: float) -> list[float]:
    """Peer 0 asks, the others answer, some times; only its own clock is read."""
    others, seconds = range(1, peers), []
    for number in range(ROUND_TRIPS):
        if peer == 0:
            begin = time.monotonic()
            _write(folder / f"ask-{number}", "")
            _wait(folder, [f"answer-{number}-{each}" for each in others], patience)
            seconds.append(time.monotonic() - begin)
        else:
            _wait(folder, [f"ask-{number}"], patience)
            _write(folder / f"answer-{number}-{peer}", "")
    return seconds


def _wait(folder: Path, names: Sequence[str], patience: float) -> None:
    """Until a listing of the folder shows them. Raises TimeoutError."""
    end = time.monotonic() + patience
    while not set(names) <= set(os.listdir(folder)):
        if time.monotonic() > end:
            missing = sorted(set(names) - set(os.listdir(folder)))
            raise TimeoutError(0, f"{', '.join(missing)} of another node did not show up within {patience:.0f} s", str(folder))
        time.sleep(0.002)


def _write(path: Path, text: str) -> None:
    temp = path.with_name(f"new-{path.name}-{os.getpid()}-{socket.gethostname()}")
    temp.write_text(text)
    os.replace(temp, path)


def parse_reports(output: str) -> list[PeerReport]:
    """The reports among the lines that srun passed on; other lines are a node's own talk."""
    found = []
    for line in output.splitlines():
        try:
            found.append(PeerReport(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def _result(what: str, level: Level, text: str, remedy: str | None = None) -> CheckResult:
    return CheckResult(f"nodes: {what}", level, text, remedy)


def main() -> None:
    """`python -m evo_hpc.store.mount FOLDER --peer N`: one of N processes that srun starts; prints its report as a line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", type=int, required=True, metavar="N", help="how many take part")
    parser.add_argument("--number", type=int, default=int(os.environ.get("SLURM_PROCID", 0)), help="which one this is, from 0; default: SLURM_PROCID")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, metavar="SECONDS", help="how long to wait for the others' files")
    given = parser.parse_args()
    print(json.dumps(asdict(take_part(given.folder, given.number, given.peer, patience=given.patience))), flush=True)
