"""What a live cluster offers this user, read from Slurm's own commands into records."""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from evo_hpc.dispatch.slurm.commands import Answer
from evo_hpc.dispatch.slurm.environment import login
from evo_hpc.dispatch.slurm.errors import refusal
from evo_hpc.dispatch.slurm.words import Gres, expand_nodes, parse_gres, parse_minutes, parse_seconds, parse_tres, split_list
from evo_hpc.errors import Failure

QUESTIONS: dict[str, tuple[str, ...]] = {
    "config": ("scontrol", "show", "config"),
    "partitions": ("scontrol", "--oneliner", "--all", "show", "partition"),
    "nodes": ("sinfo", "--noheader", "--Node", "--all", "--format=%N|%P|%T|%c|%m|%G|%f"),
    "reservations": ("scontrol", "--oneliner", "show", "reservation"),
}
"""Asked of every cluster."""
ACCOUNTING_QUESTIONS: dict[str, tuple[str, ...]] = {
    "associations": ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", "user={user}", "cluster={cluster}",
                     "format=Account,Partition,QOS,DefaultQOS,MaxWall,MaxSubmit,GrpTRES,MaxTRES"),
    "user": ("sacctmgr", "--noheader", "--parsable2", "show", "user", "{user}", "format=DefaultAccount"),
    "qos": ("sacctmgr", "--noheader", "--parsable2", "show", "qos",
            "format=Name,GraceTime,Preempt,PreemptMode,MaxWall,MaxSubmitPU,GrpTRES,MaxTRES,MaxTRESPU"),
}
"""Asked where there is an accounting database."""

GONE_STATES = ("down", "drain", "fail", "error", "inval", "unknown", "future", "perfctrs", "blocked")
"""Beginnings of sinfo's words for nodes that will run nothing until somebody sees to them."""


class SiteUnreadable(Failure):
    """Slurm answered a question about the cluster in a form that is not known."""


class Asks(Protocol):
    """The part of Commands that is needed here."""

    def run(self, *argv: str, seconds: float | None = None) -> Answer: ...


@dataclass(frozen=True)
class Node:
    """One node."""

    name: str
    state: str
    """sinfo's word, with its flag: `idle`, `mixed`, `down*`."""
    cpus: int
    memory_mib: int
    gres: tuple[Gres, ...] = ()
    features: frozenset[str] = frozenset()

    @property
    def usable(self) -> bool:
        """Whether it runs jobs now or once others end; a node that sleeps (`idle~`) is woken."""
        return not self.state.lower().startswith(GONE_STATES) and not self.state.endswith("*")

    def gpus(self, kind: str | None = None) -> int:
        """GPUs of one type, or all."""
        return sum(each.count for each in self.gres if each.name == "gpu" and kind in (None, each.kind))


@dataclass(frozen=True)
class Partition:
    """One partition. Times in minutes; null = no limit."""

    name: str
    state: str = "UP"
    default: bool = False
    nodes: tuple[str, ...] = ()
    max_minutes: float | None = None
    default_minutes: float | None = None
    allow_accounts: tuple[str, ...] | None = None
    """Null = all; so for the next two."""
    allow_qos: tuple[str, ...] | None = None
    allow_groups: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    qos: str | None = None
    """QOS whose limits hold for the whole partition."""
    grace_seconds: float = 0.0
    preempt_mode: str = "OFF"
    priority_tier: int = 1
    max_nodes: int | None = None
    min_nodes: int = 0
    max_cpus_per_node: int | None = None
    max_memory_mib: int | None = None
    root_only: bool = False
    needs_reservation: bool = False


@dataclass(frozen=True)
class Limits:
    """What an association or a QOS allows; null or absent = no limit."""

    max_minutes: float | None = None
    max_submit: int | None = None
    """Jobs of one user, queued and running."""
    group_tres: Mapping[str, float] = field(default_factory=dict)
    """All jobs together."""
    job_tres: Mapping[str, float] = field(default_factory=dict)
    """One job."""
    user_tres: Mapping[str, float] = field(default_factory=dict)
    """All jobs of one user."""


