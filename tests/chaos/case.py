"""One campaign on the simulator whose controller dies at one point, amid one fault, and is followed by another; what must hold then."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from evo_hpc.paths import CampaignPaths
from tests.chaos.points import Point, Recorder, When, read_log
from tests.chaos.simulator import Simulator
from tests.crash.campaign import check_sound, make_campaign, outcome

SETTINGS = {"slots": 8, "kill_wait": 0.3, "grace": 0.3, "preempt_lag": 0.1, "requeue_delay": 0.1, "sacct_lag": 0.1, "down_delay": 0.02}
SLURM = {
    "defaults": {"partition": "debug", "minutes": 5, "warning_seconds": 20}, "analyse": {}, "shards": 2, "poll_seconds": 0.15, "settle_seconds": 2.5,
    "backoff_seconds": 0, "command_seconds": 3, "submit_seconds": 3,
}
SECONDS = 90.0
"""Longest time of one controller: many times what it takes on a busy machine."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
FAULTS = (
    "none", "sbatch timeout_after", "sbatch timeout_before", "sbatch hang_after", "sbatch hang_before", "sbatch late", "sbatch refuse_qos",
    "squeue fails", "sacct fails", "no accounting", "accounting down", "slurmctld down", "ids reused", "lost, goes on", "lost, dead", "preempted",
    "node failed", "node failed, step lives", "time limit",
)


@dataclass(frozen=True)
class Case:
    """Where the first controller dies, and what else goes wrong."""

    number: int
    """Of the point: what a fault strikes follows from it."""
    label: str
    n: int
    when: When
    fault: str

    @property
    def point(self) -> Point:
        return Point(self.label, self.n)

    def __str__(self) -> str:
        return f"{self.number}: killed {self.when} {self.point}, {self.fault}"


def cases(points: list[Point]) -> list[Case]:
    """Every point, before and after; the faults in turn, so that neighbours have different ones."""
    found = []
    for number, point in enumerate(points):
        for which, when in enumerate(("before", "after")):
            fault = FAULTS[(5 * number + 7 * which) % len(FAULTS)]
            found.append(Case(number, point.label, point.n, when, fault))  # type: ignore[arg-type]
    return found


def late_cases(points: list[Point]) -> list[Case]:
    """Every record and every submission, made by a controller that was displaced after its last check."""
    kinds = ("link ", "rename ", "replace ", "sbatch ")
    return [Case(number, p.label, p.n, "late", "none") for number, p in enumerate(points) if p.label.startswith(kinds) and "~" not in p.label
            and "generation" not in p.label and "lease" not in p.label]


