"""Runs one role of a job (`python -m evo_hpc.jobs.role`): dies with its launcher, stops on SIGTERM, reports its outcome."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evo_hpc.errors import EvoError
from evo_hpc.jobs.claims import Superseded
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.spec import load_spec
from evo_hpc.paths import ExchangePaths, JobPaths
from evo_hpc.store.atomic import write_json

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that no role outlives its job."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def load_entry(entry: str) -> Callable[[RoleContext], dict[str, Any]]:
    """The function that `module:function` names; imported only now, so that only roles pay for torch."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 done or stopped, 1 failed, 2 the user's mistake; the outcome file says which and why."""
    parser = argparse.ArgumentParser()
    for name in ("--job", "--role", "--entry", "--exchange"):
        parser.add_argument(name, required=True)
    for name in ("--incarnation", "--parent"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args(arguments)
    die_with_parent(args.parent)
    faulthandler.enable()  # SIGABRT, sent by the stall watchdog, prints every thread's stack
    job = JobPaths(Path(args.job))
    context = RoleContext(
        role=args.role, job=job, incarnation=job.incarnation(args.incarnation), spec=load_spec(job),
        exchange=ExchangePaths(Path(args.exchange)),
    )

    def stop(signum: int, frame: object) -> None:
        context.stop_requested = True

    signal.signal(signal.SIGTERM, stop)  # before the heavy imports, which take their time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outcome: dict[str, Any]
    try:
        outcome = {"outcome": "done", "outputs": load_entry(args.entry)(context)}
    except Stopped as error:
        outcome = {"outcome": "stopped", "error": str(error)}
    except Superseded as error:
        print(error, file=sys.stderr)
        return 0
    except EvoError as error:
        traceback.print_exc()
        outcome = {"outcome": "failed", "blame": "user" if error.exit_code == 2 else "infrastructure", "error": str(error)}
    except Exception as error:  # the boundary of the process: whatever it is goes into the outcome, with its place
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = {
            "outcome": "failed", "blame": "infrastructure",
            "error": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno}); "
                     f"full trace in {context.incarnation.log(args.role)}",
        }
    write_json(context.incarnation.role_outcome(args.role), outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    # Engines leave non-daemon threads and atexit hooks behind that can hang; everything of ours is on disk by now.
    os._exit({"done": 0, "stopped": 0}.get(outcome["outcome"], 2 if outcome.get("blame") == "user" else 1))


if __name__ == "__main__":
    sys.exit(main())
