"""A campaign in which a controller of an earlier generation tries every action first, and must be refused; then the right one does it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evo_hpc.paths import CampaignPaths
from evo_hpc.store.lease import Lease, LeaseLost
from tests.chaos.case import SETTINGS, SLURM, start_controller, wait_for
from tests.chaos.points import Point, Recorder, read_log
from tests.chaos.simulator import Simulator
from tests.crash.campaign import make_campaign, make_search

UNGUARDED = ("Stop",)
"""Asks a job to save and end, which harms nobody: whoever owns the campaign starts it again where it saved."""


def run(value: dict[str, Any], python: str) -> dict[str, Any]:
    """`search`: with rounds, watches, merges and early ends. What was recorded: the lasting writes by who made them, what zombies did."""
    base = Path(tempfile.mkdtemp(prefix="zombie-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    simulator = Simulator(base / "sim", **SETTINGS)
    try:
        make = make_search if value["search"] else make_campaign
        paths = make(base / "campaign", executor="slurm", slurm=SLURM, max_parallel_jobs=4)
        settings = json.loads((paths.root / "cluster.yaml").read_text())
        (paths.root / "cluster.yaml").write_text(json.dumps({**settings, "python": python}))
        begun = time.monotonic()
        main = _search if value["search"] else _with_zombies
        code = wait_for(start_controller(paths, simulator, base / "first", None, main), base / "first", 600)
        assert code == 0, f"{code}: {(base / 'first.out').read_text()}"
        entries = read_log(base / "first")
        lasting = [(e.context, e.point.label) for e in entries if e.word == "end" and e.lasting]
        zombies = [(e.context, e.point.label, e.word) for e in entries if e.context.startswith("zombie")]
        return {"lasting": lasting, "zombies": zombies, "seconds": time.monotonic() - begun, "windows": _windows(entries),
                "by_jobs": [(e.context, e.point.label) for e in read_log(base / "jobs.log") if e.word == "end" and e.lasting]}
    finally:
        simulator.kill_all()
        shutil.rmtree(base, ignore_errors=True)


def _windows(entries: list[Any]) -> dict[str, float]:
    """Longest time in seconds, by kind of record, between the last look at who owns the campaign and the record's appearance."""
    found: dict[str, float] = {}
    checked = 0.0
    for entry in entries:
        if entry.word == "returned" and entry.point.label == "check":
            checked = entry.time
        elif entry.word == "end" and entry.lasting:
            kind = kind_of(entry.point.label)
            found[kind] = max(found.get(kind, 0.0), entry.time - checked)
    return found


def kind_of(label: str) -> str:
    """A record's name without numbers."""
    return re.sub(r"\d+", "N", re.sub(r"[0-9a-f]{64}", "<hash>", label))


def _search(paths: CampaignPaths, recorder: Recorder) -> None:
    from evo_hpc.harness import runner
    from tests.chaos import hasten

    runner._run_child = hasten.RUN_CHILD
    _with_zombies(paths, recorder)


def _with_zombies(paths: CampaignPaths, recorder: Recorder) -> None:
    from evo_hpc.controller import books, final_job, finalize, loop

    check = Lease.check

    def noted(self: Lease) -> None:
        check(self)
        recorder.note("returned", Point("check", 1))

    Lease.check = noted  # type: ignore[method-assign]

    def zombie_first(name: str, call: Callable[[Lease], Any], lease: Lease) -> Any:
        old = Lease(lease.paths, lease.owner.model_copy(update={"generation": lease.generation - 1}))
        if name not in UNGUARDED:
            recorder.context = f"zombie {name}"
            try:
                call(old)
                recorder.note("returned", Point(name, 1))
            except LeaseLost:
                recorder.note("refused", Point(name, 1))
        recorder.context = name
        try:
            return call(lease)
        finally:
            recorder.context = ""

    carry_out, write_cost, declare, conclude = loop.carry_out, books.write_cost, finalize._declare, finalize._conclude
    loop.carry_out = lambda action, state, dispatch, lease, beat: zombie_first(
        type(action).__name__, lambda who: carry_out(action, state, dispatch, who, beat if who is lease else (lambda: None)), lease)
    books.write_cost = lambda job, lease, accounted, now: zombie_first("cost", lambda who: write_cost(job, who, accounted, now), lease)
    finalize._declare = lambda *args: zombie_first("declare", lambda who: declare(*args[:-1], who), args[-1])
    finalize._conclude = lambda *args: zombie_first("conclude", lambda who: conclude(*args[:-1], who), args[-1])
    by_job = final_job.FinalJob._carry_out

    def of_final(self: Any, action: Any) -> Any:
        mine = self.ownership.lease

        def as_(who: Lease) -> Any:
            self.ownership.lease = who
            try:
                return by_job(self, action)
            finally:
                self.ownership.lease = mine

        return zombie_first(f"final {type(action).__name__}", as_, mine)

    final_job.FinalJob._carry_out = of_final  # type: ignore[method-assign]
    loop.Controller(paths, lambda *_: None).run()
    finalize.finalize(paths)
