"""Whether nodes exist in a partition that a kind of job fits on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evo_hpc.dispatch.slurm.asked import Asked
from evo_hpc.dispatch.slurm.site import Node, Partition, Site
from evo_hpc.dispatch.slurm.words import Gres, expand_nodes, features_of, satisfies
from evo_hpc.store.checks import CheckResult, near_match, some_of

LITTLE_MEMORY_MIB = 1024.0
"""A Python process with its libraries wants more."""


def check_names(asked: Asked, site: Site) -> list[CheckResult]:
    """Features, reservation and excluded nodes that exist nowhere, whatever the partition."""
    wanted, found = asked.resources, []
    everywhere = _features(site)
    for name in _unknown_features(asked, site):
        found.append(asked.result("constraint", "error", f"no node has the feature {name!r}{near_match(name, everywhere)}",
                                  f"{asked.where('constraint')}: use features that nodes have: {some_of(everywhere)}"))
    if wanted.reservation is not None and wanted.reservation not in site.reservations:
        found.append(asked.result(
            "reservation", "error", f"there is no reservation {wanted.reservation!r}{near_match(wanted.reservation, site.reservations)}",
            f"{asked.where('reservation')}: name one that exists ({some_of(site.reservations)}), or leave it out"))
    for name in expand_nodes(wanted.exclude or ""):
        if name not in site.nodes:
            found.append(asked.result("exclude", "error", f"there is no node {name!r}{near_match(name, site.nodes)}: sbatch refuses the job",
                                      f"{asked.where('exclude')}: take the name out"))
    return found


def _features(site: Site) -> frozenset[str]:
    return frozenset().union(*(node.features for node in site.nodes.values()))


def _unknown_features(asked: Asked, site: Site) -> list[str]:
    return [name for name in features_of(asked.resources.constraint or "") if name not in _features(site)]


def check_reservation(asked: Asked, site: Site) -> list[CheckResult]:
    """Whether the reservation, if one is named and exists, is open to this user now."""
    reservation = site.reservations.get(asked.resources.reservation or "")
    if reservation is None:
        return []
    account = asked.resources.account or site.default_account
    if (reservation.users and site.user not in reservation.users) or (reservation.accounts and account not in reservation.accounts):
        return [asked.result("reservation", "error", f"{reservation.name} is for other users or accounts",
                             f"{asked.where('reservation')}: ask for access, or leave it out")]
    if reservation.state and reservation.state != "ACTIVE":
        return [asked.result("reservation", "warning", f"{reservation.name} is {reservation.state}: jobs wait until it is active")]
    return [asked.result("reservation", "ok", f"{reservation.name} is open to {site.user}")]


def check_nodes(asked: Asked, site: Site, partition: Partition) -> list[CheckResult]:
    """What keeps the job off the nodes of a partition; one `ok` with their number when nothing does."""
    there = [site.nodes[name] for name in partition.nodes]
    if not there:
        return [asked.result("nodes", "error", f"partition {partition.name} has no nodes", f"{asked.where('partition')}: take another")]
    found = _partition_limits(asked, partition)
    nodes, why = _allowed_nodes(asked, site, there)
    if not nodes:
        features = f", with the features {some_of(frozenset().union(*(node.features for node in there)))}"
        return [*found, asked.result(
            why, "error",
            f"no node of {partition.name} is left by it",
            f"{asked.where(why)}: the partition's nodes are {some_of(partition.nodes)}{features if why == 'constraint' else ''}",
        )]
    wants = _wants(asked)
    unknown = _unknown_types(asked, nodes)
    for check, field, words, fits, best in wants:
        if words in unknown:
            found.append(asked.result(check, "error", f"no node of {partition.name} has {unknown[words]}",
                                      f"{asked.where(field)}: they have {some_of({str(gres) for node in nodes for gres in node.gres})}"))
        elif not any(map(fits, nodes)):
            found.append(asked.result(check, "error", f"{words} on each node is more than any node of {partition.name} has ({best(nodes)})",
                                      f"{asked.where(field)}: ask for less, or take a partition with such nodes"))
    fitting = [node for node in nodes if all(fits(node) for _, _, _, fits, _ in wants)]
    if any(result.level == "error" for result in found):
        return found
    if len(fitting) < asked.nodes:
        found.append(asked.result(
            "nodes", "error",
            f"{asked.nodes} nodes are asked for; {len(fitting)} of {partition.name} have all that each must have",
            f"{asked.where('nodes')}: ask for fewer, or for less on each",
        ))
    elif (usable := sum(node.usable for node in fitting)) < asked.nodes:
        found.append(asked.result(
            "nodes", "warning",
            f"{asked.nodes} nodes are asked for; of the {len(fitting)} of {partition.name} that would do {usable} are up",
            "jobs wait until more come back: `sinfo -R` says what is wrong with them",
        ))
    else:
        found.append(asked.result("nodes", "ok", f"{usable} nodes of {partition.name} would do; {asked.nodes} asked for"))
    return found + _memory_default(asked, site)


def _allowed_nodes(asked: Asked, site: Site, nodes: Sequence[Node]) -> tuple[list[Node], str]:
    """Nodes that exclude, reservation and constraint leave, and the last of them that took some away."""
    wanted, why, left = asked.resources, "exclude", list(nodes)
    excluded = frozenset(expand_nodes(wanted.exclude or ""))
    filters: list[tuple[str, Callable[[Node], bool]]] = [("exclude", lambda node: node.name not in excluded)]
    if (reservation := site.reservations.get(wanted.reservation or "")) is not None and reservation.nodes:
        reserved = frozenset(reservation.nodes)
        filters.append(("reservation", lambda node: node.name in reserved))
    if wanted.constraint is not None and not _unknown_features(asked, site):
        holds = satisfies(wanted.constraint)
        filters.append(("constraint", lambda node: holds(node.features)))
    for name, keep in filters:
        kept = [node for node in left if keep(node)]
        if len(kept) < len(left):
            why = name
        left = kept
    return left, why


def _wants(asked: Asked) -> list[tuple[str, str, str, Callable[[Node], bool], Callable[[Sequence[Node]], str]]]:
    """What each node must have: what it is called, the field that asks for it, in words, the test, and the most that there is."""
    wants = [("CPUs", "cpus_per_task", f"{asked.cpus_per_node} CPUs", lambda node: node.cpus >= asked.cpus_per_node,
              lambda nodes: f"at most {max(node.cpus for node in nodes)}")]
    if (memory := asked.memory_mib) is not None:
        wants.append(("memory", "memory", f"{memory:.0f} MiB of memory", lambda node: node.memory_mib >= memory,
                      lambda nodes: f"at most {max(node.memory_mib for node in nodes)} MiB"))
    field = "gpus_per_node" if asked.resources.gpus_per_node is not None else "gres"
    for each in asked.gres:
        wants.append(("GPUs" if each.name == "gpu" else "gres", field, str(each), lambda node, each=each: _count(node, each) >= each.count,
                      lambda nodes, each=each: f"they have {some_of({str(gres) for node in nodes for gres in node.gres})}"))
    return wants


def _unknown_types(asked: Asked, nodes: Sequence[Node]) -> dict[str, str]:
    """Resources of which no node has even one, with the likely name."""
    there = {each.name: set() for node in nodes for each in node.gres}
    for node in nodes:
        for each in node.gres:
            there[each.name].add(each.kind or "")
    found = {}
    for each in asked.gres:
        if each.name not in there:
            found[str(each)] = f"a {each.name}{near_match(each.name, there)}"
        elif each.kind is not None and each.kind not in there[each.name]:
            found[str(each)] = f"a {each.name} of type {each.kind}{near_match(each.kind, there[each.name] - {''})}"
    return found


def _count(node: Node, wanted: Gres) -> int:
    return sum(each.count for each in node.gres if each.name == wanted.name and wanted.kind in (None, each.kind))


def _partition_limits(asked: Asked, partition: Partition) -> list[CheckResult]:
    limits = (
        ("nodes", "nodes", asked.nodes, partition.max_nodes, "nodes a job"),
        ("CPUs", "cpus_per_task", asked.cpus_per_node, partition.max_cpus_per_node, "CPUs of a node"),
        ("memory", "memory", asked.memory_mib, partition.max_memory_mib, "MiB of memory of a node"),
    )
    found = [
        asked.result(check, "error", f"{asks:.0f} asked for; partition {partition.name} allows {most} {words}", f"{asked.where(field)}: ask for less")
        for check, field, asks, most, words in limits if asks is not None and most is not None and asks > most
    ]
    if asked.nodes < partition.min_nodes:
        found.append(asked.result(
            "nodes", "error",
            f"{asked.nodes} asked for; partition {partition.name} wants at least {partition.min_nodes} nodes a job",
            f"{asked.where('nodes')}: ask for more, or take another partition",
        ))
    return found


def _memory_default(asked: Asked, site: Site) -> list[CheckResult]:
    """A profile without a word about memory gets the cluster's default, which is often tiny."""
    if asked.resources.memory is not None or "MEMORY" not in site.config.get("SelectTypeParameters", "").upper():
        return []
    per_cpu, per_node = site.number("DefMemPerCPU"), site.number("DefMemPerNode")
    amount = per_cpu * asked.cpus_per_node if per_cpu else per_node
    if not amount or amount >= LITTLE_MEMORY_MIB:
        return []
    return [asked.result("memory", "warning", f"none is asked for, so a job gets the cluster's default: {amount} MiB on each node",
                         f"{asked.where('memory')}: say how much a job needs, e.g. 16G")]
