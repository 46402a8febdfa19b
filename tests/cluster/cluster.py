"""`Cluster`: a whole Slurm cluster under one folder, brought up and down, and broken on purpose."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evo_hpc.errors import Failure, UserError
from tests.cluster import daemons
from tests.cluster.daemons import Daemon, every_daemon, failed, pid_of, start
from tests.cluster.hosts import remove_hosts
from tests.cluster.layout import Layout
from tests.cluster.packages import ensure_packages
from tests.cluster.prepare import prepare
from tests.cluster.processes import wait_until
from tests.cluster.settings import NODES, Settings, read_settings
from tests.cluster.teardown import kill_nodes, remove_cgroups, unmount

READY_SECONDS = 60
FOREIGN = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_")
SERVING = frozenset({"idle", "mix", "mixed", "alloc", "allocated", "comp", "completing"})


@dataclass(frozen=True)
class Cluster:
    """The cluster under `prefix`; the other fields count when it is brought up from nothing.

    `base_port`: the first of 16 ports; None finds free ones, and the same again the next time. `accounting`: slurmdbd and MariaDB, so that
    sacct works. `cgroup`: jobs in control groups (root, version 1), which makes real OUT_OF_MEMORY.
    """

    prefix: Path
    base_port: int | None = None
    accounting: bool = True
    cgroup: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(Path(os.path.abspath(self.prefix)))

    @property
    def settings(self) -> Settings:
        """What it was brought up with. Raises UserError where no cluster was."""
        settings = read_settings(self.layout)
        if settings is None:
            raise UserError(f"{self.layout.prefix}: no cluster was brought up here; python -m tests.cluster up --prefix {self.layout.prefix}")
        return settings

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to talk to this cluster."""
        return {"SLURM_CONF": str(self.layout.slurm_conf)}

    def up(self) -> None:
        """Start what does not run, and return when all nodes serve. A cluster that is up is left as it is.

        Raises UserError when packages or ports are missing or the cluster is up with other settings, Failure when a daemon does not start.
        """
        ensure_packages(accounting=self.accounting)
        layout = self.layout
        with _locked(layout.prefix):
            settings = prepare(layout, base_port=self.base_port, accounting=self.accounting, cgroup=self.cgroup)
            # The database takes longest and needs nobody.
            first = [daemons.mariadbd(layout, settings)] if settings.accounting else []
            for daemon in [*first, daemons.munged(layout)]:
                start(layout, daemon)
            _wait(layout, daemons.munged(layout), layout.munge_socket.is_socket)
            if settings.accounting:
                _wait(layout, first[0], lambda: _listens(settings.database_port))
                self._start_accounting()
            start(layout, daemons.slurmctld())
            for node in NODES:
                daemons.start_node_daemon(layout, node)
            if not wait_until(lambda: set(NODES) <= self._serving(), READY_SECONDS, pause=0.1):
                late = sorted(set(NODES) - self._serving())
                raise failed(layout, daemons.slurmd(late[0]) if late else daemons.slurmctld(), f"is not in service after {READY_SECONDS} s")

    def down(self, *, wipe: bool = False) -> None:
        """Cancel all jobs and stop all that runs; `wipe` also removes the folder (and then nothing is stopped gently)."""
        layout = self.layout
        if not layout.settings.exists():
            return
        with _locked(layout.prefix):
            settings = read_settings(layout)
            if settings is None:
                return  # another process wiped it meanwhile
            running = [daemon for daemon in every_daemon(layout, settings) if pid_of(layout, daemon) is not None]
            if not wipe and any(daemon.name == "slurmctld" for daemon in running):
                self._cancel_jobs()
            kill_nodes(layout, NODES)
            for daemon in reversed(running):
                if wipe:
                    daemons.kill(layout, daemon)
                else:
                    daemons.stop(layout, daemon, seconds=20)
            if settings.cgroup:
                remove_cgroups(NODES)
            remove_hosts(layout.prefix)
            unmount(layout.prefix)
            if wipe:
                _remove(layout)

    def running(self) -> dict[str, int | None]:
        """The pid of each daemon by name, None where it does not run."""
        return {daemon.name: pid_of(self.layout, daemon) for daemon in every_daemon(self.layout, self.settings)}

    def run(self, *command: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster, without Slurm's variables of any other; raises TimeoutExpired after `timeout` seconds."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return subprocess.run(command, env=kept | self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)

    def wait_idle(self, timeout: float = 60) -> None:
        """Wait until every node is idle: up, and with no job on it. Raises Failure after `timeout` seconds, with what is not."""
        if not wait_until(lambda: set(self._states().values()) == {"idle"}, timeout, pause=0.1):
            nodes, jobs = self._states() or "no answer from slurmctld", self.run("squeue", "--noheader").stdout.rstrip() or "(none)"
            raise Failure(f"{self.prefix}: not idle after {timeout:g} s. Nodes: {nodes}. Jobs:\n{jobs}")

    def kill_ctld(self) -> None:
        """SIGKILL to slurmctld: what it had not saved is lost."""
        daemons.kill(self.layout, daemons.slurmctld())

    def start_ctld(self) -> None:
        """Start slurmctld, and return when it answers."""
        start(self.layout, daemons.slurmctld())
        _wait(self.layout, daemons.slurmctld(), lambda: bool(self._states()))

    def kill_node(self, name: str) -> None:
        """The node's power goes: SIGKILL to slurmd, its step daemons and all processes of its jobs."""
        kill_nodes(self.layout, [_node(name)])

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL to slurmd alone: Slurm takes the node for dead, and its jobs live on."""
        daemons.kill(self.layout, daemons.slurmd(_node(name)))

    def start_node(self, name: str) -> None:
        """Start the node's slurmd, and return when slurmctld has it in service (or when it listens, while slurmctld is down)."""
        daemon = daemons.slurmd(_node(name))
        daemons.start_node_daemon(self.layout, name)
        _wait(self.layout, daemon, lambda: name in self._serving() if self.running()["slurmctld"] else _listens(self.settings.node_port(name)))

    def stop_dbd(self) -> None:
        """Stop slurmdbd: sacct fails, and slurmctld keeps its records until it is back."""
        daemons.stop(self.layout, daemons.slurmdbd(), seconds=10)

    def start_dbd(self) -> None:
        """Start slurmdbd, and return when it answers."""
        if not self.settings.accounting:
            raise UserError(f"{self.prefix}: this cluster has no accounting; bring it down, and up without --no-accounting")
        self._start_accounting()

    def _start_accounting(self) -> None:
        daemon = daemons.slurmdbd()
        start(self.layout, daemon)
        _wait(self.layout, daemon, lambda: self.run("sacctmgr", "-n", "list", "cluster").returncode == 0)
        if "evo" not in self.run("sacctmgr", "-nP", "list", "cluster", "format=cluster").stdout.split():
            self.run("sacctmgr", "-iQ", "add", "cluster", "evo")

    def _states(self) -> dict[str, str]:
        """Each node's state in sinfo's words, with its flags (`down*`); empty when slurmctld does not answer."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def _serving(self) -> set[str]:
        return {node for node, state in self._states().items() if state in SERVING}

    def _cancel_jobs(self) -> None:
        """Best effort, for the records' sake: what lives on is killed."""
        try:
            self.run("scancel", "--quiet", "--signal=KILL", "--full", "--state=RUNNING", timeout=10)
            self.run("scancel", "--quiet", f"--user={getpass.getuser()}", timeout=10)
            wait_until(lambda: not self.run("squeue", "-h", timeout=10).stdout.strip(), 6, pause=0.1)
        except subprocess.TimeoutExpired:
            pass


def _node(name: str) -> str:
    if name not in NODES:
        raise UserError(f"no node {name!r}; there are {', '.join(NODES)}")
    return name


def _wait(layout: Layout, daemon: Daemon, ready: Callable[[], bool]) -> None:
    if not wait_until(ready, READY_SECONDS):
        raise failed(layout, daemon, f"does not answer after {READY_SECONDS} s")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _remove(layout: Layout) -> None:
    """Remove the folder; the settings last, so that whoever dies in between leaves a folder that can still be wiped."""
    for path in layout.prefix.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != layout.settings:
            path.unlink()
    layout.settings.unlink()
    layout.prefix.rmdir()


@contextmanager
def _locked(prefix: Path) -> Iterator[None]:
    """One process at a time brings this cluster up or down; the lock is the folder itself, which a waiting process may see wiped."""
    while True:
        prefix.mkdir(parents=True, exist_ok=True)
        folder = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(folder), prefix.stat())
            except FileNotFoundError:
                same = False
            if same:
                yield
                return
        finally:
            os.close(folder)