@dataclass(frozen=True)
class Association:
    """That this user may charge an account."""

    account: str
    partition: str | None
    """Null = in all of them."""
    qos: tuple[str, ...]
    default_qos: str | None
    limits: Limits = Limits()


@dataclass(frozen=True)
class Qos:
    """A quality of service."""

    name: str
    grace_seconds: float = 0.0
    preempts: tuple[str, ...] = ()
    """QOSs whose jobs may be ended for jobs of this one."""
    preempt_mode: str = "cluster"
    limits: Limits = Limits()


@dataclass(frozen=True)
class Reservation:
    """A reservation."""

    name: str
    nodes: tuple[str, ...]
    state: str
    users: tuple[str, ...]
    accounts: tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """A cluster as this user sees it."""

    user: str
    groups: frozenset[str]
    config: Mapping[str, str]
    """`scontrol show config`, word for word; `(null)` is left out."""
    partitions: Mapping[str, Partition]
    nodes: Mapping[str, Node]
    reservations: Mapping[str, Reservation]
    associations: tuple[Association, ...] | None
    """Null = there is no accounting."""
    default_account: str | None
    qos: Mapping[str, Qos] | None

    def number(self, name: str) -> int | None:
        """A number of the configuration, its unit (`3 sec`) dropped; null where there is none."""
        found = re.match(r"\d+", self.config.get(name, ""))
        return int(found[0]) if found else None

    def flags(self, name: str) -> frozenset[str]:
        """A list of the configuration, in lower case: `SlurmctldParameters`."""
        return frozenset(word.strip().lower() for word in self.config.get(name, "").split(",") if word.strip())

    @property
    def warns_of_preemption(self) -> bool:
        """Whether a job's warning signal is also sent when it is to make room."""
        return "preempt_send_user_signal" in self.flags("SlurmctldParameters") or "send_user_signal" in self.flags("PreemptParameters")


def read_site(commands: Asks) -> Site:
    """Ask the cluster; a handful of questions. Raises a SlurmError when Slurm does not answer, SiteUnreadable when it does strangely."""
    user = login()
    groups = frozenset(filter(None, map(_group_name, {os.getgid(), *os.getgroups()})))
    answers = {what: _ask(commands, argv) for what, argv in QUESTIONS.items()}
    config = parse_config(answers["config"])
    if has_accounting(config):
        words = {"user": user, "cluster": config.get("ClusterName", "")}
        answers.update({what: _ask(commands, tuple(each.format_map(words) for each in argv)) for what, argv in ACCOUNTING_QUESTIONS.items()})
    return parse_site(answers, user, groups)


def has_accounting(config: Mapping[str, str]) -> bool:
    """Whether `sacct` and `sacctmgr` have something to say."""
    return "slurmdbd" in config.get("AccountingStorageType", "")


def parse_site(answers: Mapping[str, str], user: str, groups: frozenset[str]) -> Site:
    """A Site from the outputs of QUESTIONS and ACCOUNTING_QUESTIONS."""
    config = parse_config(answers["config"])
    nodes, members = parse_nodes(answers["nodes"])
    partitions = {}
    for words in map(_pairs, answers["partitions"].splitlines()):
        if "PartitionName" in words:
            partition = _partition(words, tuple(members.get(words["PartitionName"], ())))
            partitions[partition.name] = partition
    reservations = [_reservation(words) for words in map(_pairs, answers["reservations"].splitlines()) if "ReservationName" in words]
    accounting = "associations" in answers
    return Site(
        user, groups, config, partitions, nodes, {each.name: each for each in reservations},
        associations=tuple(map(_association, answers["associations"].splitlines())) if accounting else None,
        default_account=(answers.get("user", "").strip().splitlines() or [""])[0] or None,
        qos={each.name: each for each in map(_qos, answers["qos"].splitlines())} if accounting else None,
    )


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: one `Name = value` a line."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and value.strip() != "(null)":
            found[name.strip()] = value.strip()
    return found


