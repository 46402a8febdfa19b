"""The jobs' interpreter, quickly: has an already imported process fork, stands for the fork among the job's processes, and dies with it.

Run as `python -S -E quick_python.py SOCKET ARGUMENTS...`. Signals are passed on; whoever kills this process kills the fork, which sees the
connection close.
"""

import array
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def main() -> None:
    early = []
    fork = [0]

    def passed_on(number, frame):  # type: ignore[no-untyped-def]
        if not fork[0]:
            early.append(number)
            return
        try:
            os.kill(fork[0], number)
        except ProcessLookupError:
            pass

    for number in SIGNALS:
        signal.signal(number, passed_on)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    words = "\0\0".join(("\0".join(sys.argv[2:]), "\0".join(f"{k}={v}" for k, v in os.environ.items()), os.getcwd()))
    data = words.encode("utf-8", "surrogateescape")
    connection.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    connection.sendall(data)
    fork[0] = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    for number in early:
        passed_on(number, None)
    code = connection.recv(1)
    os._exit(code[0] if code else 137)


main()
