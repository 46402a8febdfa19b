"""What a cluster must not leave behind: processes of its nodes, control groups, mounts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evo_hpc.errors import Failure
from tests.cluster.daemons import made_namespace, pid_of, slurmd
from tests.cluster.layout import Layout
from tests.cluster.processes import (
    Process, ancestors, environment, executable, is_gone, look, pids, send_to, snapshot, wait_until,
)

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Nodes:
    """By what processes of some nodes are known."""

    names: frozenset[str]
    slurm_conf: str
    daemons: frozenset[int]  # live slurmds
    logs: frozenset[str]  # each node's log, which its slurmd and step daemons hold open
    namespaces: frozenset[str]  # UTS namespaces that were made for these nodes' slurmds


def node_processes(table: Mapping[int, Process], nodes: Nodes, *, self_pid: int) -> list[Process]:
    """All that runs on these nodes, daemons first: slurmd, step daemons, jobs, whatever jobs started.

    A step daemon overwrites its environment but keeps the node's log open. A job's process says the node in its environment, descends from
    one that does, or (having cleared its environment and left its parent) shares a UTS namespace that was made for the node; that counts
    while a daemon of the node lives in it, since the kernel reuses the identities of dead ones. Never this process, its ancestors or PID 1,
    nor what is only known to descend from those.
    """
    spared = ancestors(table, self_pid)
    daemons = {pid for pid, process in table.items() if pid not in spared and _is_daemon(process, nodes)}
    spaces = ({table[pid].uts for pid in daemons} & nodes.namespaces) - {table[pid].uts for pid in spared if pid in table} - {None}
    found = set(daemons)
    for pid, process in table.items():
        marked = process.environment.get("SLURM_CONF") == nodes.slurm_conf and process.environment.get("SLURMD_NODENAME") in nodes.names
        if pid not in spared and (marked or process.uts in spaces):
            found.add(pid)
    while more := {pid for pid, process in table.items() if process.parent in found} - found - spared:
        found |= more
    return [table[pid] for pid in sorted(daemons)] + [table[pid] for pid in sorted(found - daemons)]


def _is_daemon(process: Process, nodes: Nodes) -> bool:
    """Whether it is a slurmd or a step daemon of the nodes."""
    return process.pid in nodes.daemons or (process.executable.startswith("slurmstepd") and not nodes.logs.isdisjoint(process.files))


def find_node_processes(layout: Layout, nodes: Sequence[str]) -> list[Process]:
    """The processes of these nodes of this cluster, as they are now."""
    daemons = frozenset(pid for node in nodes if (pid := pid_of(layout, slurmd(node))) is not None)
    logs = frozenset(str(layout.log(f"slurmd.{node}")) for node in nodes)
    namespaces = frozenset(name for node in nodes if (name := made_namespace(layout, node)))
    known = Nodes(frozenset(nodes), str(layout.slurm_conf), daemons, logs, namespaces)
    table = snapshot()
    # A namespace whose daemons died while the others were looked at may be another's by the end of the table.
    held = {now.uts for process in table.values() if _is_daemon(process, known) and (now := look(process.pid)) and now.started == process.started}
    return node_processes(table, replace(known, namespaces=namespaces & held), self_pid=os.getpid())


def kill_nodes(layout: Layout, nodes: Sequence[str]) -> None:
    """SIGKILL to everything on these nodes, as when their power goes; daemons first, so that none reports another's end.

    Raises Failure when something lives on.
    """
    def killed() -> bool:
        found = find_node_processes(layout, nodes)
        for process in found:
            send_to(process, signal.SIGKILL)
        wait_until(lambda: all(is_gone(process.pid) for process in found), 2, pause=0.01)
        return not found

    if not wait_until(killed, 10, pause=0):
        alive = [process.pid for process in find_node_processes(layout, nodes)]
        raise Failure(f"processes of {', '.join(nodes)} live on after SIGKILL: {alive}")


def remove_cgroups(nodes: Sequence[str]) -> None:
    """Remove the empty control groups that slurmd leaves (version 1)."""
    for node in nodes:
        for root in CGROUPS.glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(root, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    pass  # still in use, by another cluster's node of this name


def other_cgroup_clusters(layout: Layout, marker: str) -> list[str]:
    """The slurm.conf of each other live cluster that has the line `marker`: its nodes' control groups would have the same names as ours."""
    configurations = {environment(pid).get("SLURM_CONF", "") for pid in pids() if executable(pid).startswith("slurmd")}
    found = []
    for name in sorted(configurations - {"", str(layout.slurm_conf)}):
        try:
            lines = Path(name).read_text(errors="replace").splitlines()
        except OSError:
            continue  # its folder is gone
        if marker in lines:
            found.append(name)
    return found


def mounts_under(prefix: Path) -> list[Path]:
    """Mount points at or below `prefix`, deepest first."""
    fields = (line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    points = [Path(field.encode().decode("unicode_escape")) for field in fields]
    return sorted((point for point in points if point.is_relative_to(prefix)), reverse=True)


def unmount(prefix: Path) -> None:
    """Unmount what a test or a job mounted under `prefix`. Raises Failure when it cannot."""
    for point in mounts_under(prefix):
        done = subprocess.run(["umount", "-l", point], capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"{point}: cannot be unmounted ({done.stderr.strip()}); unmount it by hand, then bring the cluster down again")
