"""Runs cases: `python -m tests.chaos.killing [--stride N] [--jobs N]` from a checkout; `play` from a test."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.case import Case, cases, late_cases
from tests.chaos.points import Point

ROOT = Path(__file__).resolve().parents[2]


def play(values: Iterable[Any], at_once: int = 2, work: str = "tests.chaos.case:run") -> Iterator[dict[str, Any]]:
    """What came of each case, in the order in which they end: `case`, and `answer` or `error`. `work`: what lives through one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "crash")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.chaos.killing", "--serve", work, "--jobs", str(at_once)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("".join(json.dumps(asdict(value) if isinstance(value, Case) else value) + "\n" for value in values))
    process.stdin.close()
    try:
        for line in process.stdout:
            yield json.loads(line)
    finally:
        process.stdout.close()  # whoever does not want to hear the rest ends it
        process.wait()


def undisturbed() -> tuple[dict[str, Any], list[Point], float]:
    """What a campaign ends with, the points that its controller passes, and how long it takes in seconds."""
    [found] = play([None])
    assert "answer" in found, found["error"]
    answer = found["answer"]
    return answer["outcome"], [Point(**point) for point in answer["points"]], answer["seconds"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", help="module:function")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--late", action="store_true", help="displaced instead of killed, at every write and submission")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    args = parser.parse_args()
    if args.serve:
        import evo_hpc.controller.loop
        import evo_hpc.dispatch.launcher
        import evo_hpc.jobs.role
        import fake_roles  # noqa: F401
        from evo_hpc.dispatch.slurm.submit import _executor_class
        from tests.chaos.forks import serve
        from tests.chaos.hasten import hasten

        _executor_class()
        hasten()
        module, _, function = args.serve.partition(":")
        serve(getattr(importlib.import_module(module), function), args.jobs)
        return 0
    expected, points, seconds = undisturbed()
    every = late_cases(points) if args.late else cases(points)
    chosen = [every[i] for i in args.only] if args.only else every[:: args.stride]
    random.Random(0).shuffle(chosen)  # so that what is known early speaks of all
    print(f"{len(points)} points, {len(every)} cases, {len(chosen)} to run; undisturbed: {seconds:.1f} s", flush=True)
    begun, failed, reached, count, cpu = time.monotonic(), 0, 0, 0, 0.0
    for found in play(chosen, args.jobs):
        case = Case(**found["case"])
        count, cpu = count + 1, cpu + found.get("cpu", 0)
        problem = found.get("error") or ("" if found["answer"]["outcome"] == expected else f"other outcome: {found['answer']['outcome']}")
        reached += bool(found.get("answer", {}).get("reached"))
        failed += bool(problem)
        if problem:
            print(f"FAILED [{every.index(case)}] {case}\n{problem}", flush=True)
        elif count % 10 == 0:
            took = time.monotonic() - begun
            print(f"{count}/{len(chosen)} run, {reached} reached, {failed} failed, {took:.0f} s, {cpu / count:.2f} s of CPU each", flush=True)
    print(f"{count} run, {reached} reached, {failed} failed, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
