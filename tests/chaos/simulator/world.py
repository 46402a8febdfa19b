"""How the simulated cluster goes on: what starts, what has ended, what is killed. There is no daemon: every call moves it first."""

from __future__ import annotations

import os
import _signal as signal  # without its enums
import time

import processes
import quick
from batch import warning
from stepd import launch, marker

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest
if TYPE_CHECKING:
    from typing import Any

    from state import Job, State

LIMITS = {"debug": 30, "train": 1440, "eval": 1440, "scavenge": 1440}
"""Minutes; the partitions of the tests' real cluster."""
LIVE = ("PENDING", "RUNNING", "COMPLETING")


def advance(state: State) -> None:
    """Bring the cluster to the present: ends, kills that are due, starts."""
    if state.down:
        return
    for key, job in list(state.jobs.items()):
        if job["lost"]:
            continue
        if job["state"] in ("RUNNING", "COMPLETING"):
            _look_after(state, key, job)
        if job["state"] not in LIVE and state.now - job["runs"][-1]["ended"] > state.setting("SIM_MIN_JOB_AGE"):
            job["gone"] = True
    _start(state)


def _look_after(state: State, key: str, job: Job) -> None:
    """A job that has processes: have they ended, or are they to be?"""
    now, start = state.now, len(job["runs"]) - 1
    path = f"{state.folder}/runs/{key}.{start}.end"
    if os.path.exists(path):
        with open(path) as file:
            ended = quick.loads(file.read())
        _end(state, job, ended["status"], ended["at"])
    elif not processes.alive(job["pid"], job["born"]):
        if os.path.exists(path):
            return _look_after(state, key, job)
        # The step daemon died without a word: its node did, as far as slurmctld can tell.
        if not job["fate"]:
            doom(state, key, job, "NODE_FAIL", requeue=_may_requeue(job), numbers=())
        _kill_step(state, key, job)
        _end(state, job, None, now)
    elif job["fate"]:
        if job["kill_at"] is not None and now >= job["kill_at"]:
            job["kill_at"] = now + 1
            _signal_all(state, key, job, signal.SIGKILL)
    elif job["preempt_at"] is not None and now >= job["preempt_at"]:
        doom(state, key, job, "PREEMPTED", requeue=_may_requeue(job))
    elif job["limit_at"] is not None and now >= job["limit_at"]:
        doom(state, key, job, "TIMEOUT")
    elif job["warn_at"] is not None and now >= job["warn_at"]:
        job["warn_at"] = None
        warn(state, key, job)


def _may_requeue(job: Job) -> bool:
    return not job["options"].get("no-requeue")


def doom(state: State, key: str, job: Job, fate: str, *, requeue: bool = False, numbers: tuple[int, ...] = (signal.SIGCONT, signal.SIGTERM)) -> None:
    """Decide a job's end (a state word; REQUEUED, PREEMPTED and NODE_FAIL may go with a requeue) and begin to kill it."""
    run = job["runs"][-1]
    run |= {"ended": state.now, "state": fate, "code": {"NODE_FAIL": "1:0", "OUT_OF_MEMORY": "0:125"}.get(fate, "0:0")}
    if requeue and fate == "NODE_FAIL":
        run["code"] = "0:0"
    job |= {"fate": fate, "requeue": requeue, "state": "COMPLETING", "kill_at": state.now + state.setting("SIM_KILL_WAIT"), "preempt_at": None}
    for number in numbers:
        _signal_all(state, key, job, number)


def _signal_all(state: State, key: str, job: Job, number: int) -> None:
    pid, since, mark = job["pid"], job["born"], marker(state.folder, key, len(job["runs"]) - 1)
    state.after.append(lambda: processes.send(processes.members(pid, since, mark), number))


def _kill_step(state: State, key: str, job: Job) -> None:
    pid, since, mark = job["pid"], job["born"], marker(state.folder, key, len(job["runs"]) - 1)
    state.after.append(lambda: processes.kill_step(pid, since, mark))


def signal_batch(state: State, key: str, job: Job, number: int) -> None:
    """To the batch shell alone."""
    path, step, since = f"{state.folder}/runs/{key}.{len(job['runs']) - 1}.pid", job["pid"], job["born"]

    def send() -> None:
        end = time.monotonic() + 5
        while processes.alive(step, since) and time.monotonic() < end:
            try:
                with open(path) as file:
                    return processes.send([int(file.read())], number)
            except FileNotFoundError:
                time.sleep(0.005)

    state.after.append(send)


