"""Whether this user may run a kind of job in a partition: groups, accounts, QOS, and their limits."""

from __future__ import annotations

from collections.abc import Iterator

from evo_hpc.dispatch.slurm.asked import Asked
from evo_hpc.dispatch.slurm.site import Association, Limits, Partition, Qos, Site
from evo_hpc.store.checks import CheckResult, Level, near_match, some_of


def check_account(asked: Asked, site: Site) -> list[CheckResult]:
    """The account and the QOS, whatever the partition."""
    wanted = asked.resources
    if site.associations is None:
        return [asked.result(
            name, "warning",
            f"{value} is set, but this cluster keeps no accounts: it has no effect",
            f"{asked.where(name)}: leave it out",
        )
                for name, value in (("account", wanted.account), ("qos", wanted.qos)) if value is not None]
    found: list[CheckResult] = []
    level: Level = "error" if enforced(site, "associations") else "warning"
    accounts = {each.account for each in site.associations}
    account = account_of(asked, site)
    if not accounts:
        found.append(asked.result("account", level, f"user {site.user} has no account on this cluster", "ask the cluster's staff for one"))
    elif wanted.account is not None and wanted.account not in accounts:
        found.append(asked.result("account", level, f"{site.user} may not charge account {wanted.account!r}{near_match(wanted.account, accounts)}",
                                  f"{asked.where('account')}: yours are {some_of(accounts)}"))
    elif account is not None:
        found.append(asked.result("account", "ok", f"{account} is charged"))
    return found + _check_qos(asked, site, account, accounts)


def _check_qos(asked: Asked, site: Site, account: str | None, accounts: set[str]) -> list[CheckResult]:
    wanted, known = asked.resources.qos, site.qos or {}
    if wanted is None:
        return []
    if wanted not in known:
        return [asked.result("qos", "error" if enforced(site, "qos") else "warning", f"there is no QOS {wanted!r}{near_match(wanted, known)}",
                             f"{asked.where('qos')}: those of the cluster are {some_of(known)}")]
    allowed = {name for each in site.associations or () if each.account == account for name in each.qos}
    if account in accounts and wanted not in allowed:
        return [asked.result("qos", "error" if enforced(site, "qos") else "warning", f"account {account} may not use QOS {wanted}",
                             f"{asked.where('qos')}: it may use {some_of(allowed)}")]
    return [asked.result("qos", "ok", f"{wanted} may be used")]


def check_partition_rights(asked: Asked, site: Site, partition: Partition) -> list[CheckResult]:
    """Whether the partition is up and lets this user, account and QOS in."""
    account, qos = account_of(asked, site), qos_of(asked, site, partition)
    other = f"{asked.where('partition')}: take another partition"
    if partition.state.upper() not in ("UP", ""):
        may_queue = partition.state.upper() == "DOWN"
        text = f"{partition.name} is {partition.state}: jobs {'wait until it is up' if may_queue else 'are refused'}"
        return [asked.result("partition", "warning" if may_queue else "error", text, other)]
    refused = []
    if partition.root_only and site.user != "root":
        refused.append(("partition", f"{partition.name} is for root alone", other))
    if partition.allow_groups is not None and site.user != "root" and not site.groups & set(partition.allow_groups):
        refused.append(("partition", f"{partition.name} is for the groups {some_of(partition.allow_groups)}, which {site.user} is not in", other))
    if partition.needs_reservation and asked.resources.reservation is None:
        refused.append(("reservation", f"{partition.name} wants a reservation to be named", f"{asked.where('reservation')}: name one"))
    names = (("account", account, partition.allow_accounts, partition.deny_accounts), ("qos", qos, partition.allow_qos, partition.deny_qos))
    for field, value, allow, deny in names:
        if site.associations is not None and ((allow is not None and value not in allow) or value in deny):
            known = f"use one that it lets in: {some_of(allow)}" if allow is not None else "use one that it does not refuse"
            refused.append((field, f"{partition.name} does not take {field} {value}", f"{asked.where(field)}: {known}"))
    if refused:
        return [asked.result(check, "error", text, remedy) for check, text, remedy in refused]
    return [asked.result("partition", "ok", f"{partition.name} is up")]


