"""Runs one role of a job (`python -m evo_hpc.jobs.role`): dies with its launcher, stops on SIGTERM, reports its outcome."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

from evo_hpc.errors import EvoError
from evo_hpc.jobs.claims import Superseded
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.spec import load_spec
from evo_hpc.paths import ExchangePaths, JobPaths
from evo_hpc.store.atomic import StoreError, write_json

_PR_SET_PDEATHSIG = 1
_INSTALLED_BY_SETUP = ("torch", "megatron", "vllm", "transformers", "safetensors")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that no role outlives its job."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def take_rank(environment: MutableMapping[str, str]) -> int:
    """This process's rank, where srun started several; torch's RANK, WORLD_SIZE and LOCAL_RANK are set from Slurm's then."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if tasks == 1 or environment.get("SLURM_PROCID") is None:
        return 0
    environment.update(RANK=environment["SLURM_PROCID"], WORLD_SIZE=str(tasks), LOCAL_RANK=environment.get("SLURM_LOCALID", "0"))
    return int(environment["RANK"])


def load_entry(entry: str) -> Callable[[RoleContext], dict[str, Any]]:
    """The function that `module:function` names; imported only now, so that only roles pay for torch."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Exit 0 done, stopped or superseded, 1 failed, 2 the user's mistake; the outcome file says which and why."""
    parser = argparse.ArgumentParser()
    for name in ("--job", "--role", "--entry", "--exchange"):
        parser.add_argument(name, required=True)
    for name in ("--incarnation", "--parent"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--rank", type=int)
    args = parser.parse_args(arguments)
    rank = take_rank(os.environ) if args.rank is None else args.rank
    if args.parent:
        die_with_parent(args.parent)
    faulthandler.enable()  # SIGABRT, sent by the stall watchdog, prints every thread's stack
    faulthandler.register(signal.SIGQUIT)  # so does this, without an end: for ranks, of which the first to end would take the others with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # which is wanted, not all memory in a file
    job = JobPaths(Path(args.job))
    context = RoleContext(
        role=args.role, job=job, incarnation=job.incarnation(args.incarnation), spec=load_spec(job),
        exchange=ExchangePaths(Path(args.exchange)), rank=rank,
    )

    def stop(signum: int, frame: object) -> None:
        context.stop_requested = True

    signal.signal(signal.SIGTERM, stop)  # before the heavy imports, which take their time
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)  # a warning meant for the launcher that reaches the whole job must not end this one
    outcome: dict[str, Any]
    try:
        outcome = {"outcome": "done", "outputs": load_entry(args.entry)(context)}
    except Superseded as error:
        _log(str(error))
        _end(0)
    except Exception as error:  # the boundary of the process: whatever it is goes into the outcome, with its place
        if not isinstance(error, Stopped):
            _log(traceback.format_exc())
        outcome = outcome_of(error, context.incarnation.log(args.role))
    try:
        write_json(context.incarnation.role_outcome(args.role, rank), outcome)
    except StoreError as error:  # the launcher reads the end of the log when there is no outcome
        _log(f"{outcome['outcome']}: {outcome.get('error')}\n{error}")
        _end(1)
    _end({"done": 0, "stopped": 0}.get(outcome["outcome"], 2 if outcome.get("blame") == "user" else 1))


def outcome_of(error: Exception, log: Path) -> dict[str, Any]:
    """How a role ended that raised `error`: stopped, or failed and by whose fault, and what the user is told. Pure."""
    if isinstance(error, Stopped):
        return {"outcome": "stopped", "error": str(error)}
    if isinstance(error, EvoError):
        return {"outcome": "failed", "blame": "user" if error.exit_code == 2 else "infrastructure", "error": str(error)}
    if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").partition(".")[0]) in _INSTALLED_BY_SETUP:
        return {
            "outcome": "failed", "blame": "user",
            "error": f"{error.name} is not installed for {sys.executable}: run `make setup`, or install evo-hpc with the extra "
                     f"`cpu` or `gpu`; where it is installed, its version of {name} is not the one needed",
        }
    if out_of_memory(error):
        return {
            "outcome": "failed", "blame": "infrastructure", "ending": "oom",
            "error": f"out of memory: {_with_causes(error)}. Lower token_budget in recipe.yaml, or give the job more memory or more ranks in "
                     f"cluster.yaml; full trace in {log}",
        }
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    return {"outcome": "failed", "blame": "infrastructure", "error": f"{_with_causes(error)}{place}; full trace in {log}"}


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused, on the host or on a device. By names: torch is not imported here."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _with_causes(error: BaseException) -> str:
    """An error and what it came from: one raised while cleaning up would else hide the one that mattered."""
    told: list[str] = []
    each: BaseException | None = error
    while each is not None and len(told) < 5:
        told.append(f"{type(each).__name__}: {each}")
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return ", caused by ".join(told)


def _log(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the disk with the log on it is full; the outcome may still find room
        pass


def _end(code: int) -> NoReturn:
    """Engines leave non-daemon threads and atexit hooks behind that can hang; everything of ours is on disk by now."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # as in _log
            pass
    os._exit(code)


if __name__ == "__main__":
    main()