def warn(state: State, key: str, job: Job) -> None:
    """The signal that the script asked for; without `B:` it goes to steps only, and there are none."""
    asked = warning(job["options"].get("signal"))
    if asked and asked[0]:
        signal_batch(state, key, job, asked[1])


def _end(state: State, job: Job, status: int | None, at: float) -> None:
    """The processes are gone: the last word, or the next start."""
    run, fate = job["runs"][-1], job["fate"]
    job |= {"fate": None, "kill_at": None, "limit_at": None, "warn_at": None, "pid": None, "born": None}
    if fate is None:
        late = job["preempt_at"] is not None and at >= job["grace_end"]
        if status is None:
            word, reason, code = "FAILED", "JobLaunchFailure", "0:53"
        elif os.WIFSIGNALED(status):
            word, reason, code = "FAILED", "JobLaunchFailure", f"0:{os.WTERMSIG(status)}"
        elif os.WEXITSTATUS(status):
            word, reason, code = "FAILED", "NonZeroExitCode", f"{os.WEXITSTATUS(status)}:0"
        else:
            word, reason, code = ("TIMEOUT" if late else "COMPLETED"), "None", "0:0"
        run |= {"ended": at, "state": word, "code": code}
        job |= {"state": word, "reason": reason, "preempt_at": None}
    elif job["requeue"]:
        requeue(state, job)
    else:
        word = "CANCELLED" if fate.startswith("CANCELLED") else fate
        job |= {"state": word, "reason": {"TIMEOUT": "TimeLimit", "NODE_FAIL": "NodeDown", "OUT_OF_MEMORY": "OutOfMemory"}.get(word, "None")}


def requeue(state: State, job: Job) -> None:
    """Back into the queue, submitted anew as far as the records tell."""
    job |= {"state": "PENDING", "reason": "BeginTime", "restart": job["restart"] + 1, "requeue": False, "fate": None, "preempt_at": None,
            "eligible_at": state.now + state.setting("SIM_REQUEUE_DELAY"), "submitted": state.now, "limit_at": None, "warn_at": None}
    job["runs"].append({"submitted": state.now, "started": None, "ended": None, "state": "PENDING", "code": "0:0"})


def limit(job: Job) -> float:
    """Minutes that a job may run."""
    return float(job["minutes"] if job["minutes"] is not None else 10)


def _start(state: State) -> None:
    """Start what fits, oldest first."""
    waiting = sorted((j["order"], k) for k, j in state.jobs.items() if j["state"] == "PENDING" and not j["lost"])
    busy = sum(j["state"] in ("RUNNING", "COMPLETING") and not j["lost"] for j in state.jobs.values())
    blocked = False
    for _, key in waiting:
        job = state.jobs[key]
        if job["visible_at"] > state.now:
            continue
        reason = _obstacle(state, job)
        if reason is None and busy >= state.setting("SIM_SLOTS"):
            reason, blocked = ("Priority" if blocked else "Resources"), True
        if reason is not None:
            job["reason"] = reason
            continue
        busy += 1
        _begin(state, key, job)


def _obstacle(state: State, job: Job) -> str | None:
    if job["held"]:
        # Accounting shows no job that may not start, not even one that it showed before.
        job["runs"][-1]["eligible"] = False
        return str(job["held"])
    if job["eligible_at"] > state.now:
        return "BeginTime"
    job["runs"][-1]["eligible"] = True
    if limit(job) > min(LIMITS[p] for p in job["partition"].split(",")):
        return "PartitionTimeLimit"
    if job["options"].get("dependency") == "singleton":
        for other in state.jobs.values():
            # The older of a name first; one that runs is older than one that waits, whatever their numbers.
            before = other["state"] in ("RUNNING", "COMPLETING") or other["order"] < job["order"]
            if other is not job and not other["lost"] and other["name"] == job["name"] and other["state"] in LIVE and before:
                job["runs"][-1]["eligible"] = False
                return "Dependency"
    return None