def parse_nodes(text: str) -> tuple[dict[str, Node], dict[str, list[str]]]:
    """sinfo's lines, one for each node and partition: the nodes, and the nodes of each partition."""
    nodes: dict[str, Node] = {}
    members: dict[str, list[str]] = {}
    for line in text.splitlines():
        fields = [each.strip() for each in line.split("|")]
        if len(fields) != 7:
            raise SiteUnreadable(f"sinfo: a line that is not understood: {line[:120]!r}. Is it sinfo of Slurm, unaltered by a wrapper?")
        name, partition, state, cpus, memory, gres, features = fields
        nodes[name] = Node(name, state, int(cpus.rstrip("+")), int(memory.rstrip("+")), parse_gres(gres), frozenset(split_list(features)))
        members.setdefault(partition.rstrip("*"), []).append(name)
    return nodes, members


def _partition(words: Mapping[str, str], nodes: tuple[str, ...]) -> Partition:
    return Partition(
        name=words["PartitionName"], state=words.get("State", "UP"), default=words.get("Default") == "YES", nodes=nodes,
        max_minutes=parse_minutes(words.get("MaxTime", "")), default_minutes=parse_minutes(words.get("DefaultTime", "")),
        allow_accounts=_allowed(words, "AllowAccounts"), allow_qos=_allowed(words, "AllowQos"), allow_groups=_allowed(words, "AllowGroups"),
        deny_accounts=split_list(words.get("DenyAccounts", "")), deny_qos=split_list(words.get("DenyQos", "")),
        qos=words["QoS"] if words.get("QoS", "N/A") not in ("N/A", "") else None,
        grace_seconds=parse_seconds(words.get("GraceTime", "")), preempt_mode=words.get("PreemptMode", "OFF").upper(),
        priority_tier=_number(words.get("PriorityTier", "")) or 0, max_nodes=_number(words.get("MaxNodes", "")),
        min_nodes=_number(words.get("MinNodes", "")) or 0, max_cpus_per_node=_number(words.get("MaxCPUsPerNode", "")),
        max_memory_mib=_number(words.get("MaxMemPerNode", "")) or None,
        root_only=words.get("RootOnly") == "YES", needs_reservation=words.get("ReqResv") == "YES",
    )


def _reservation(words: Mapping[str, str]) -> Reservation:
    return Reservation(
        words["ReservationName"], expand_nodes(words.get("Nodes", "")), words.get("State", ""),
        split_list(words.get("Users", "")), split_list(words.get("Accounts", "")),
    )


def _association(line: str) -> Association:
    account, partition, qos, default_qos, wall, submit, group, job = _fields("associations", line, 8)
    return Association(
        account, partition or None, split_list(qos), default_qos or None,
        Limits(parse_minutes(wall), _number(submit), parse_tres(group), parse_tres(job)),
    )


def _qos(line: str) -> Qos:
    name, grace, preempts, mode, wall, submit, group, job, user = _fields("qos", line, 9)
    limits = Limits(parse_minutes(wall), _number(submit), parse_tres(group), parse_tres(job), parse_tres(user))
    return Qos(name, parse_seconds(grace), split_list(preempts), mode or "cluster", limits)


def _fields(what: str, line: str, count: int) -> list[str]:
    fields = line.split("|")
    if len(fields) != count:
        raise SiteUnreadable(f"sacctmgr ({what}): a line that is not understood: {line[:120]!r}. Is it sacctmgr of Slurm, unaltered by a wrapper?")
    return fields


def _ask(commands: Asks, argv: tuple[str, ...]) -> str:
    answer = commands.run(*argv)
    if answer.code != 0:
        raise refusal(argv, answer.code, answer.err)
    return answer.out


def _pairs(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _allowed(words: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    value = words.get(name, "ALL")
    return None if value in ("ALL", "(null)", "") else split_list(value)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _group_name(number: int) -> str | None:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:  # a group without a name
        return None
