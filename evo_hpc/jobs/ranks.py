"""Several ranks of one role on this machine (`python -m evo_hpc.jobs.ranks`), as srun has them: started together, ended together."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from evo_hpc.jobs.role import die_with_parent

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
"""What the other ranks have to say their last words once one has failed: a peer of theirs is gone, they cannot save."""


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What torch is told of a rank's place."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }


def run(count: int, command: Sequence[str]) -> int:
    """Run `command` `count` times, with `--rank R --parent PID` appended; 0 when all ended so, else the first other exit code.

    The signals that a role understands are passed on. A rank that fails takes the others with it.
    """
    port = _free_port()
    words = [*command, "--parent", str(os.getpid())]
    ranks = [
        subprocess.Popen([*words, "--rank", str(rank)], stdin=subprocess.DEVNULL, env={**os.environ, **environment_of(rank, count, port)})
        for rank in range(count)
    ]

    def pass_on(signum: int, frame: object) -> None:
        for each in ranks:
            if each.poll() is None:
                each.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGABRT, signal.SIGQUIT):
        signal.signal(signum, pass_on)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)  # as a role does: a warning that is meant for the launcher
    while not (failed := [each.returncode for each in ranks if each.poll()]) and any(each.returncode is None for each in ranks):
        time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(each.poll() is None for each in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for each in ranks:
        each.kill()
        each.wait()
    return failed[0] if failed else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: list[str] | None = None) -> NoReturn:
    """Dies with its own parent; its exit code is that of `run`, a signal's as the signal itself."""
    parser = argparse.ArgumentParser()
    for name in ("--count", "--parent"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    die_with_parent(args.parent)
    code = run(args.count, args.command)
    if code < 0:  # what waits for this process is to see what it would have seen of the rank
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
