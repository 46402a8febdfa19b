"""The process that has everything imported, and forks: cases, and the launchers of their jobs. Importing costs more than a whole campaign.

Roles are forks of their launcher, too.
"""

from __future__ import annotations

import array
import gc
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from evo_hpc.paths import CampaignPaths, JobPaths
from tests.chaos.points import Recorder

HERE = Path(__file__).resolve().parent
Work = Callable[[Any, str], Any]


def serve(work: Work, at_once: int) -> None:
    """For each line of JSON on stdin fork a process that does `work(value, python)`; print a line of JSON for what it returned.

    `python`: the interpreter that jobs are to have. No more than `at_once` at the same time. Ends when stdin has ended.
    """
    gc.collect()
    gc.freeze()
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen(64)
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec '{os.path.realpath(sys.executable)}' -S -E '{HERE / 'quick_python.py'}' '{folder / 'socket'}' \"$@\"\n")
    python.chmod(0o755)
    waiting = [json.loads(line) for line in sys.stdin if line.strip()]
    running: dict[int, tuple[Any, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    while waiting or running:
        while waiting and len(running) < at_once:
            value = waiting.pop(0)
            told, tell = os.pipe()
            child = os.fork()
            if child == 0:
                listening.close()
                os.close(told)
                _work(work, value, str(python), tell)
            os.close(tell)
            running[told] = (value, child)
            selector.register(told, selectors.EVENT_READ, bytearray())
        for key, _ in selector.select(timeout=1.0):
            if key.fileobj is listening:
                connection, _ = listening.accept()
                if os.fork() == 0:
                    _launch(connection, listening)
                connection.close()
                continue
            assert isinstance(key.fileobj, int)
            if data := os.read(key.fileobj, 65536):
                key.data.extend(data)
                continue
            selector.unregister(key.fileobj)
            os.close(key.fileobj)
            value, child = running.pop(key.fileobj)
            os.waitpid(child, 0)
            answer = json.loads(key.data) if key.data else {"error": "the process of the case died"}
            print(json.dumps({"case": value, **answer}), flush=True)
        _reap({child for _, child in running.values()})
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _reap(kept: set[int]) -> None:
    """Collect launchers that have ended."""
    for entry in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if int(entry) not in kept:
            os.waitpid(int(entry), os.WNOHANG)


def _work(work: Work, value: Any, python: str, tell: int) -> NoReturn:
    try:
        answer = {"answer": work(value, python)}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer["cpu"] = round(sum(u.ru_utime + u.ru_stime for u in used), 2)
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(tell, data) :]
    os._exit(0)


def _launch(connection: socket.socket, listening: socket.socket) -> NoReturn:
    """A launcher: takes over the arguments, environment, folder and streams of the stand-in that asked."""
    code = 70
    try:
        listening.close()
        os.setsid()
        head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12), socket.MSG_WAITALL)
        streams = array.array("i")
        streams.frombytes(ancillary[0][2])
        left, data = int.from_bytes(head, "big"), b""
        while len(data) < left:
            data += connection.recv(left - len(data))
        words, environment, folder = data.decode("utf-8", "surrogateescape").split("\0\0")
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environ.clear()
        os.environ.update(pair.split("=", 1) for pair in environment.split("\0"))
        os.chdir(folder)
        connection.sendall(os.getpid().to_bytes(8, "big"))
        threading.Thread(target=_die_with, args=[connection], daemon=True).start()
        code = _launcher(words.split("\0"))
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            connection.sendall(bytes([code & 255]))
        finally:
            os._exit(code)


def _die_with(connection: socket.socket) -> None:
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _launcher(arguments: list[str]) -> int:
    import evo_hpc.dispatch.launcher as launcher

    assert arguments[:2] == ["-m", "evo_hpc.dispatch.launcher"], arguments
    launcher.subprocess = _Subprocess()  # type: ignore[attr-defined]
    job = JobPaths(Path(arguments[arguments.index("--job") + 1]))
    root = CampaignPaths.of_job(job).root
    Recorder(root, root.parent / "jobs.log", context=f"{job.root.relative_to(root)}").install()
    return launcher.main(arguments[2:])


class _Subprocess:
    """`subprocess` as the launcher sees it: a role is a fork."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    def Popen(self, command: list[str], *, stdout: Any, env: dict[str, str], **_: Any) -> subprocess.Popen[bytes]:
        words = command[command.index("evo_hpc.jobs.role") + 1 :]
        child = os.fork()
        if child:
            return _Role(child)  # type: ignore[return-value]
        os.dup2(stdout.fileno(), 1)
        os.dup2(stdout.fileno(), 2)
        os.environ.clear()
        os.environ.update(env)
        from evo_hpc.jobs import role

        role.main(words)


class _Role:
    """As much of Popen as the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("role", timeout or 0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
