"""The step daemon of one start of a job: runs the script, sweeps what it leaves, and writes how it ended."""

from __future__ import annotations

import os
import _signal as signal  # without its enums
import time

import processes
import quick
from batch import file_name

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest
if TYPE_CHECKING:
    from typing import Any


def launch(folder: str, key: str, start: int) -> tuple[int, int | None, int]:
    """Begin a step daemon that waits; its pid, its birth, and the descriptor to write to (or to close: it goes away)."""
    wait, go = os.pipe()
    tell, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(told, str(os.getpid()).encode())
            nowhere = os.open("/dev/null", os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nowhere, descriptor)
            os.dup2(wait, 3)
            os.closerange(4, 4096)
            if os.read(3, 1):
                os.close(3)
                run = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run.py")
                python = os.readlink("/proc/self/exe")
                os.execve(python, [python, "-S", "-E", run, "stepd", key, str(start)], {"SIM_STATE": folder, "PATH": os.defpath})
        finally:
            os._exit(0)
    os.close(wait)
    os.close(told)
    os.waitpid(child, 0)
    pid = int(os.read(tell, 20))
    os.close(tell)
    return pid, processes.born(pid), go


def marker(folder: str, key: str, start: int) -> str:
    """The value of SIM_JOB in the environment of a start's processes."""
    return f"{folder}|{key}|{start}"


def main(folder: str, key: str, start: int) -> None:
    """The daemon itself, in a process and session of its own."""
    from state import State
    from world import advance

    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    with open(f"{folder}/state.json") as file:
        job = quick.loads(file.read())["jobs"][key]
    if job["pid"] != os.getpid() or len(job["runs"]) - 1 != start:
        return
    mark = marker(folder, key, start)
    try:
        code = _run(folder, key, start, job, mark)
    except OSError as error:
        with open(f"{folder}/stepd.log", "a") as log:
            log.write(f"{key}.{start}: {error}\n")
        code = None
    processes.sweep(os.getpid(), processes.born(os.getpid()), mark)
    temporary = f"{folder}/runs/{key}.{start}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(quick.dumps({"status": code, "at": time.time()}))
    os.replace(temporary, f"{folder}/runs/{key}.{start}.end")
    with State(folder) as state:
        advance(state)
        state.commit()
    # Somebody must be there when a requeued job may start again.
    until = time.monotonic() + 5
    while (left := tick(folder)) < until - time.monotonic():
        time.sleep(max(0.02, left))


def _run(folder: str, key: str, start: int, job: dict[str, Any], mark: str) -> int:
    """The wait status of the batch shell. Raises OSError when its log cannot be opened."""
    options, array = job["options"], job["index"] is not None
    with open(f"{folder}/scripts/{job['script']}.json") as file:
        submitted = quick.loads(file.read())
    folder_of_job = options.get("chdir") or submitted["cwd"]
    directory = folder_of_job if os.path.isdir(folder_of_job) else "/tmp"
    # As Slurm has it: appended to when asked for, else begun anew, also after a requeue.
    mode = os.O_APPEND if str(options.get("open-mode", "")).startswith("a") else os.O_TRUNC
    pattern = options.get("output") or ("slurm-%A_%a.out" if array else "slurm-%j.out")
    log = os.open(os.path.join(directory, file_name(pattern, job)), os.O_WRONLY | os.O_CREAT | mode, 0o644)
    errors = log if "error" not in options else os.open(os.path.join(directory, file_name(options["error"], job)), os.O_WRONLY | os.O_CREAT | mode, 0o644)
    environment = {**submitted["environment"], **_variables(folder, job, start, submitted["cwd"]), "SIM_JOB": mark}
    script = f"{folder}/scripts/{job['script']}"
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(directory)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(errors, 2)
            os.closerange(3, 256)
            os.execve(script, [script], environment)
        finally:
            os._exit(127)
    temporary = f"{folder}/runs/{key}.{start}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(str(child))
    os.replace(temporary, f"{folder}/runs/{key}.{start}.pid")
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        signal.sigtimedwait([signal.SIGCHLD], 0.05)
        tick(folder)


def tick(folder: str) -> float:
    """Move the cluster on when something is due by itself; seconds until the next such thing. Raises OSError when the folder is gone."""
    from state import State
    from world import advance

    if os.stat(f"{folder}/due").st_mtime <= time.time():
        with State(folder) as state:
            advance(state)
            state.commit()
            # Nothing came of it: not before the next change.
            os.utime(f"{folder}/due", (0, max(os.stat(f"{folder}/due").st_mtime, state.now + 0.02)))
    return os.stat(f"{folder}/due").st_mtime - time.time()


def _variables(folder: str, job: dict[str, Any], start: int, cwd: str) -> dict[str, str]:
    options = job["options"]
    nodes, tasks = options.get("nodes", "1"), options.get("ntasks-per-node", "1")
    made = {
        "SLURM_JOB_ID": job["raw"], "SLURM_JOBID": job["raw"], "SLURM_JOB_NAME": job["name"], "SLURM_CLUSTER_NAME": "evo", "SLURM_JOB_NODELIST": "n1",
        "SLURM_NODELIST": "n1", "SLURM_NODEID": 0, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_GTIDS": 0, "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes, "SLURM_TASKS_PER_NODE": tasks, "SLURM_JOB_PARTITION": job["partition"], "SLURM_JOB_USER": job["user"],
        "SLURM_JOB_UID": os.getuid(), "SLURM_JOB_QOS": options.get("qos", "normal"), "SLURM_SUBMIT_DIR": cwd, "SLURMD_NODENAME": "n1",
        "SLURM_JOB_CPUS_PER_NODE": options.get("cpus-per-task", "1"), "SLURM_CPUS_ON_NODE": options.get("cpus-per-task", "1"),
        "SLURM_TASK_PID": os.getpid(),
    }
    if str(options.get("open-mode", ""))[:1] in ("a", "t"):
        made["SLURM_OPEN_MODE"] = str(options["open-mode"])[:1]
    if job["restart"]:
        made["SLURM_RESTART_COUNT"] = job["restart"]
    if job["index"] is not None:
        every = job["array"]
        made |= {"SLURM_ARRAY_JOB_ID": job["base"], "SLURM_ARRAY_TASK_ID": job["index"], "SLURM_ARRAY_TASK_COUNT": len(every),
                 "SLURM_ARRAY_TASK_MIN": min(every), "SLURM_ARRAY_TASK_MAX": max(every), "SLURM_ARRAY_TASK_STEP": 1}
    return {name: str(value) for name, value in made.items()}