def run(value: dict[str, Any] | None, python: str) -> dict[str, Any]:
    """Live through a case; None: undisturbed. What came of it; raises AssertionError where something does not hold."""
    case = None if value is None else Case(**value)
    base = Path(tempfile.mkdtemp(prefix="chaos-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    simulator = Simulator(base / "sim", **SETTINGS)
    kept = False
    try:
        paths = make_campaign(base / "campaign", executor="slurm", slurm=SLURM, max_parallel_jobs=4)
        settings = json.loads((paths.root / "cluster.yaml").read_text())
        (paths.root / "cluster.yaml").write_text(json.dumps({**settings, "python": python}))
        begun = time.monotonic()
        if case is None:
            code = _controller(paths, simulator, base / "first", None)
            assert code == 0, f"{code}: {(base / 'first.out').read_text()}"
            return {"outcome": _checked(paths, simulator, [base / "first"]), "seconds": time.monotonic() - begun,
                    "points": [asdict(e.point) for e in read_log(base / "first") if e.word == "begin"]}
        if case.when == "late":
            reached = _displaced(paths, simulator, base, case)
            return {"outcome": _checked(paths, simulator, [base / "first", base / "second"], case, in_order=False), "reached": reached,
                    "seconds": time.monotonic() - begun}
        _before(case, simulator)
        code = _controller(paths, simulator, base / "first", case)
        reached = code == -signal.SIGKILL
        assert reached or code == 0, f"the first ended with {code}: {(base / 'first.out').read_text()}"
        _between(case, simulator)
        code = _controller(paths, simulator, base / "second", None)
        assert code == 0, f"the second ended with {code}: {(base / 'second.out').read_text()}"
        found = _checked(paths, simulator, [base / "first", base / "second"], case)
        return {"outcome": found, "reached": reached, "seconds": time.monotonic() - begun}
    except BaseException:
        kept = "CHAOS_KEEP" in os.environ
        raise
    finally:
        simulator.kill_all()
        if not kept:
            shutil.rmtree(base, ignore_errors=True)
        else:
            print(f"kept: {base}", file=sys.stderr)


def _displaced(paths: CampaignPaths, simulator: Simulator, base: Path, case: Case) -> bool:
    """The first stands still after its last check, the second does all the work, then the first goes on; whether it came to that."""
    first = start_controller(paths, simulator, base / "first", case)
    end = time.monotonic() + SECONDS
    while not (base / "first.waits").exists():
        ended, status = os.waitpid(first, os.WNOHANG)
        if ended:
            assert status == 0, (base / "first.out").read_text()
            return False
        assert time.monotonic() < end, "the first does not get there"
        time.sleep(0.02)
    code = wait_for(start_controller(paths, simulator, base / "second", None, main=_take_over), base / "second")
    assert code == 0, f"the second ended with {code}: {(base / 'second.out').read_text()}"
    (base / "first.go").touch()
    code = wait_for(first, base / "first")
    said = (base / "first.out").read_text()
    assert code == 1 and any(word in said for word in ("LeaseLost", "AlreadyWritten")), f"the displaced one ended with {code}: {said}"
    return True


def _take_over(paths: CampaignPaths, recorder: Recorder) -> None:
    """The controller of before counts as dead."""
    from evo_hpc.store import lease

    lease.owner_may_live = lambda *_: False
    _run_it(paths, recorder)


def _before(case: Case, simulator: Simulator) -> None:
    """Faults that wait for their call."""
    if case.fault.startswith("sbatch "):
        kind = case.fault.split()[1]
        simulator.plan("sbatch", kind, skip=case.number % 4, seconds=0.5 if kind == "late" else 0.0)
    elif case.fault in ("squeue fails", "sacct fails"):
        simulator.plan(case.fault.split()[0], "fail", times=6, skip=case.number % 7)
    elif case.fault == "no accounting":
        simulator.accounting("absent")
    elif case.fault == "accounting down":
        simulator.accounting("down")


def _between(case: Case, simulator: Simulator) -> None:
    """What happens to the cluster while no controller looks: to the job that was submitted last and still lives."""
    jobs = [job for job in simulator.jobs() if job["state"] in ("PENDING", "RUNNING") and not job["lost"]]
    job = jobs[-1 - case.number % len(jobs)] if jobs else None
    shown = None if job is None else str(job["base"]) if job["index"] is None else f"{job['base']}_{job['index']}"
    if case.fault == "slurmctld down":
        simulator.down(0.7)
    elif case.fault == "ids reused":
        simulator.reuse_ids()
    elif shown is not None and case.fault in ("lost, goes on", "lost, dead"):
        simulator.lose(shown, goes_on=case.fault.endswith("on"))
    elif shown is not None and case.fault == "preempted":
        simulator.preempt(shown)
    elif shown is not None and case.fault == "time limit":
        simulator.time_out(shown)
    elif shown is not None and case.fault.startswith("node failed"):
        simulator.node_fail(shown, step_lives=case.fault.endswith("lives"))


def _checked(paths: CampaignPaths, simulator: Simulator, logs: list[Path], case: Case | None = None, *, in_order: bool = True) -> dict[str, Any]:
    """What the campaign has found, once all that must hold was seen to hold."""
    check_sound(paths)
    _committed_once(logs)
    end = time.monotonic() + 10  # a job's result comes before its end
    while (left := [j["name"] for j in simulator.jobs() if j["state"] not in ENDED and not j["lost"]]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"left in the queue: {left}"
    _submitted_once(simulator, in_order)
    found: dict[str, Any] = json.loads(json.dumps(outcome(paths)))
    return found


def _committed_once(logs: list[Path]) -> None:
    """No write-once record and no folder appeared twice under its name."""
    ended = Counter(entry.point.label for log in logs for entry in read_log(log) if entry.word == "end" and entry.lasting)
    twice = [label for label, times in ended.items() if times > 1]
    assert not twice, f"written more than once: {twice}"


def _submitted_once(simulator: Simulator, in_order: bool) -> None:
    """Every name once; and an attempt's next job only when the one before it had ended, as far as there was anything to be seen of it."""
    orders: dict[str, set[int]] = defaultdict(set)
    attempts: dict[tuple[str, str], list[tuple[int, float, float, str]]] = defaultdict(list)
    for job in simulator.jobs():
        orders[job["name"]].add(job["order"])
        ended = job["runs"][-1]["ended"]
        end_file = simulator.folder / "runs" / f"{job['key']}.{len(job['runs']) - 1}.end"
        if job["lost"]:
            ended = json.loads(end_file.read_text())["at"] if end_file.exists() else 0.0
        for attempt, start in _attempts_of(simulator, job):
            attempts[attempt, ""].append((start, job["runs"][0]["submitted"], ended, job["name"]))
    twice = {name: len(each) for name, each in orders.items() if len(each) > 1}
    assert not twice, f"submitted more than once: {twice}"
    for (attempt, _), starts in attempts.items() if in_order else ():
        starts.sort()
        for (_, _, ended, name), (_, submitted, _, following) in zip(starts, starts[1:], strict=False):
            assert ended is not None and ended <= submitted, f"{attempt}: {following} was submitted while {name} lived"


def _attempts_of(simulator: Simulator, job: dict[str, Any]) -> list[tuple[str, int]]:
    """The attempt folder that a job (or the task of an array) is for, and its number of start, by the script that it runs."""
    words = (simulator.folder / "scripts" / job["script"]).read_text()
    found = []
    for index, folder, start in re.findall(r"(?:^\s*(\d+)\).*)?\s--job\s+(\S+).*?--start\s+(\d+)", words, re.MULTILINE):
        if job["index"] is None or index == "" or int(index) == job["index"]:
            found.append((folder, int(start)))
    return found


def _controller(paths: CampaignPaths, simulator: Simulator, log: Path, case: Case | None) -> int:
    """Run one in a fork to its end; its exit code, negative for a signal."""
    return wait_for(start_controller(paths, simulator, log, case), log)


def wait_for(child: int, log: Path, seconds: float = SECONDS) -> int:
    """The exit code of a fork. Raises AssertionError where it does not end."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGABRT)  # faulthandler says where it was
            os.waitpid(child, 0)
            raise AssertionError(f"a controller does not end: {log.with_suffix('.out').read_text()}")
        time.sleep(0.02)


def _run_it(paths: CampaignPaths, recorder: Recorder) -> None:
    from evo_hpc.controller.loop import Controller

    Controller(paths, lambda state, plan, events: print(*events, sep="\n", flush=True) if events else None).run()


Main = Callable[[CampaignPaths, Recorder], None]


def start_controller(paths: CampaignPaths, simulator: Simulator, log: Path, case: Case | None, main: Main = _run_it) -> int:
    """Fork a controller that records its points; its pid."""
    child = os.fork()
    if child == 0:
        _be_controller(paths, simulator, log, case, main)
    return child


def _be_controller(paths: CampaignPaths, simulator: Simulator, log: Path, case: Case | None, main: Main) -> NoReturn:
    out = os.open(log.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    faulthandler.enable()
    code = 1
    try:
        environment = simulator.environment()
        os.environ.clear()
        os.environ.update(environment)
        recorder = Recorder(paths.root, log, None if case is None else case.point, "before" if case is None else case.when)
        recorder.install()
        main(paths, recorder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
