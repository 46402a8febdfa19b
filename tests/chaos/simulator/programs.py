"""The programs: which forms of a command are spoken, and what is printed. Any other form ends with 64, so that nobody misses a change."""

from __future__ import annotations

import os
import pwd
import _signal as signal  # without its enums
import sys
import time

import faults
import quick
import world
from batch import Refused, indexes, minutes, options, warning
from state import State, new_id

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from state import Job

VERSION = "slurm-wlm 22.05.8"
SQUEUE = ["--noheader", "--array", "--states=all", "--user={user}", "--format=%F|%K|%j|%T|%r|%V|%S|%e|%N|%D|%i"]
SACCT = ["--noheader", "--parsable2", "--duplicates", "--allocations", "--user={user}", "--starttime=",
         "--format=JobIDRaw,JobID,JobName,State,ExitCode,Submit,Start,End,ElapsedRaw,AllocTRES,NodeList"]
TRES = "billing=1,cpu=1,mem=100M,node=1"


def main(program: str, arguments: list[str]) -> None:
    """One call of one program."""
    folder = os.environ["SIM_STATE"]
    if arguments in (["--version"], ["-V"]):
        print(VERSION)
        return
    if program == "stepd":
        import stepd

        try:
            stepd.main(folder, arguments[0], int(arguments[1]))
        except FileNotFoundError:  # the whole cluster was removed
            pass
        return
    if program == "srun":
        import srun

        srun.main(arguments)
    if program == "scontrol" and arguments[:2] == ["show", "hostnames"] and len(arguments) == 3:
        print("\n".join(hostnames(arguments[2])))
        return
    speak = {"sbatch": sbatch, "squeue": squeue, "sacct": sacct, "scancel": scancel, "scontrol": scontrol, "sinfo": sinfo, "sim": sim}[program]
    with State(folder) as state:
        if program not in ("sacct", "sim") and state.down:
            _controller_down(state, program, arguments)
        fault = faults.take(folder, program)
        world.advance(state)
        state.commit()
        if fault and fault["kind"] == "fail":
            _quit(faults.unavailable(program, arguments[-1] if arguments else ""), 1)
        if fault and fault["kind"] in ("hang", "hang_before"):
            state.__exit__()
            faults.hang(folder)
        speak(state, arguments, fault or {})
        state.commit()
    sys.stdout.flush()


def _quit(words: str, code: int) -> NoReturn:
    sys.stdout.flush()
    if words:
        sys.stderr.write(words + "\n")
        sys.stderr.flush()
    os._exit(code)


def _unspoken(program: str, arguments: list[str]) -> NoReturn:
    _quit(f"the simulator does not know this form: {' '.join([program, *arguments])!r}", 64)


def _controller_down(state: State, program: str, arguments: list[str]) -> NoReturn:
    delay = state.setting("SIM_DOWN_DELAY")
    state.__exit__()
    time.sleep(delay)
    words = faults.unavailable(program, arguments[-1] if arguments else "", faults.UNREACHABLE)
    if program == "scancel" and "--batch" in arguments:
        _quit(faults.unavailable("squeue", "", faults.UNREACHABLE), 1)
    _quit(words, 8 if program == "scancel" else 1)


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _time(value: float | None, missing: str) -> str:
    if value is None:
        return missing
    return str(int(value)) if os.environ.get("SLURM_TIME_FORMAT") == "%s" else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(value))


def sbatch(state: State, arguments: list[str], fault: dict[str, Any]) -> None:
    """`sbatch [--parsable] SCRIPT`."""
    parsable, left = "--parsable" in arguments, [a for a in arguments if a != "--parsable"]
    if len(left) != 1 or left[0].startswith("-"):
        _unspoken("sbatch", arguments)
    kind = fault.get("kind", "")
    if kind == "timeout_before":
        _quit(faults.unavailable("sbatch", ""), 1)
    try:
        base = submit(state, left[0], fault)
    except Refused as refused:
        _quit(str(refused), refused.code)
    state.commit()
    # What is acknowledged starts at once where there is room.
    world.advance(state)
    state.commit()
    if kind == "hang_after":
        state.__exit__()
        faults.hang(state.folder)
    if kind == "timeout_after":
        _quit(faults.unavailable("sbatch", ""), 1)
    print(base if parsable else f"Submitted batch job {base}")


