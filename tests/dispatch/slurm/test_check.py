"""Each check of a profile: a site and profile in which it fails, and one in which it passes. The site is a recording of a real cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from evo_hpc.config.slurm import Slurm
from evo_hpc.dispatch.slurm.check import check, worst
from evo_hpc.dispatch.slurm.site import Association, Limits, Qos, Reservation, Site, parse_site
from evo_hpc.dispatch.slurm.words import Gres
from evo_hpc.store.checks import CheckResult

RECORDED = Path(__file__).parent / "recorded_site"
GOOD = {"partition": "train", "memory": "2G", "minutes": 120}
"""What every kind of job asks for where a case says nothing else."""
Change = Callable[[Site], Site]


def recorded_site() -> Site:
    return parse_site({path.stem: path.read_text() for path in RECORDED.glob("*.txt")}, "root", frozenset({"root"}))


def same(site: Site) -> Site:
    return site


def of_ada(site: Site) -> Site:
    return replace(site, user="ada", groups=frozenset({"lab"}))


def partition(name: str, **fields: Any) -> Change:
    return lambda site: replace(site, partitions={**site.partitions, name: replace(site.partitions[name], **fields)})


def nodes(**fields: Any) -> Change:
    return lambda site: replace(site, nodes={name: replace(node, **fields) for name, node in site.nodes.items()})


def config(**values: str) -> Change:
    return lambda site: replace(site, config={**site.config, **values})


def accounts(qos: tuple[Qos, ...] = (Qos("normal"), Qos("long")), enforce: str = "associations,limits,qos", limits: Limits = Limits()) -> Change:
    mine = (Association("lab", None, ("normal",), "normal", limits), Association("guest", None, ("normal", "long"), "normal"))
    return both(config(AccountingStorageEnforce=enforce), lambda site: replace(
        of_ada(site), associations=mine, default_account="lab", qos={each.name: each for each in qos}))


def both(*changes: Change) -> Change:
    def change(site: Site) -> Site:
        for each in changes:
            site = each(site)
        return site

    return change


def reserved(**fields: Any) -> Change:
    values = {"nodes": ("n1", "n2"), "state": "ACTIVE", "users": ("root",), "accounts": (), **fields}
    return lambda site: replace(site, reservations={"maintenance": Reservation("maintenance", **values)})


FEATURES = both(nodes(features=frozenset({"h100", "ib"})), lambda site: replace(
    site, nodes={**site.nodes, "n4": replace(site.nodes["n4"], features=frozenset({"a100"}))}))
QOS_PREEMPTION = both(
    config(PreemptType="preempt/qos", PreemptMode="REQUEUE"),
    accounts(qos=(Qos("normal", grace_seconds=10), Qos("urgent", preempts=("normal",)), Qos("long"))),
)
NO_ACCOUNTING: Change = lambda site: replace(site, associations=None, qos=None, default_account=None)  # noqa: E731

class Case(NamedTuple):
    """A check of `train`, with the site and the fields of the profile in which it fails and passes."""

    check: str
    level: str
    words: str
    fails: tuple[Change, dict[str, Any]]
    passes: tuple[Change, dict[str, Any]]


CASES: dict[str, Case] = {
    "unknown partition": Case(
        "partition", "error", "no partition 'trian' (did you mean train?)", fails=(same, {"partition": "trian"}), passes=(same, {}),
    ),
    "no default partition": Case(
        "partition", "error", "no default", fails=(partition("debug", default=False), {"partition": None}),
        passes=(same, {"partition": "debug", "minutes": 30}),
    ),
    "partition down": Case("partition", "warning", "train is DOWN", fails=(partition("train", state="DOWN"), {}), passes=(same, {})),
    "partition closed": Case("partition", "error", "are refused", fails=(partition("train", state="DRAIN"), {}), passes=(same, {})),
    "root only": Case(
        "partition", "error", "root alone", fails=(both(of_ada, partition("train", root_only=True)), {}),
        passes=(partition("train", root_only=True), {}),
    ),
    "groups": Case(
        "partition", "error", "groups staff", fails=(both(of_ada, partition("train", allow_groups=("staff",))), {}),
        passes=(both(of_ada, partition("train", allow_groups=("lab",))), {}),
    ),
    "account of somebody else": Case(
        "account", "error", "may not charge account 'labb' (did you mean lab?)", fails=(accounts(), {"account": "labb"}),
        passes=(accounts(), {"account": "guest"}),
    ),
    "account, not enforced": Case(
        "account", "warning", "may not charge", fails=(accounts(enforce="none"), {"account": "other"}),
        passes=(accounts(enforce="none"), {"account": "lab"}),
    ),
    "no account at all": Case(
        "account", "error", "ada has no account", fails=(both(accounts(), lambda site: replace(site, associations=(), default_account=None)), {}),
        passes=(accounts(), {}),
    ),
    "account refused by partition": Case(
        "account", "error", "does not take account lab", fails=(both(accounts(), partition("train", allow_accounts=("guest",))), {}),
        passes=(both(accounts(), partition("train", allow_accounts=("guest", "lab"))), {}),
    ),
    "account denied by partition": Case(
        "account", "error", "does not take account lab", fails=(both(accounts(), partition("train", deny_accounts=("lab",))), {}),
        passes=(both(accounts(), partition("train", deny_accounts=("lab",))), {"account": "guest"}),
    ),
    "unknown QOS": Case(
        "qos", "error", "no QOS 'lonng' (did you mean long?)", fails=(accounts(), {"qos": "lonng"}), passes=(accounts(), {"qos": "normal"}),
    ),
    "QOS of another account": Case(
        "qos", "error", "account lab may not use QOS long", fails=(accounts(), {"qos": "long"}),
        passes=(accounts(), {"qos": "long", "account": "guest"}),
    ),
    "QOS refused by partition": Case(
        "qos", "error", "does not take qos normal", fails=(both(accounts(), partition("train", allow_qos=("long",))), {}),
        passes=(both(accounts(), partition("train", allow_qos=("normal",))), {"qos": "normal"}),
    ),
    "unknown feature": Case(
        "constraint", "error", "no node has the feature 'h10' (did you mean h100?)", fails=(FEATURES, {"constraint": "ib&h10"}),
        passes=(FEATURES, {"constraint": "ib&h100"}),
    ),
    "feature of other nodes": Case(
        "constraint", "error", "no node of train is left", fails=(FEATURES, {"constraint": "a100"}), passes=(FEATURES, {"constraint": "a100|h100"}),
    ),
    "CPUs": Case(
        "CPUs", "error", "9 CPUs on each node is more than any node of train has (at most 8)",
        fails=(same, {"cpus_per_task": 3, "tasks_per_node": 3}), passes=(same, {"cpus_per_task": 4, "tasks_per_node": 2}),
    ),
    "CPU limit of the partition": Case(
        "CPUs", "error", "allows 4", fails=(partition("train", max_cpus_per_node=4), {"cpus_per_task": 5}),
        passes=(partition("train", max_cpus_per_node=4), {"cpus_per_task": 4}),
    ),
    "memory": Case(
        "memory", "error", "5120 MiB of memory on each node is more than any node of train has (at most 4000 MiB)", fails=(same, {"memory": "5G"}),
        passes=(same, {"memory": "3G"}),
    ),
    "memory limit of the partition": Case(
        "memory", "error", "allows 1000", fails=(partition("train", max_memory_mib=1000), {}), passes=(partition("train", max_memory_mib=3000), {}),
    ),
    "no word of memory": Case(
        "memory", "warning", "100 MiB on each node", fails=(same, {"memory": None}), passes=(both(config(DefMemPerCPU="4096")), {"memory": None}),
    ),
    "number of GPUs": Case(
        "GPUs", "error", "gpu:5 on each node is more than any node of train has (they have gpu:fake:4)", fails=(same, {"gpus_per_node": "5"}),
        passes=(same, {"gpus_per_node": "4"}),
    ),
    "type of GPU": Case(
        "GPUs", "error", "no node of train has a gpu of type fakee (did you mean fake?)", fails=(same, {"gpus_per_node": "fakee:4"}),
        passes=(same, {"gpus_per_node": "fake:4"}),
    ),
    "GPUs by gres": Case("GPUs", "error", "gpu:fake:8 on each node", fails=(same, {"gres": "gpu:fake:8"}), passes=(same, {"gres": "gpu:fake:2"})),
    "GPUs where there are none": Case(
        "GPUs", "error", "no node of eval has a gpu", fails=(same, {"partition": "eval", "gpus_per_node": "1"}), passes=(same, {"partition": "eval"}),
    ),
    "words that are no GPUs": Case(
        "GPUs", "error", "not a generic resource", fails=(same, {"gpus_per_node": "h100:four:2"}), passes=(same, {"gpus_per_node": "fake:2"}),
    ),
    "other gres": Case(
        "gres", "error", "a nvme", fails=(same, {"gres": "nvme:1"}), passes=(nodes(gres=(Gres("nvme", None, 2),)), {"gres": "nvme:1"}),
    ),
    "number of nodes": Case("nodes", "error", "3 nodes are asked for; 2 of train", fails=(same, {"nodes": 3}), passes=(same, {"nodes": 2})),
    "nodes that all fit": Case(
        "nodes", "error", "; 1 of train have all",
        fails=(lambda site: replace(site, nodes={**site.nodes, "n2": replace(site.nodes["n2"], memory_mib=1000)}), {"nodes": 2}),
        passes=(same, {"nodes": 2}),
    ),
    "node limit of the partition": Case(
        "nodes", "error", "allows 1", fails=(partition("train", max_nodes=1), {"nodes": 2}), passes=(partition("train", max_nodes=2), {"nodes": 2}),
    ),
    "fewest nodes of the partition": Case(
        "nodes", "error", "at least 2 nodes", fails=(partition("train", min_nodes=2), {}), passes=(partition("train", min_nodes=2), {"nodes": 2}),
    ),
    "empty partition": Case("nodes", "error", "has no nodes", fails=(partition("train", nodes=()), {}), passes=(same, {})),
    "nodes down": Case("nodes", "warning", "0 are up", fails=(nodes(state="down*"), {}), passes=(nodes(state="idle~"), {})),
    "reservation": Case(
        "reservation", "error", "did you mean maintenance?", fails=(reserved(), {"reservation": "maintenence"}),
        passes=(reserved(), {"reservation": "maintenance"}),
    ),
    "reservation of others": Case(
        "reservation", "error", "for other users", fails=(both(of_ada, reserved()), {"reservation": "maintenance"}),
        passes=(reserved(), {"reservation": "maintenance"}),
    ),
    "reservation of an account": Case(
        "reservation", "error", "for other users or accounts",
        fails=(both(accounts(), reserved(users=(), accounts=("guest",))), {"reservation": "maintenance"}),
        passes=(both(accounts(), reserved(users=(), accounts=("guest",))), {"reservation": "maintenance", "account": "guest"}),
    ),
    "reservation to come": Case(
        "reservation", "warning", "INACTIVE", fails=(reserved(state="INACTIVE"), {"reservation": "maintenance"}),
        passes=(reserved(), {"reservation": "maintenance"}),
    ),
    "reservation elsewhere": Case(
        "reservation", "error", "no node of train is left", fails=(reserved(nodes=("n3",)), {"reservation": "maintenance"}),
        passes=(reserved(), {"reservation": "maintenance"}),
    ),
    "reservation wanted": Case(
        "reservation", "error", "wants a reservation", fails=(partition("train", needs_reservation=True), {}),
        passes=(both(reserved(), partition("train", needs_reservation=True)), {"reservation": "maintenance"}),
    ),
    "excluded all": Case("exclude", "error", "no node of train is left", fails=(same, {"exclude": "n[1-2]"}), passes=(same, {"exclude": "n1"})),
    "excluded unknown": Case("exclude", "error", "no node 'n11'", fails=(same, {"exclude": "n11"}), passes=(same, {"exclude": "n1"})),
    "time limit": Case(
        "time limit", "error", "1441 minutes are more than the 1440", fails=(same, {"minutes": 1441}), passes=(same, {"minutes": 1440}),
    ),
    "time limit of the QOS": Case(
        "time limit", "error", "60 of QOS normal", fails=(accounts(qos=(Qos("normal", limits=Limits(max_minutes=60)),)), {"minutes": 61}),
        passes=(accounts(qos=(Qos("normal", limits=Limits(max_minutes=60)),)), {"minutes": 60}),
    ),
    "time limit of the partition's QOS": Case(
        "time limit", "error", "90 of QOS part",
        fails=(both(accounts(qos=(Qos("normal"), Qos("part", limits=Limits(max_minutes=90)))), partition("train", qos="part")), {}),
        passes=(both(accounts(), partition("train", qos="long")), {}),
    ),
    "time limit of the account": Case(
        "time limit", "error", "60 of account lab", fails=(accounts(limits=Limits(max_minutes=60)), {}),
        passes=(accounts(limits=Limits(max_minutes=60), enforce="associations"), {}),
    ),
    "warning before the start": Case("time limit", "error", "stop as soon as it starts", fails=(same, {"minutes": 3}), passes=(same, {"minutes": 4})),
    "long warning": Case(
        "time limit", "error", "stop as soon as it starts", fails=(same, {"minutes": 30, "warning_seconds": 1800}),
        passes=(same, {"minutes": 60, "warning_seconds": 1800}),
    ),
    "jobs in the queue": Case(
        "job count", "error", "allows 1 jobs", fails=(accounts(limits=Limits(max_submit=1)), {}), passes=(accounts(limits=Limits(max_submit=2)), {}),
    ),
    "TRES of a job": Case(
        "limits", "error", "8 gres/gpu a job; account lab allows 4",
        fails=(accounts(limits=Limits(job_tres={"gres/gpu": 4})), {"nodes": 2, "gpus_per_node": "4"}),
        passes=(accounts(limits=Limits(job_tres={"gres/gpu": 8})), {"nodes": 2, "gpus_per_node": "4"}),
    ),
    "TRES of a group": Case(
        "limits", "error", "8 cpu a job; QOS normal allows 4",
        fails=(accounts(qos=(Qos("normal", limits=Limits(group_tres={"cpu": 4})),)), {"cpus_per_task": 8}),
        passes=(accounts(qos=(Qos("normal", limits=Limits(group_tres={"cpu": 8})),)), {"cpus_per_task": 8}),
    ),
    "TRES of a user": Case(
        "limits", "error", "2 node a job", fails=(accounts(qos=(Qos("normal", limits=Limits(user_tres={"node": 1})),)), {"nodes": 2}),
        passes=(accounts(), {"nodes": 2}),
    ),
    "short grace": Case(
        "warning", "warning", "leaves 5 s to save (GraceTime), not the 120 s", fails=(same, {"partition": "scavenge"}),
        passes=(same, {"partition": "scavenge", "warning_seconds": 5}),
    ),
    "no warning": Case(
        "warning", "warning", "no warning signal before a preemption", fails=(config(SlurmctldParameters=""), {"partition": "scavenge"}),
        passes=(same, {"partition": "scavenge", "warning_seconds": 5}),
    ),
    "preempted without requeue": Case(
        "preemption", "warning", "cancelled, not requeued", fails=(same, {"partition": "scavenge", "requeue": False}),
        passes=(same, {"partition": "scavenge"}),
    ),
    "cancelled by preemption": Case(
        "preemption", "warning", "Slurm cancels them", fails=(partition("scavenge", preempt_mode="CANCEL"), {"partition": "scavenge"}),
        passes=(same, {"partition": "train", "requeue": False}),
    ),
    "suspended": Case(
        "preemption", "warning", "suspended", fails=(partition("scavenge", preempt_mode="SUSPEND"), {"partition": "scavenge"}),
        passes=(partition("scavenge", preempt_mode="OFF"), {"partition": "scavenge"}),
    ),
    "preempted by QOS": Case(
        "preemption", "warning", "give way to jobs of QOS urgent", fails=(QOS_PREEMPTION, {"requeue": False}),
        passes=(QOS_PREEMPTION, {"qos": "long", "account": "guest", "requeue": False}),
    ),
    "grace of the QOS": Case(
        "warning", "warning", "leaves 10 s", fails=(QOS_PREEMPTION, {"warning_seconds": 11}), passes=(QOS_PREEMPTION, {"warning_seconds": 10}),
    ),
    "account without accounting": Case("account", "warning", "keeps no accounts", fails=(NO_ACCOUNTING, {"account": "lab"}), passes=(same, {})),
}


def findings(change: Change, train: dict[str, Any], what: str, kind: str = "train", **slurm: Any) -> list[CheckResult]:
    """Of one check, for one kind of job."""
    profile = Slurm.model_validate({"defaults": {name: value for name, value in GOOD.items() if name not in train}, kind: train, **slurm})
    found = [(each, *each.check.split(": ")) for each in check(profile, change(recorded_site())) if ": " in each.check]
    return [each for each, kinds, checked in found if checked == what and kind in kinds.split(", ")]


@pytest.mark.parametrize("name", CASES)
def test_a_check_fails_and_passes(name: str) -> None:
    case = CASES[name]
    failed = findings(*case.fails, case.check)
    assert [(each.level, case.words in each.text) for each in failed if each.level != "ok"] == [(case.level, True)], failed
    assert all(each.remedy for each in failed if each.level == "error")
    assert [each for each in findings(*case.passes, case.check) if each.level != "ok"] == []


def test_a_good_profile_has_no_findings_but_ok() -> None:
    profile = Slurm.model_validate({"defaults": GOOD, "train": {"gpus_per_node": "fake:4", "nodes": 2}, "shards": 4})
    assert {each.level for each in check(profile, recorded_site())} == {"ok"}


def test_kinds_that_share_a_finding_are_named_together() -> None:
    [result] = [each for each in check(Slurm.model_validate({"defaults": {"partition": "trian"}}), recorded_site()) if "partition" in each.check]
    assert result.check == "controller, supervise, train, evaluate: partition"
    assert result.remedy is not None and result.remedy.startswith("slurm.defaults.partition: one of debug, eval, scavenge, train")


def test_a_remedy_names_the_place_that_holds_the_mistake() -> None:
    [own] = [each for each in findings(same, {"minutes": 9999}, "time limit") if each.level == "error"]
    assert own.remedy == "slurm.train.minutes: 1440 at most"


@pytest.mark.parametrize(("limit", "level", "words"), [
    (10, "warning", "every 10 minutes"), (None, "warning", "every 10 minutes (no limit is set"), (600, "ok", "600 minutes"),
])
def test_a_controller_that_hands_over_too_often(limit: int | None, level: str, words: str) -> None:
    [result] = findings(same, {"minutes": limit} if limit else {"minutes": None}, "time limit", kind="controller")
    assert (result.level, words in result.text) == (level, True), result


def test_a_controller_that_a_preemption_ends_for_good() -> None:
    unwarned = config(SlurmctldParameters="")
    assert worst(findings(unwarned, {"partition": "scavenge", "requeue": False}, "preemption", kind="controller")) == 2
    assert worst(findings(same, {"partition": "scavenge", "requeue": False}, "preemption", kind="controller")) == 1
    assert worst(findings(unwarned, {"partition": "scavenge"}, "preemption", kind="controller")) == 0


def test_one_partition_of_several_is_enough() -> None:
    asked = {"partition": "eval,train", "gpus_per_node": "4"}
    [result] = [each for each in findings(same, asked, "GPUs")]
    assert result.level == "warning" and "another partition of the list will do" in result.text
    assert worst(findings(config(EnforcePartLimits="ALL"), asked, "GPUs")) == 2
    assert worst(findings(same, {**asked, "partition": "eval"}, "GPUs")) == 2
    assert worst(findings(same, {**asked, "partition": "train,nope"}, "partition")) == 2, "sbatch refuses a list with an unknown name"


def test_submit_limit_counts_the_shards() -> None:
    limited = accounts(limits=Limits(max_submit=4))
    assert worst(findings(limited, {}, "job count", kind="evaluate", shards=3)) == 0
    [result] = findings(limited, {}, "job count", kind="evaluate", shards=4)
    assert result.level == "error" and result.remedy == "slurm.shards: fewer"


@pytest.mark.parametrize(("what", "change", "slurm", "level", "words"), [
    ("accounting", same, {}, "ok", "Slurm's own"),
    ("accounting", NO_ACCOUNTING, {}, "warning", "GPU hours are estimated"),
    ("queue", both(NO_ACCOUNTING, config(MinJobAge="20 sec")), {}, "warning", "leaves the queue after 20 s"),
    ("queue", both(NO_ACCOUNTING, config(MinJobAge="20 sec")), {"poll_seconds": 5}, None, ""),
    ("queue", config(MinJobAge="2 sec"), {}, None, ""),
    ("shards", same, {"shards": 5001}, "ok", ""),
    ("shards", same, {"shards": 5002}, "error", "allows 5001 (MaxArraySize)"),
    ("shards", config(MaxArraySize="0"), {"shards": 2}, "error", "allows 0 (MaxArraySize)"),
    ("shards", config(MaxArraySize="0"), {"shards": 1}, "ok", ""),
    ("shards", config(MaxJobCount="100"), {"shards": 100}, "error", "MaxJobCount"),
])
def test_checks_of_the_cluster(what: str, change: Change, slurm: dict[str, Any], level: str | None, words: str) -> None:
    found = [each for each in check(Slurm.model_validate({"defaults": GOOD, **slurm}), change(recorded_site())) if each.check == what]
    assert [each.level for each in found] == ([level] if level else [])
    assert all(words in each.text for each in found)
