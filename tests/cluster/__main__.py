"""The command line: `python -m tests.cluster up|down|status`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from evo_hpc.errors import EvoError
from tests.cluster.cluster import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]


def default_prefix() -> Path:
    """In $TMPDIR where there is one, else in the checkout."""
    temporary = os.environ.get("TMPDIR")
    return Path(temporary) / "evo-cluster" if temporary else REPOSITORY / ".cluster"


def main() -> int:
    """Returns the exit status: 0; 1 for a failure, or a status that is not all well; 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="A private Slurm cluster on this machine, for tests.")
    parser.add_argument("verb", choices=("up", "down", "status"))
    parser.add_argument("--prefix", type=Path, default=default_prefix(), help="folder of the cluster (default: %(default)s)")
    parser.add_argument("--wipe", action="store_true", help="down: remove the folder too")
    parser.add_argument("--base-port", type=int, help="up: the first of 16 ports (default: free ones, remembered)")
    parser.add_argument("--no-accounting", action="store_true", help="up: without slurmdbd and MariaDB, so that sacct fails")
    parser.add_argument("--cgroup", action="store_true", help="up: jobs in control groups, so that memory limits are enforced (root)")
    options = parser.parse_args()
    if options.wipe and options.verb != "down":
        parser.error("--wipe goes with down")
    cluster = Cluster(options.prefix, options.base_port, not options.no_accounting, options.cgroup)
    try:
        return {"up": up, "down": lambda c: down(c, wipe=options.wipe), "status": status}[options.verb](cluster)
    except EvoError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return error.exit_code


def up(cluster: Cluster) -> int:
    started = time.monotonic()
    cluster.up()
    print(f"cluster: up after {time.monotonic() - started:.1f} s. To use it in this shell:\n  . {cluster.layout.env_script}")
    return 0


def down(cluster: Cluster, *, wipe: bool) -> int:
    started = time.monotonic()
    cluster.down(wipe=wipe)
    print(f"cluster: down after {time.monotonic() - started:.1f} s" + (f"; {cluster.layout.prefix} is gone" if wipe else ""))
    return 0


def status(cluster: Cluster) -> int:
    running = cluster.running()
    print(f"{cluster.layout.prefix}: {cluster.settings}")
    for name, pid in running.items():
        print(f"  {name:<10} {pid or 'does not run'}")
    if running["slurmctld"]:
        print(cluster.run("sinfo").stdout, end="")
    return 0 if all(running.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