def submit(state: State, path: str, fault: dict[str, Any]) -> int:
    """Put the jobs of a script into the queue; the id. Raises Refused."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except OSError:
        raise Refused(f"sbatch: error: Unable to open file {path}") from None
    if not text:
        raise Refused("sbatch: error: Batch script is empty!")
    if not text.startswith("#!"):
        raise Refused("sbatch: error: This does not look like a batch script.  The first\nsbatch: error: line must start with #! followed by the path "
                      "to an interpreter.\nsbatch: error: For instance: #!/bin/sh")
    given = options(text)
    warning(given.get("signal"))
    partition = given.get("partition", "debug")
    if fault.get("kind", "").startswith("refuse"):
        raise Refused(faults.WORDS[fault["kind"]].format(partition=partition))
    if not all(p in world.LIMITS for p in partition.split(",")):
        raise Refused(faults.WORDS["refuse_partition"].format(partition=partition))
    if given.get("dependency", "singleton") != "singleton":
        raise Refused(f"the simulator knows no dependency but singleton: {given['dependency']}", 64)
    tasks = indexes(given["array"]) if "array" in given else [None]
    if not tasks or max(t or 0 for t in tasks) >= state.setting("SIM_MAX_ARRAY_SIZE"):
        raise Refused("sbatch: error: Batch job submission failed: Invalid job array specification")
    base = new_id(state)
    state.data["order"] += 1
    order = state.data["order"]
    script = f"{base}-{order}"
    with open(f"{state.folder}/scripts/{script}", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.chmod(file.name, 0o700)
    environment = {k: v for k, v in os.environ.items() if k not in ("SIM_JOB", "SLURM_RESTART_COUNT") and not k.startswith("SLURM_ARRAY_")}
    with open(f"{state.folder}/scripts/{script}.json", "w") as file:
        file.write(quick.dumps({"cwd": os.getcwd(), "environment": environment}))
    visible = state.now + fault.get("seconds", 0.0)
    for task in tasks:
        # The last task of an array keeps the array's own id, as in Slurm.
        raw = base if task is None or task == tasks[-1] else new_id(state)
        state.jobs[f"{raw}-{order}"] = {
            "raw": raw, "base": base, "index": task, "array": tasks, "order": order, "name": given.get("job-name") or os.path.basename(path),
            "user": _user(), "script": script, "options": given, "partition": partition, "minutes": minutes(given.get("time")), "state": "PENDING",
            "reason": "JobHeldUser" if "hold" in given else "None", "held": "JobHeldUser" if "hold" in given else "", "submitted": visible,
            "eligible_at": visible, "visible_at": visible, "restart": 0, "pid": None, "born": None, "fate": None, "requeue": False, "kill_at": None,
            "preempt_at": None, "grace_end": 0.0, "limit_at": None, "warn_at": None, "lost": False, "gone": False, "vanished": False,
            "runs": [{"submitted": visible, "started": None, "ended": None, "state": "PENDING", "code": "0:0", "eligible": "hold" not in given}],
        }
    return base


def squeue(state: State, arguments: list[str], fault: dict[str, Any]) -> None:
    """The one form that the controller uses."""
    user = _user()
    if arguments != [a.format(user=user) for a in SQUEUE]:
        _unspoken("squeue", arguments)
    for job in state.jobs.values():
        if job["lost"] or job["gone"] or job["visible_at"] > state.now:
            continue
        run, shown = job["runs"][-1], str(job["base"]) + ("" if job["index"] is None else f"_{job['index']}")
        began = run["started"] if run["started"] is not None else run["ended"]
        end = run["ended"]
        if end is None and began is not None:
            end = began + world.limit(job) * state.setting("SIM_MINUTE")
        print("|".join((str(job["base"]), "N/A" if job["index"] is None else str(job["index"]), job["name"], job["state"], job["reason"],
                        _time(job["submitted"], "N/A"), _time(began, "N/A"), _time(end, "N/A"), "" if run["started"] is None else "n1",
                        str(job["options"].get("nodes", "1")), shown)))


def sacct(state: State, arguments: list[str], fault: dict[str, Any]) -> None:
    """The one form that the controller uses."""
    expected = [a.format(user=_user()) for a in SACCT]
    if len(arguments) != len(expected) or not all(a == e or (e.endswith("starttime=") and a.startswith(e)) for a, e in zip(arguments, expected)):
        _unspoken("sacct", arguments)
    if state.data["accounting"] == "absent":
        _quit("Slurm accounting storage is disabled", 1)
    if state.data["accounting"] == "down":
        _quit(faults.unavailable("sacct", ""), 1)
    try:
        day, _, clock = arguments[5].partition("=")[2].partition("T")
        since = time.mktime((*(int(n) for n in day.split("-")), *(int(n) for n in clock.split(":")), 0, 0, -1))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        _quit(f"sacct: error: Invalid time specification (pos=0): {arguments[5].partition('=')[2]}", 1)
    rows: list[tuple[float, str]] = []
    waiting: dict[tuple[int, str], list[tuple[Job, dict[str, Any]]]] = {}
    at = state.now - state.setting("SIM_SACCT_LAG")
    for job in state.jobs.values():
        for run in [] if job["vanished"] or (job["lost"] and job["lost"] != "recorded") else job["runs"]:
            if run["ended"] is not None and run["ended"] < since:
                continue
            if not run.get("eligible", False) or run["submitted"] > at:
                continue
            known = dict(run)
            if run["ended"] is not None and run["ended"] > at:
                known |= {"ended": None, "state": "RUNNING" if run["started"] is not None else "PENDING", "code": "0:0"}
            if known["started"] is not None and known["started"] > at:
                known |= {"started": None, "state": "PENDING"}
            if job["index"] is not None and known["started"] is None and len(job["runs"]) == 1:
                waiting.setdefault((job["base"], known["state"]), []).append((job, known))
            else:
                shown = str(job["base"]) + ("" if job["index"] is None else f"_{job['index']}")
                rows.append((run["submitted"], _row(job, known, str(job["raw"]), shown, state.now)))
    for (base, _), tasks in waiting.items():
        job, known = tasks[0]
        rows.append((known["submitted"], _row(job, known, str(base), f"{base}_[{_spans([j['index'] for j, _ in tasks])}]", state.now)))
    for _, row in sorted(rows, key=lambda pair: pair[0]):
        print(row)


def _row(job: Job, run: dict[str, Any], raw: str, shown: str, now: float) -> str:
    started, ended = run["started"], run["ended"]
    elapsed = 0 if started is None else int(ended if ended is not None else now) - int(started)
    # Accounting stores both kinds of quotes as backquotes.
    name = job["name"].replace("'", "`").replace('"', "`")
    return "|".join((raw, shown, name, run["state"], run["code"], _time(run["submitted"], "Unknown"),
                     _time(started, "None" if ended is not None else "Unknown"), _time(ended, "Unknown"), str(elapsed),
                     "" if started is None else TRES, "None assigned" if started is None else "n1"))


def _spans(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def scancel(state: State, arguments: list[str], fault: dict[str, Any]) -> None:
    """`scancel ID...`, or `scancel --batch --state=RUNNING --signal=NAME ID...`, which passes over what waits."""
    if not arguments:
        _quit("scancel: error: No job identification provided", 1)
    ids = [a for a in arguments if not a.startswith("-")]
    flags = [a for a in arguments if a.startswith("-")]
    if not flags:
        for number in ids:
            found = world.find(state, number)
            for key, job in found:
                world.cancel(state, key, job, whole="_" not in number)
        return
    name = next((f[9:] for f in flags if f.startswith("--signal=")), "")
    if sorted(flags) != ["--batch", f"--signal={name}", "--state=RUNNING"] or not name:
        _unspoken("scancel", arguments)
    if (number := getattr(signal, f"SIG{name}", None)) is None:
        _quit(f"scancel: error: Unknown job signal: {name}", 1)
    code = 0
    for each in ids:
        live = [(k, j) for k, j in world.find(state, each) if j["state"] in world.LIVE]
        if not live:
            sys.stderr.write(f"scancel: error: Kill job error on job id {each}: Invalid job id specified\n")
            code = 1
        for key, job in live:
            if job["state"] == "RUNNING":
                world.signal_batch(state, key, job, number)
    state.commit()
    _quit("", code)


def scontrol(state: State, arguments: list[str], fault: dict[str, Any]) -> None:
    """`scontrol requeue|hold|release ID` (and `show hostnames LIST`, which asks nobody)."""
    if len(arguments) != 2 or arguments[0] not in ("requeue", "hold", "release"):
        _unspoken("scontrol", arguments)
    verb, number = arguments
    found = world.find(state, number)
    if not found:
        _quit(f"Invalid job id specified for job {number}" + ("" if verb == "requeue" else "\nslurm_suspend error: Invalid job id specified"), 1)
    for key, job in found:
        if verb == "hold" and job["state"] == "PENDING":
            world.hold(job, "JobHeldAdmin" if os.getuid() == 0 else "JobHeldUser")
        elif verb == "release" and job["state"] == "PENDING":
            world.release(job)
        elif verb == "requeue":
            if job["options"].get("no-requeue"):
                _quit(f"Requested operation is presently disabled for job {number}", 1)
            if job["state"] == "PENDING":
                _quit(f"Job is pending execution for job {number}", 1)
            if job["state"] == "RUNNING":
                world.doom(state, key, job, "REQUEUED", requeue=True)
            elif job["state"] != "COMPLETING":
                job["runs"][-1] |= {"state": "REQUEUED", "code": "0:0", "ended": state.now}
                world.requeue(state, job)
    state.commit()
    if verb == "requeue":
        return
    world.advance(state)


def sinfo(state: State, arguments: list[str], fault: dict[str, Any]) -> None:
    """Nothing but its version."""
    _unspoken("sinfo", arguments)


def sim(state: State, arguments: list[str], fault: dict[str, Any]) -> None:
    """What the class Simulator asks for: `sim VERB ID OPTIONS`."""
    verb, number, given = arguments
    try:
        answer = world.simulator(state, verb, number, quick.loads(given))
    except LookupError as error:
        _quit(str(error), 1)
    state.commit()
    world.advance(state)
    state.commit()
    print(quick.dumps(answer))


def hostnames(text: str) -> list[str]:
    """n[1-3,07],m -> n1 n2 n3 n07 m."""
    found: list[str] = []
    depth, word = 0, ""
    for char in text + ",":
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            head, bracket, rest = word.partition("[")
            inside, _, tail = rest.partition("]")
            for part in inside.split(",") if bracket else [""]:
                first, _, last = part.partition("-")
                numbers = range(int(first), int(last or first) + 1) if bracket else [None]
                found += [f"{head}{'' if n is None else str(n).zfill(len(first))}{tail}" for n in numbers]
            word = ""
        else:
            word += char
    return found
