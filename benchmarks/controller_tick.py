"""One tick of the controller by the number of versions on disk and of live Slurm jobs: look at the folders, keep the books, plan.

The campaigns are copies of one finished version under other ids (tests/controller/many_versions.py), the queue is made up and parsed as
squeue's. CPU milliseconds; the sweep over closed versions is in them. A tick here finds nothing new, which is what most ticks do.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evo_hpc.controller.books import Books
from evo_hpc.controller.budget import Overrun
from evo_hpc.controller.cache import StateCache
from evo_hpc.controller.control import apply, wish_of
from evo_hpc.controller.plan import make_plan
from evo_hpc.controller.state import CampaignState, read_state
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm.parse import parse_accounting, parse_queue
from evo_hpc.paths import CampaignPaths, version_id
from tests.controller.attempts import Owner
from tests.controller.many_versions import ShownQueue, add_live_jobs, dispatch_of, make_versions, quick_yaml


MANY = 1000
"""Versions beyond which the first reading is hastened."""


def ticker(paths: CampaignPaths, dispatch: Dispatch, cache: StateCache) -> Callable[[], CampaignState]:
    """What the controller's loop does at each tick, up to its actions."""
    books = Books()

    def tick() -> CampaignState:
        state = read_state(paths, dispatch=dispatch, cache=cache)
        control, _ = wish_of(state)
        over: list[Overrun] = books.keep(state, Owner())  # type: ignore[arg-type]
        apply(control, make_plan(state, 3, None, control, over))
        return state

    return tick


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(folder: Path, versions: int, jobs: int, ticks: int, sweep: int) -> list[dict[str, Any]]:
    """Ticks at a campaign without live jobs, then with them."""
    with quick_yaml():
        paths = make_versions(folder / "campaign", versions)
    cells = []
    cache, shown = StateCache(sweep=sweep), ShownQueue()
    for live in sorted({0, jobs}):
        if live:
            shown = add_live_jobs(paths, live)
        tick = ticker(paths, dispatch_of(paths, shown), cache)
        with nullcontext() if versions <= MANY else quick_yaml():
            first = seconds(tick)
        time.sleep(cache.settle_seconds + 0.1)
        tick()  # what was new at the first is read once more
        gc.collect()
        gc.freeze()  # a controller's memory lasts; without this a collection goes over all of it
        times = [1000 * seconds(tick) for _ in range(ticks)]
        cells.append({
            "versions": versions, "jobs": live, "first_s": round(first, 2) if versions <= MANY else None,
            "median_ms": round(statistics.median(times), 1),
            "p95_ms": round(statistics.quantiles(times, n=20, method="inclusive")[-1], 1), "detected_after_ticks": detected(paths, tick, versions),
        })
    return cells


def detected(paths: CampaignPaths, tick: Callable[[], CampaignState], versions: int) -> int:
    """After how many ticks an edit of a closed version shows, of three: in the middle, where the sweep has just been, and the last."""
    worst = 0
    for number in (versions // 2, 1, versions - 1):
        version = paths.version(version_id(number))
        text = version.version_yaml.read_text()
        edited = text.replace("Again.", "Again!") if "Again." in text else text.replace("raises", "lowers")
        with version.version_yaml.open("r+") as file:  # in place: the least that can be seen
            file.write(edited)
        count = 1
        while tick().versions[version.id].node.version.hypothesis not in edited:
            count += 1
        version.version_yaml.write_text(text)
        worst = max(worst, count)
    return worst


def parsing(jobs: int) -> dict[str, Any]:
    """Milliseconds to read answers of squeue and sacct of that many lines."""
    queue = "".join(f"{n}|N/A|evo-c-12345678-v{n:04d}-train-000-s0|RUNNING|None|1790000000|1790000009|1790003600|n[1-2]|2|{n}\n" for n in range(jobs))
    accounting = "".join(
        f"{n}|{n}|evo-c-12345678-v{n:04d}-train-000-s0|COMPLETED|0:0|1790000000|1790000009|1790003600|3591|"
        "billing=8,cpu=8,gres/gpu=4,mem=64G,node=2|n[1-2]\n"
        for n in range(jobs)
    )
    assert len(list(parse_queue(queue))) == len(list(parse_accounting(accounting))) == jobs
    best = {name: min(seconds(lambda parse=parse, text=text: parse(text)) for _ in range(5))  # type: ignore[misc]
            for name, parse, text in (("squeue", parse_queue, queue), ("sacct", parse_accounting, accounting))}
    return {"jobs": jobs, **{f"{name}_ms": round(1000 * value, 1) for name, value in best.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, nargs="+", default=[10, 100, 1000, 10_000], help="on disk")
    parser.add_argument("--jobs", type=int, default=1000, help="live ones, besides none")
    parser.add_argument("--ticks", type=int, default=40)
    parser.add_argument("--sweep", type=int, default=StateCache.sweep, help="closed versions looked at in a tick")
    parser.add_argument("--folder", type=Path, help="where to make the campaigns (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    parsed, cells = parsing(max(1, arguments.jobs)), []
    if not arguments.json:
        print(f"parsing {parsed['jobs']} lines: squeue {parsed['squeue_ms']} ms, sacct {parsed['sacct_ms']} ms", flush=True)
        print("versions  live jobs  first tick s  median ms  p95 ms  an edit shows after (ticks)", flush=True)
    for versions in arguments.versions:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            for cell in measure(Path(temporary), versions, arguments.jobs, arguments.ticks, arguments.sweep):
                cells.append(cell)
                if not arguments.json:
                    first = "-" if cell["first_s"] is None else cell["first_s"]
                    print(f"{cell['versions']:8} {cell['jobs']:10} {first:>13} {cell['median_ms']:10.1f} {cell['p95_ms']:7.1f} "
                          f"{cell['detected_after_ticks']:10}", flush=True)
    growth = {live: round(big[-1] / big[0], 2) for live in sorted({c["jobs"] for c in cells})
              if (big := [c["median_ms"] for c in cells if c["jobs"] == live])}
    if arguments.json:
        print(json.dumps({"ticks": cells, "parsing": parsed, "growth": growth}))
    else:
        print(f"growth of the median from {arguments.versions[0]} to {arguments.versions[-1]} versions, by live jobs: {growth}")


if __name__ == "__main__":
    main()