def _begin(state: State, key: str, job: Job) -> None:
    start = len(job["runs"]) - 1
    pid, born, go = launch(state.folder, key, start)
    seconds = limit(job) * state.setting("SIM_MINUTE")
    asked = warning(job["options"].get("signal"))
    job["runs"][-1] |= {"started": state.now, "state": "RUNNING", "eligible": True}
    job |= {"state": "RUNNING", "reason": "None", "pid": pid, "born": born, "limit_at": state.now + seconds,
            "warn_at": None if not asked or asked[2] >= seconds else state.now + seconds - asked[2]}

    def release() -> None:
        os.write(go, b"1")
        os.close(go)

    state.after.append(release)


def find(state: State, number: str) -> list[tuple[str, Job]]:
    """The jobs of an id as people write it: a job, a whole array, or one task of it. Forgotten ones are not found."""
    base, _, index = number.partition("_")
    shown = [(k, j) for k, j in state.jobs.items() if not j["lost"] and not j["gone"] and j["visible_at"] <= state.now]
    if index:
        return [(k, j) for k, j in shown if str(j["base"]) == base and str(j["index"]) == index]
    return [(k, j) for k, j in shown if str(j["base"]) == base] or [(k, j) for k, j in shown if str(j["raw"]) == base]


def hold(job: Job, reason: str) -> None:
    """Keep a waiting job from starting."""
    job["runs"][-1]["eligible"] = False
    job |= {"held": reason, "reason": reason}


def release(job: Job) -> None:
    """Let it start again."""
    job |= {"held": "", "reason": "None"}


def cancel(state: State, key: str, job: Job, *, whole: bool = True) -> None:
    """As scancel does it. A task taken out of a waiting array (not `whole`) leaves no trace."""
    word = f"CANCELLED by {os.getuid()}"
    if job["state"] == "PENDING":
        peers = [j for j in state.jobs.values() if j is not job and j["base"] == job["base"] and j["index"] is not None and not j["lost"]]
        untouched = len(job["runs"]) == 1 and any(j["state"] == "PENDING" and len(j["runs"]) == 1 for j in peers)
        job["runs"][-1] |= {"ended": state.now, "state": word}
        job |= {"state": "CANCELLED", "gone": not whole and untouched, "vanished": not whole and untouched}
    elif job["state"] in ("RUNNING", "COMPLETING") and not (job["fate"] or "").startswith("CANCELLED"):
        doom(state, key, job, word)


def simulator(state: State, verb: str, number: str, options: dict[str, Any]) -> Any:
    """What tests do to the cluster; see the class Simulator."""
    found = [] if number == "" else [(k, j) for k, j in state.jobs.items() if not j["lost"] and (j["name"] == number or k in dict(find(state, number)))]
    live = [(k, j) for k, j in found if j["state"] in LIVE]
    if number and not found:
        raise LookupError(f"no job {number}")
    for key, job in live:
        running = job["state"] == "RUNNING"
        if verb in ("preempt", "time_out", "oom", "node_fail") and not running:
            continue
        if verb in ("preempt", "time_out"):
            warn(state, key, job)
            grace = state.setting("SIM_GRACE") if warning(job["options"].get("signal")) or verb == "preempt" else 0
            if verb == "preempt":
                job |= {"grace_end": state.now + grace, "preempt_at": state.now + grace + state.setting("SIM_PREEMPT_LAG")}
            else:
                job |= {"limit_at": state.now + grace, "warn_at": None}
        elif verb == "oom":
            doom(state, key, job, "OUT_OF_MEMORY", numbers=(signal.SIGKILL,))
        elif verb == "node_fail":
            doom(state, key, job, "NODE_FAIL", requeue=_may_requeue(job), numbers=())
            if options.get("step_lives"):
                _end(state, job, None, state.now)
            else:
                _kill_step(state, key, job)
        elif verb == "hold" and job["state"] == "PENDING":
            hold(job, options.get("reason", "JobHeldUser"))
        elif verb == "release":
            release(job)
    if verb == "lose":
        for key, job in found:
            job |= {"lost": True}
            if not options.get("goes_on", True) and job["pid"]:
                _kill_step(state, key, job)
    elif verb == "reuse_ids":
        state.data["reuse"] = sorted({j["raw"] for j in state.jobs.values()} | {j["base"] for j in state.jobs.values()})
    elif verb == "down":
        state.data["down_until"] = state.now + options["seconds"]
    elif verb == "accounting":
        state.data["accounting"] = options["mode"]
    elif verb == "settings":
        state.data["settings"] |= options
    return [{**job, "key": key} for key, job in (found if number else state.jobs.items())]
