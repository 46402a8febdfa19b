"""What a cluster says of itself, read: a recording of a real one, and the notations that it lacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.dispatch.slurm.commands import Answer
from evo_hpc.dispatch.slurm.errors import SlurmUnavailable
from evo_hpc.dispatch.slurm.site import QUESTIONS, Limits, Qos, Site, SiteUnreadable, parse_site, read_site
from evo_hpc.dispatch.slurm.words import Gres, expand_nodes, parse_gres, parse_mib, parse_minutes, parse_seconds, parse_tres, satisfies

RECORDED = {path.stem: path.read_text() for path in (Path(__file__).parent / "recorded_site").glob("*.txt")}


def site(**answers: str) -> Site:
    return parse_site({**RECORDED, **answers}, "root", frozenset({"root"}))


def test_the_recorded_cluster() -> None:
    seen = site()
    assert sorted(seen.partitions) == ["debug", "eval", "scavenge", "train"]
    assert [name for name, each in seen.partitions.items() if each.default] == ["debug"]
    assert seen.partitions["train"].nodes == ("n1", "n2") and seen.partitions["debug"].nodes == ("n1", "n2", "n3", "n4")
    assert (seen.partitions["debug"].max_minutes, seen.partitions["train"].max_minutes, seen.partitions["train"].default_minutes) == (30, 1440, 10)
    assert (seen.partitions["scavenge"].grace_seconds, seen.partitions["scavenge"].preempt_mode) == (5, "REQUEUE")
    assert seen.partitions["debug"].allow_accounts is None and seen.partitions["debug"].max_nodes is None
    first, third = seen.nodes["n1"], seen.nodes["n3"]
    assert (first.cpus, first.memory_mib, first.gpus(), first.gpus("fake"), first.gpus("h100"), third.gpus()) == (8, 4000, 4, 4, 0, 0)
    assert seen.warns_of_preemption and seen.number("MaxArraySize") == 5001 and seen.number("KillWait") == 3 and seen.number("Epilog") is None
    assert seen.default_account == "root" and seen.associations and seen.associations[0].qos == ("normal",)


def test_limits_of_a_qos() -> None:
    line = "fast|00:02:00|normal,low|requeue|02:00:00|3|cpu=16,gres/gpu=2,mem=8G|node=2|gres/gpu=4\n"  # as a real sacctmgr printed it
    seen = site(qos=line, associations="lab|train|fast,normal|fast|1-00:00:00|5|gres/gpu=8|\n")
    limits = Limits(120, 3, {"cpu": 16, "gres/gpu": 2, "mem": 8192}, {"node": 2}, {"gres/gpu": 4})
    assert seen.qos == {"fast": Qos("fast", 120, ("normal", "low"), "requeue", limits)}
    assert seen.associations is not None
    [mine] = seen.associations
    assert (mine.account, mine.partition, mine.qos, mine.limits) == ("lab", "train", ("fast", "normal"), Limits(1440, 5, {"gres/gpu": 8}))


def test_a_reservation() -> None:
    text = (
        "ReservationName=evodoc StartTime=1796000000 EndTime=1796000300 Duration=00:05:00 Nodes=n[3-4] NodeCnt=2 CoreCnt=16 Features=(null) "
        "PartitionName=(null) Flags=SPEC_NODES TRES=cpu=16 Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE "
        "BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
    )
    [seen] = site(reservations=text).reservations.values()
    assert (seen.name, seen.nodes, seen.state, seen.users, seen.accounts) == ("evodoc", ("n3", "n4"), "INACTIVE", ("root",), ())


@dataclass
class Cluster:
    """Answers with the recording, accounting or not."""

    answers: dict[str, str]
    asked: list[tuple[str, ...]] = field(default_factory=list)
    code: int = 0

    def run(self, *argv: str, seconds: float | None = None) -> Answer:
        self.asked.append(argv)
        names = {argv: name for name, argv in QUESTIONS.items()}
        name = names.get(argv) or {"assoc": "associations", "user": "user", "qos": "qos"}[argv[4]]
        return Answer(self.code, self.answers[name], "Unable to contact slurm controller" if self.code else "")


def test_a_cluster_is_asked_seven_questions_and_four_without_accounting() -> None:
    with_accounting = Cluster(RECORDED)
    assert read_site(with_accounting).associations
    assert len(with_accounting.asked) == 7 and not any("{" in word for argv in with_accounting.asked for word in argv)
    without = Cluster({**RECORDED, "config": RECORDED["config"].replace("accounting_storage/slurmdbd", "accounting_storage/none")})
    assert read_site(without).associations is None
    assert len(without.asked) == 4 and not any(argv[0] == "sacctmgr" for argv in without.asked)


def test_a_silent_cluster_and_a_strange_one() -> None:
    with pytest.raises(SlurmUnavailable, match="Unable to contact"):
        read_site(Cluster(RECORDED, code=1))
    with pytest.raises(SiteUnreadable, match="sinfo"):
        site(nodes="n1 idle\n")
    with pytest.raises(SiteUnreadable, match="sacctmgr"):
        site(qos="normal|0\n")


@pytest.mark.parametrize(("text", "minutes"), [("1-00:00:00", 1440), ("00:30:00", 30), ("30:00", 30), ("10", 10), ("2-12", 3600), ("00:00:30", 0.5),
                                               ("UNLIMITED", None), ("NONE", None), ("", None), ("Partition_Limit", None)])
def test_limits_in_minutes(text: str, minutes: float | None) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("00:02:00", 120), ("1-01:00:00", 90000), ("", 0)])
def test_times_in_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(("text", "found"), [
    ("gpu:fake:4", (Gres("gpu", "fake", 4),)), ("gpu:4", (Gres("gpu", None, 4),)), ("gpu", (Gres("gpu", None, 1),)), ("(null)", ()), ("", ()),
    ("gpu:h100:8(S:0-1),nvme:1T", (Gres("gpu", "h100", 8), Gres("nvme", None, 1024**4))),
    ("gpu:1g.10gb:7(S:0),shard:32", (Gres("gpu", "1g.10gb", 7), Gres("shard", None, 32))),
    ("gres/gpu=2", (Gres("gpu", None, 2),)), ("gres:gpu:h100", (Gres("gpu", "h100", 1),)),
])
def test_generic_resources(text: str, found: tuple[Gres, ...]) -> None:
    assert parse_gres(text) == found


def test_tres_and_memory() -> None:
    assert parse_tres("cpu=32,mem=2T,gres/gpu:h100=8,license/x=many") == {"cpu": 32, "mem": 2 * 1024**2, "gres/gpu:h100": 8}
    assert [parse_mib(text) for text in ("4000", "64G", "1024K")] == [4000, 65536, 1]


@pytest.mark.parametrize(("text", "names"), [
    ("n[1-3,07],login", ("n1", "n2", "n3", "n07", "login")), ("r[1-2]n[09-10]", ("r1n09", "r1n10", "r2n09", "r2n10")),
    ("a,b", ("a", "b")), ("(null)", ()), ("", ()),
])
def test_lists_of_nodes(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(text) == names


def test_a_list_that_names_too_many_is_cut_off() -> None:
    assert len(expand_nodes("r[1-99999999]n[1-99999999]")) == 100_000


@given(st.text(alphabet="n[]-,0123456789 x", max_size=30))
def test_any_list_of_nodes_is_read_and_bounded(text: str) -> None:
    assert len(expand_nodes(text)) <= 100_000


@pytest.mark.parametrize(("constraint", "features", "holds"), [
    ("a&b", {"a"}, False), ("a&b", {"a", "b"}, True), ("a,b", {"a"}, False), ("a|b", {"b"}, True), ("a&b|c", {"c"}, True), ("a&b|c", {"a"}, False),
    ("[r1|r2]", {"r2"}, True), ("a*2&b*1", {"b"}, True), ("[r1|r2]", {"r3"}, False),
])
def test_constraints(constraint: str, features: set[str], holds: bool) -> None:
    assert satisfies(constraint)(frozenset(features)) is holds


@pytest.mark.parametrize(("state", "usable"), [
    ("idle", True), ("mixed", True), ("idle~", True), ("planned", True), ("reserved", True), ("down*", False), ("idle*", False),
    ("draining", False), ("drained", False), ("inval", False), ("unknown", False),
])
def test_usable_states(state: str, usable: bool) -> None:
    assert site(nodes=f"n1|debug*|{state}|8|4000|(null)|(null)\n").nodes["n1"].usable is usable
