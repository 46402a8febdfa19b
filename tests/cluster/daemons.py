"""Each daemon of a cluster: how it is started, and how it is known again (its own pid file, its program, its environment)."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evo_hpc.errors import Failure
from tests.cluster.layout import Layout
from tests.cluster.packages import PATH
from tests.cluster.processes import environment, executable, is_gone, send, uts_namespace, wait_until
from tests.cluster.settings import NODES, Settings

START_SECONDS = 30
LOG_LINES = 15


@dataclass(frozen=True)
class Daemon:
    """One daemon: its name here, the program it runs, and the command that starts it."""

    name: str
    program: str
    command: tuple[str, ...]


def munged(layout: Layout) -> Daemon:
    # --force: folders like /tmp, which everybody may write to, are no reason to refuse here
    return Daemon("munged", "munged", (
        "munged", "--force", f"--key-file={layout.munge_key}", f"--socket={layout.munge_socket}", f"--pid-file={layout.pid_file('munged')}",
        f"--log-file={layout.log('munged')}", f"--seed-file={layout.munge_seed}", "--num-threads=2"))


def mariadbd(layout: Layout, settings: Settings) -> Daemon:
    # It stays in the foreground otherwise, a child of this very process.
    return Daemon("mariadbd", "mariadbd", (
        "setsid", "--fork", "mariadbd", "--no-defaults", f"--user={getpass.getuser()}", f"--datadir={layout.database}",
        f"--socket={layout.database_socket}", f"--pid-file={layout.pid_file('mariadbd')}", f"--log-error={layout.log('mariadbd')}",
        f"--init-file={layout.database_script}", "--bind-address=127.0.0.1", f"--port={settings.database_port}", "--skip-name-resolve",
        "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=64M", "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0", "--performance-schema=OFF"))


def slurmdbd() -> Daemon:
    return Daemon("slurmdbd", "slurmdbd", ("slurmdbd",))


def slurmctld() -> Daemon:
    return Daemon("slurmctld", "slurmctld", ("slurmctld",))


def slurmd(node: str) -> Daemon:
    """The daemon of one node; as root in a UTS namespace, where hostname(1) says the node's name."""
    command: tuple[str, ...] = ("slurmd", "-N", node)
    if can_unshare():
        command = ("unshare", "--uts", "sh", "-c", 'hostname "$1" && exec slurmd -N "$1"', "sh", node)
    return Daemon(f"slurmd.{node}", "slurmd", command)


def every_daemon(layout: Layout, settings: Settings) -> list[Daemon]:
    """All of them, in the order in which they start."""
    accounting = [mariadbd(layout, settings), slurmdbd()] if settings.accounting else []
    return [munged(layout), *accounting, slurmctld(), *(slurmd(node) for node in NODES)]


@cache
def can_unshare() -> bool:
    """Whether this user may make UTS namespaces: root, where no container forbids it."""
    return os.getuid() == 0 and subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0


def pid_of(layout: Layout, daemon: Daemon) -> int | None:
    """The pid of the live daemon, or None. A number in a stale file may belong to another cluster's daemon by now: SLURM_CONF tells."""
    try:
        pid = int(layout.pid_file(daemon.name).read_text())
    except (OSError, ValueError):
        return None
    ours = executable(pid).startswith(daemon.program) and environment(pid).get("SLURM_CONF") == str(layout.slurm_conf)
    return pid if ours else None


def start(layout: Layout, daemon: Daemon) -> None:
    """Start it unless it lives, and return when it has written its pid. Raises Failure with the end of its log."""
    if pid_of(layout, daemon) is not None:
        return
    layout.pid_file(daemon.name).unlink(missing_ok=True)
    home = os.environ.get("HOME", "/")
    # Little of this process's environment: jobs and daemons must not see that it may itself run in a Slurm job.
    variables = {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", "SLURM_CONF": str(layout.slurm_conf)}
    said = layout.log(f"{daemon.name}.start")
    with said.open("wb") as output:
        done = subprocess.run(daemon.command, env=variables, cwd=said.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    if done.returncode or not wait_until(lambda: pid_of(layout, daemon) is not None, START_SECONDS):
        raise failed(layout, daemon, f"ended with status {done.returncode}" if done.returncode else f"did not start within {START_SECONDS} s")


def stop(layout: Layout, daemon: Daemon, *, seconds: float) -> None:
    """SIGTERM, and SIGKILL once `seconds` have passed; nothing when it does not run."""
    if kill(layout, daemon, signal.SIGTERM, seconds=seconds):
        kill(layout, daemon, signal.SIGKILL)


def kill(layout: Layout, daemon: Daemon, number: signal.Signals = signal.SIGKILL, *, seconds: float = 5) -> bool:
    """Signal it and wait for its end; whether it still lives after `seconds`."""
    pid = pid_of(layout, daemon)
    if pid is None or not send(pid, number, lambda: pid_of(layout, daemon) == pid):
        return False
    return not wait_until(lambda: is_gone(pid), seconds, pause=0.01)


def made_namespace(layout: Layout, node: str) -> str | None:
    """The UTS namespace that was made for the node's slurmd when it last started."""
    try:
        return layout.namespace(node).read_text() or None
    except FileNotFoundError:
        return None


def start_node_daemon(layout: Layout, node: str) -> None:
    """Start the node's slurmd, and note its namespace where it got its own."""
    layout.spool(node).mkdir(exist_ok=True)
    daemon = slurmd(node)
    start(layout, daemon)
    pid = pid_of(layout, daemon)
    name = uts_namespace(pid) if pid is not None and can_unshare() else None
    layout.namespace(node).write_text(name if name and name != uts_namespace(os.getpid()) else "")


def failed(layout: Layout, daemon: Daemon, what: str) -> Failure:
    """The error to raise when a daemon `what`: with the end of its logs, and what to do."""
    logs = [path for path in (layout.log(f"{daemon.name}.start"), layout.log(daemon.name)) if _tail(path)]
    shown = "\n".join(f"--- {path}\n{_tail(path)}" for path in logs) or "(it wrote no log)"
    return Failure(f"{daemon.name} {what}. The end of its log:\n{shown}\nMend what it says, then bring the cluster up again; "
                   f"or begin afresh: python -m tests.cluster down --wipe --prefix {layout.prefix}")


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
    except FileNotFoundError:
        return ""
