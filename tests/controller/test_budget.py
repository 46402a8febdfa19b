"""Caps: what they stop, when, for whom, and what the message says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.campaign import Budget, Campaign
from evo_hpc.config.yaml_io import ConfigError, load_model
from evo_hpc.controller.budget import check, may_start, problems, to_stop
from evo_hpc.controller.spending import Spent
from evo_hpc.dispatch.status import JobStatus
from evo_hpc.jobs.cost import Cost, total
from evo_hpc.paths import CampaignPaths


def using(**gpu_hours: float) -> Spent:
    owners = {owner: Cost(gpu_hours=hours, wall_hours=hours / 4, source="accounted", starts=1) for owner, hours in gpu_hours.items()}
    return Spent(total(owners.values()), owners)


def running(*owners: str) -> list[JobStatus]:
    paths = CampaignPaths(Path("/c"))
    folders = {"base": paths.base, "final": paths.final}
    return [JobStatus((folders.get(owner) or paths.version(owner)).job("train", 0), "running") for owner in owners]


def test_no_cap_stops_nothing() -> None:
    assert check(Budget(), using(v0001=1e9)) == []


def test_a_cap_of_the_campaign_stops_everyones_submissions_then_everyones_jobs() -> None:
    budget, live = Budget(gpu_hours=10), running("base", "v0001", "v0002", "final")
    assert check(budget, using(base=2, v0001=7.9)) == []
    at_cap = check(budget, using(base=2, v0001=8))
    assert [(o.scope, o.cap, o.used, o.stops) for o in at_cap] == [("campaign", "gpu_hours", 10.0, False)]
    assert not any(may_start(at_cap, owner) for owner in ("base", "v0001", "v0003", "final")) and to_stop(at_cap, live) == []
    beyond = check(budget, using(base=2, v0001=8.5))
    assert to_stop(beyond, live) == live


def test_a_cap_of_versions_stops_that_version_alone() -> None:
    over = check(Budget(version_gpu_hours=10, grace=0.1), using(base=99, final=99, v0001=10.5, v0002=11, v0003=3))
    assert [(o.scope, o.stops) for o in over] == [("v0001", False), ("v0002", True)], "the base policy is no version"
    assert [may_start(over, owner) for owner in ("base", "v0001", "v0002", "v0003")] == [True, False, False, True]
    assert [s.job.owner.name for s in to_stop(over, running("v0001", "v0002", "v0003", "base"))] == ["v0002"]


def test_wall_hours_are_a_cap_of_their_own() -> None:
    over = check(Budget(gpu_hours=100, wall_hours=5, version_wall_hours=3), using(v0001=12, v0002=8))
    assert [(o.scope, o.cap, o.used) for o in over] == [("campaign", "wall_hours", 5.0), ("v0001", "version_wall_hours", 3.0)]


HOURS = st.floats(0, 100)


@given(HOURS, HOURS, st.floats(0.1, 100), st.floats(0, 1))
def test_spending_more_never_allows_more(used: float, more: float, cap: float, grace: float) -> None:
    budget = Budget(version_gpu_hours=cap, grace=grace)
    before, after = (check(budget, using(v0001=hours)) for hours in (used, used + more))
    assert may_start(before, "v0001") or not may_start(after, "v0001")
    live = running("v0001")
    assert not to_stop(before, live) or to_stop(after, live)
    assert not to_stop(before, live) or not may_start(before, "v0001"), "jobs are stopped only where none may start"
    assert may_start(check(Budget(version_gpu_hours=used + cap, grace=grace), using(v0001=used)), "v0001"), "raising the cap above what is used goes on"


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    (tmp_path / "campaign.yaml").write_text(
        "name: c\ndomain: {name: arithmetic}\nbudget:\n  # what we were granted\n  gpu_hours: 10\n  version_gpu_hours: 6\n"
    )
    return CampaignPaths(tmp_path)


def test_the_message_says_where_how_much_and_what_to_do(paths: CampaignPaths) -> None:
    budget = load_model(paths.campaign_yaml, Campaign).budget
    told = problems(paths, check(budget, using(v0001=6.1, v0002=3.9)))
    assert told == [
        f"{paths.campaign_yaml}:5: campaign has used 10 of 10 GPU hours (by Slurm's accounting): nothing more is submitted; running jobs may go on up to 10.5. "
        "Raise budget.gpu_hours, or leave it and the campaign ends here",
        f"{paths.campaign_yaml}:6: v0001 has used 6.1 of 6 GPU hours (by Slurm's accounting): nothing more is submitted; running jobs may go on up to 6.3. "
        "Raise budget.version_gpu_hours, or list v0001 under `cancel` in control.yaml to go on without it",
    ]
    (stopped,) = problems(paths, check(budget, using(v0001=6.5)))
    assert "they save and end" in stopped


@pytest.mark.parametrize("line, message", [
    ("gpu_hour: 3", r"campaign\.yaml:5: unknown key `budget\.gpu_hour`; did you mean `gpu_hours`\?"),
    ("gpu_hours: 0", r"campaign\.yaml:5: `budget\.gpu_hours`: .*greater than 0"),
    ("grace: -0.1", r"campaign\.yaml:5: `budget\.grace`: .*greater than or equal to 0"),
    ("wall_hours: .inf", r"campaign\.yaml:5: `budget\.wall_hours`: .*finite"),
])
def test_a_budget_that_is_wrong_is_refused_with_its_line(paths: CampaignPaths, line: str, message: str) -> None:
    paths.campaign_yaml.write_text(paths.campaign_yaml.read_text().replace("gpu_hours: 10", line, 1))
    with pytest.raises(ConfigError, match=message):
        load_model(paths.campaign_yaml, Campaign)
