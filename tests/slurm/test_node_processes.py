"""Which processes count as a node's: a pure choice over made-up tables, since a wrong one would be killed."""

from __future__ import annotations

from tests.cluster.processes import Process
from tests.cluster.teardown import Nodes, node_processes

CONF, LOG, SPACE, MACHINE = "/c/etc/slurm.conf", "/c/log/slurmd.n1.log", "uts:[7]", "uts:[1]"
N1 = Nodes(frozenset({"n1"}), CONF, frozenset({20}), frozenset({LOG}), frozenset({SPACE}))
JOB = {"SLURM_CONF": CONF, "SLURMD_NODENAME": "n1"}
SHELL, PYTEST = 10, 11


def table(*more: Process) -> dict[int, Process]:
    """PID 1, whose namespace cannot be read, a shell with a pytest, another shell, and the node's slurmd."""
    common = (Process(1, 0, "0"), Process(SHELL, 1, "1", "bash", MACHINE), Process(PYTEST, SHELL, "2", "python", MACHINE),
              Process(12, 1, "3", "bash", MACHINE, {"SLURM_CONF": CONF}), Process(20, 1, "4", "slurmd-wlm", SPACE, {"SLURM_CONF": CONF}))
    return {process.pid: process for process in (*common, *more)}


def chosen(processes: dict[int, Process], nodes: Nodes = N1) -> list[int]:
    return [process.pid for process in node_processes(processes, nodes, self_pid=PYTEST)]


def test_daemons_come_first_then_all_that_jobs_started() -> None:
    processes = table(
        Process(21, 20, "5", "slurmstepd-wlm", SPACE, {}, (LOG,)), Process(8, 21, "6", "sh", SPACE, JOB), Process(9, 8, "7", "sleep", "uts:[9]"),
        Process(30, 1, "8", "hidden", SPACE), Process(31, 1, "9", "slurmstepd-wlm", MACHINE, {}, ("/other/log/slurmd.n1.log",)),
        Process(32, 1, "9", "sh", MACHINE, JOB | {"SLURM_CONF": "/other/etc/slurm.conf"}), 
        Process(33, 1, "9", "sh", MACHINE, JOB | {"SLURMD_NODENAME": "n2"}))
    assert chosen(processes) == [20, 21, 8, 9, 30]


def test_what_cannot_be_read_matches_nothing() -> None:
    """A slurmd that is just dying has no namespace to read, and nor has PID 1, from which everything descends."""
    dying = table(Process(30, 1, "8", "sleep", None))
    dying[20] = Process(20, 1, "4", "slurmd-wlm", None, {"SLURM_CONF": CONF})
    assert chosen(dying) == [20]
    assert chosen(dying, Nodes(N1.names, CONF, N1.daemons, N1.logs, frozenset({""}))) == [20]


def test_the_machines_own_namespace_is_nobodys() -> None:
    """Where slurmd could get none of its own, or a stale note names it."""
    processes = table()
    processes[20] = Process(20, 1, "4", "slurmd-wlm", MACHINE, {"SLURM_CONF": CONF})
    assert chosen(processes, Nodes(N1.names, CONF, N1.daemons, N1.logs, frozenset({MACHINE}))) == [20]


def test_a_noted_namespace_counts_only_while_a_daemon_lives_in_it() -> None:
    """Its identity may be another cluster's by now."""
    processes = table(Process(40, 1, "8", "slurmd-wlm", SPACE, {"SLURM_CONF": "/other/etc/slurm.conf"}))
    del processes[20]
    assert chosen(processes) == []


def test_this_process_and_its_ancestors_are_spared_whatever_they_look_like() -> None:
    """Also when the tests run in a job of the very cluster; its other children still go."""
    processes = table(Process(21, 20, "5", "slurmstepd-wlm", SPACE, {}, (LOG,)))
    processes[SHELL] = Process(SHELL, 21, "1", "bash", SPACE, JOB)
    processes[PYTEST] = Process(PYTEST, SHELL, "2", "python", SPACE, JOB)
    assert not {1, SHELL, PYTEST, 12} & set(chosen(processes))
    assert chosen(table(), Nodes(N1.names, CONF, frozenset({1}), N1.logs, N1.namespaces)) == []
