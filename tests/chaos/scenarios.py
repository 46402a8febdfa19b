"""Small stories told to a Slurm cluster, real or simulated: what is submitted, what is done to it, when to look."""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.story import SQUEUE, World

LONG = "for i in $(seq 600); do sleep 0.1; done"
UNSTARTABLE = ("--partition=scavenge", "--time=3-0")
"""Waits for ever, with a reason that anybody could have."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")


def completes(w: World) -> None:
    """Runs, ends, is shown by both."""
    w.submit("a", "sleep 1")
    w.state(*ENDS)
    w.rest()


def fails(w: World) -> None:
    """Exit code 3."""
    w.submit("a", "exit 3")
    w.state(*ENDS)
    w.rest()


def dies(w: World) -> None:
    """The batch shell is killed by a signal from within."""
    w.submit("a", "kill -9 $$")
    w.submit("b", "kill -TERM $$")
    w.state(*ENDS)
    w.state(*ENDS, of="b")
    w.rest()


def no_folder(w: World) -> None:
    """The log cannot be opened."""
    w.submit("a", "true", f"--output={w.folder}/missing/a.out")
    w.state(*ENDS)
    w.rest()


def cancel_waiting(w: World) -> None:
    """Cancelled before it could start."""
    a = w.submit("a", "true", *UNSTARTABLE)
    w.accounted()
    w.rest()
    w.say("scancel", a)
    w.state(*ENDS)
    w.rest()


def cancel_running(w: World) -> None:
    """TERM to all of it."""
    a = w.submit("a", f"{LONG} & wait")
    w.started()
    w.rest()
    w.say("scancel", a)
    w.state(*ENDS)
    w.rest()


def cancel_stubborn(w: World) -> None:
    """TERM is trapped and shrugged off: KILL follows."""
    a = w.submit("a", f"trap 'echo TERM >> {w.folder}/a.log' TERM; {LONG}")
    w.started()
    w.say("scancel", a)
    w.state(*ENDS)
    w.rest()


def signal_batch(w: World) -> None:
    """A signal to the batch shell alone, which ends in good order; one that waits is passed over without a word."""
    b = w.submit("b", "true", *UNSTARTABLE)
    a = w.submit("a", f"trap 'echo TERM >> {w.folder}/a.log; exit 0' TERM; (trap 'echo child >> {w.folder}/a.log' TERM; {LONG}) & wait")
    w.started()
    w.rest()
    w.say("scancel", "--batch", "--state=RUNNING", "--signal=TERM", b)
    w.say("scancel", "--batch", "--state=RUNNING", "--signal=TERM", a)
    w.state(*ENDS)
    w.rest()
    w.say("scancel", b)
    w.rest()


def preempted(w: World) -> None:
    """The warning, the kill after the grace, the requeue, the second start."""
    body = f"trap 'echo USR2 >> {w.folder}/a.log' USR2; trap 'echo TERM >> {w.folder}/a.log' TERM\n[ \"$SLURM_RESTART_COUNT\" ] && exit 0\n{LONG}"
    a = w.submit("a", body, "--partition=scavenge", "--exclusive", "--nodelist=n4", "--signal=B:USR2@60", "--requeue")
    w.started()
    w.rest()
    w.preempt(w, a)
    w.started(4)
    w.state(*ENDS)
    w.rest()


def requeued(w: World) -> None:
    """By scontrol, from outside."""
    a = w.submit("a", f"[ \"$SLURM_RESTART_COUNT\" ] && exit 0\n{LONG}", "--requeue")
    w.started()
    w.say("scontrol", "requeue", a)
    w.started(2)
    w.state(*ENDS)
    w.rest()


def requeues_itself(w: World) -> None:
    """By scontrol, from within; it then waits to be killed."""
    w.submit("a", f"[ \"$SLURM_RESTART_COUNT\" ] && exit 0\ntrap '' TERM\nscontrol requeue $SLURM_JOB_ID\n{LONG}", "--requeue")
    w.started(2)
    w.state(*ENDS)
    w.rest()


def requeued_after_its_end(w: World) -> None:
    """A completed job starts again."""
    a = w.submit("a", "true", "--requeue")
    w.state(*ENDS)
    w.rest()
    w.say("scontrol", "requeue", a)
    w.started(2)
    w.state(*ENDS)
    w.rest()


def requeue_refused(w: World) -> None:
    """Where it may not, has not started, or is not known."""
    a = w.submit("a", LONG, "--no-requeue")
    b = w.submit("b", "true", "--hold")
    w.started()
    for number in (a, b, "999999"):
        w.say("scontrol", "requeue", number)
    w.run("scancel", a, b)
    w.state(*ENDS)
    w.rest()


def held(w: World) -> None:
    """Submitted, held, released; another is cancelled while it is held."""
    a, b = w.submit("a", "true", *UNSTARTABLE), w.submit("b", "true", "--hold")
    w.accounted()
    w.rest()
    w.say("scontrol", "hold", a)
    w.rest()
    w.say("scancel", a)
    w.say("scontrol", "release", b)
    w.state(*ENDS, of="b")
    w.rest()


def held_and_cancelled(w: World) -> None:
    """Accounting does not tell of one that was never eligible."""
    a = w.submit("a", "true", "--hold")
    w.rest()
    w.say("scancel", a)
    w.rest()


def array(w: World) -> None:
    """Three tasks, one of which fails."""
    w.submit("a", "sleep 1; [ $SLURM_ARRAY_TASK_ID != 3 ] || exit 5", "--array=1,3,4")
    w.until(lambda seen: all((seen.get(f"a.{i}", {}).get("squeue") or [""])[0] in ENDS for i in (1, 3, 4)))
    w.rest()


def array_waiting(w: World) -> None:
    """One task is cancelled before its start, then the others."""
    a = w.submit("a", "true", "--array=0-2", *UNSTARTABLE)
    w.accounted("a.[0-2]")
    w.rest()
    w.say("scancel", f"{a}_1")
    w.accounted("a.[0,2]")
    w.rest()
    w.say("scancel", a)
    w.rest()


def array_task_cancelled(w: World) -> None:
    """A running task is cancelled, the other is requeued by its own id."""
    a = w.submit("a", f"[ \"$SLURM_RESTART_COUNT\" ] && exit 0\n{LONG}", "--array=0-1", "--requeue")
    w.started(2)
    w.say("scancel", f"{a}_1")
    w.say("scontrol", "requeue", f"{a}_0")
    w.started(3)
    w.until(lambda seen: all((seen.get(f"a.{i}", {}).get("squeue") or [""])[0] in ENDS for i in (0, 1)))
    w.rest()


def refused(w: World) -> None:
    """What Slurm says to a script that it does not take."""
    w.submit("a", "true", "--partition=nope")
    w.submit("b", "true", "--signal=B:FOO@1")
    w.submit("c", "true", "--array=0-99999")
    w.submit("d", "true", "--nonsense=1")
    w.say("sbatch", "--parsable", str(w.folder / "missing.sh"))
    for name, text in (("empty", ""), ("shebang", "echo hello\n")):
        (w.folder / name).write_text(text)
        w.say("sbatch", "--parsable", str(w.folder / name))


def unknown(w: World) -> None:
    """Ids that Slurm does not know, or that have ended."""
    a, b = w.submit("a", "true"), "999999"
    w.state(*ENDS)
    for number in (a, b):
        w.say("scancel", number)
        w.say("scancel", "--batch", "--state=RUNNING", "--signal=TERM", number)
    w.say("scancel", a, b)
    w.say("scancel")
    w.say("scontrol", "hold", b)


def singleton(w: World) -> None:
    """The second of a name waits for the first."""
    name = f"{w.tag}-same"
    body = f"for i in $(seq 100); do [ -e {w.folder}/go ] && exit; sleep 0.1; done"
    w.submit("a", body, "--dependency=singleton", name=name)
    w.started()
    w.names.pop(name)
    other = w.submit("b", "true", "--dependency=singleton", name=name)
    user = pwd.getpwuid(os.getuid()).pw_name

    def words() -> list[str]:
        lines = w.run("squeue", "--noheader", "--array", "--states=all", f"--user={user}", SQUEUE).stdout.splitlines()
        return [":".join(line.split("|")[3:5]) for line in lines if line.startswith(f"{other}|")]

    time.sleep(w.quiet)
    w.commands.append({"waiting": words()})
    (w.folder / "go").touch()
    end = time.monotonic() + w.patience
    while words() != ["COMPLETED:None"]:
        assert time.monotonic() < end, words()
        time.sleep(w.poll)


def hostile(w: World) -> None:
    """Quotes, blanks, hashes, backslashes and patterns in a name and a path."""
    name = f"{w.tag} it's \"so\" #1 %j $(x)"
    w.names[name] = "a"
    w.submit("a", 'echo "$SLURM_JOB_NAME"', f'--job-name="{w.tag} it\'s \\"so\\" #1 %j $(x)"', f"--output='{w.folder}/100%% o\"f # %x %A-%a.out'", name=name)
    w.state(*ENDS)
    w.rest()
    w.submit("b", 'echo hello', f"--output={w.folder}/b-%j-%4A-%u-%N # a comment --hold")
    w.state(*ENDS, of="b")
    (a, b) = w.ids
    user = pwd.getpwuid(os.getuid()).pw_name
    files = sorted(p for p in w.folder.iterdir() if p.suffix == ".out" or p.name.startswith("b-"))
    w.commands += [{"file": re.sub(r"-n\d$", "-<node>", w._plain(p.name.replace(f"-{int(b):04}-", "-<b4>-")).replace(f"-{user}-", "-<user>-")),
                    "text": w._plain(p.read_text())} for p in files]


def environment(w: World) -> None:
    """What a script finds in its environment."""
    names = "SLURM_JOB_ID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_MIN SLURM_ARRAY_TASK_MAX SLURM_RESTART_COUNT SLURM_JOB_NAME SLURM_JOB_NUM_NODES " \
            "SLURM_NNODES SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURM_JOB_PARTITION SLURM_CLUSTER_NAME SLURM_OPEN_MODE MINE"
    w.environment = {**w.environment, "MINE": "taken along"}
    a = w.submit("a", f'for n in {names}; do echo "$n=${{!n-(unset)}}" >> {w.folder}/a.log; done', "--partition=debug")
    b = w.submit("b", f'for n in {names}; do echo "$n=${{!n-(unset)}}" >> {w.folder}/b.log; done', "--array=7", "--partition=debug")
    w.state(*ENDS)
    w.state(*ENDS, of="b.7")
    for word in ("a", "b"):
        path = w.folder / f"{word}.log"
        path.write_text(path.read_text().replace(a, "<a>").replace(b, "<b>").replace(w.tag, "<tag>"))


SCENARIOS: dict[str, Callable[[World], None]] = {f.__name__: f for f in (
    completes, fails, dies, no_folder, cancel_waiting, cancel_running, cancel_stubborn, signal_batch, preempted, requeued, requeues_itself,
    requeued_after_its_end, requeue_refused, held, held_and_cancelled, array, array_waiting, array_task_cancelled, refused, unknown, singleton,
    hostile, environment,
)}


def play(name: str, world: World) -> dict[str, Any]:
    """One scenario from beginning to end; whatever it leaves is cancelled."""
    world.folder.mkdir(parents=True, exist_ok=True)
    try:
        SCENARIOS[name](world)
        return world.outcome()
    finally:
        if world.ids:
            world.run("scancel", *world.ids)


def preempt_for_real(world: World, job_id: str) -> None:
    """Ask for the same node, in a partition of higher priority."""
    script = world.folder / "urgent.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --job-name={world.tag}-urgent --partition=debug --exclusive --nodelist=n4 --output=/dev/null\n")
    done = world.run("sbatch", "--parsable", str(script))
    assert done.returncode == 0, done.stderr
    world.ids[done.stdout.strip()] = "urgent"


def real(folder: Path, environment: dict[str, str]) -> World:
    """A live cluster as tests/cluster makes it."""
    return World(folder, environment, quiet=3.0, poll=0.1, preempt=preempt_for_real)