def check_limits(asked: Asked, site: Site, partition: Partition) -> list[CheckResult]:
    """What an account's or a QOS's limits would keep waiting for ever, or refuse."""
    if not enforced(site, "limits"):
        return []
    found = []
    minutes = asked.minutes(partition)
    limits = list(limits_of(asked, site, partition))
    wall = next(((whose, each.max_minutes) for whose, each in limits if each.max_minutes is not None), None)
    if wall is not None and minutes is not None and minutes > wall[1]:
        found.append(asked.result("time limit", "error", f"{minutes:.0f} minutes are more than the {wall[1]:.0f} of {wall[0]}",
                                  f"{asked.where('minutes')}: {wall[1]:.0f} at most"))
    submit = next(((whose, each.max_submit) for whose, each in limits if each.max_submit is not None), None)
    if submit is not None and asked.jobs_at_once > submit[1]:
        words = f"{asked.jobs_at_once - 1} jobs beside the controller" if asked.kind != "controller" else "the controller"
        remedy = "slurm.shards: fewer" if asked.kind == "evaluate" else f"{asked.where('qos')}: take another QOS or account"
        found.append(asked.result("job count", "error", f"{words}: {submit[0]} allows {submit[1]} jobs in the queue", remedy))
    for name, asks in asked.tres().items():
        found += [
            asked.result(
                "limits", "error",
                f"{asks:.0f} {name} a job; {whose} allows {most[name]:.0f}",
                f"ask for less in slurm.{asked.kind}, or use another QOS or account",
            )
            for whose, each in limits for most in (each.job_tres, each.user_tres, each.group_tres) if name in most and asks > most[name]
        ]
    return found or [asked.result("limits", "ok", "within those of account and QOS")]


def limits_of(asked: Asked, site: Site, partition: Partition) -> Iterator[tuple[str, Limits]]:
    """Whose limits hold, the strongest first (Slurm's resource limits: partition QOS, job QOS, association)."""
    for name in (partition.qos, qos_of(asked, site, partition)):
        if name is not None and site.qos and name in site.qos:
            yield f"QOS {name}", site.qos[name].limits
    association = association_of(asked, site, partition)
    if association is not None:
        yield f"account {association.account}", association.limits


def account_of(asked: Asked, site: Site) -> str | None:
    """The account that a job is charged to."""
    return asked.resources.account or site.default_account


def association_of(asked: Asked, site: Site, partition: Partition) -> Association | None:
    """The user's entry for the account, that of the very partition before the general one."""
    account = account_of(asked, site)
    mine = [each for each in site.associations or () if each.account == account and each.partition in (None, partition.name)]
    return max(mine, key=lambda each: each.partition is not None, default=None)


def qos_of(asked: Asked, site: Site, partition: Partition) -> str | None:
    """The QOS that a job gets: its own, the association's default, or the only one."""
    if asked.resources.qos is not None:
        return asked.resources.qos
    association = association_of(asked, site, partition)
    if association is None:
        return None
    return association.default_qos or ("normal" if "normal" in association.qos else association.qos[0] if len(association.qos) == 1 else None)


def qos_record(asked: Asked, site: Site, partition: Partition) -> Qos | None:
    """The same as a record."""
    return (site.qos or {}).get(qos_of(asked, site, partition) or "")


def enforced(site: Site, what: str) -> bool:
    """Whether AccountingStorageEnforce holds jobs to it (man slurm.conf: `limits` and `qos` bring associations, `safe` brings limits)."""
    brings = {"associations": {"associations", "limits", "qos", "safe", "wckeys", "all"}, "limits": {"limits", "safe", "all"}, "qos": {"qos", "all"}}
    flags = {"associations" if flag == "1" else flag for flag in site.flags("AccountingStorageEnforce")}
    return bool(flags & brings[what])
