"""The doctor on a real cluster: what it asks is answered, its race runs on two nodes, and what it foretells Slurm does."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.config.cluster import Cluster as Profile
from evo_hpc.config.slurm import Slurm
from evo_hpc.controller.doctor import doctor, exit_code
from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.errors import SlurmMissing
from evo_hpc.dispatch.slurm.site import ACCOUNTING_QUESTIONS, QUESTIONS, read_site
from evo_hpc.dispatch.slurm.words import expand_nodes
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.checks import CheckResult
from evo_hpc.store.mount_peers import VISIBLE
from tests.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOUND: dict[str, Any] = {
    "defaults": {"partition": "train", "memory": "500M", "minutes": 60},
    "train": {"nodes": 2, "gpus_per_node": "4"},
    "evaluate": {"partition": "eval"},
    "shards": 2,
}


@pytest.fixture
def commands(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Of the test cluster, which is idle before and after."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    cluster.wait_idle()
    yield Commands.of(Slurm())
    cluster.wait_idle()


def examine(folder: Path, commands: Commands, slurm: dict[str, Any]) -> list[CheckResult]:
    profile = Profile.model_validate({"executor": "slurm", "slurm": slurm})
    return doctor(CampaignPaths(folder), profile, cluster_checks=True, commands=commands)


def profile_alone(commands: Commands, slurm: dict[str, Any]) -> list[CheckResult]:
    """Without a campaign, so without the race."""
    return doctor(None, Profile.model_validate({"slurm": slurm}), cluster_checks=True, commands=commands)


def errors(found: list[CheckResult]) -> list[str]:
    return sorted(each.check for each in found if each.level == "error")


def test_a_sound_profile_and_a_folder_that_both_nodes_see(tmp_path: Path, commands: Commands) -> None:
    hostile_path = tmp_path / "it's; a $(folder) %j {{ x }}"
    hostile_path.mkdir()
    found = examine(hostile_path, commands, SOUND)
    assert errors(found) == [], found
    [race] = [each for each in found if each.check == "nodes: race"]
    assert race.level == "ok" and "n1, n2" in race.text
    assert list(hostile_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "wrong", "check"), [
    ("train", {"partition": "trian"}, "train: partition"), ("train", {"gpus_per_node": "5"}, "train: GPUs"),
    ("train", {"gpus_per_node": "h100:1"}, "train: GPUs"),
    ("evaluate", {"constraint": "fast"}, "evaluate: constraint"), ("evaluate", {"reservation": "none"}, "evaluate: reservation"),
    ("evaluate", {"exclude": "n9"}, "evaluate: exclude"), ("evaluate", {"exclude": "n[3-4]"}, "evaluate: exclude"),
    ("supervise", {"nodes": 3}, "supervise: nodes"),
    ("supervise", {"cpus_per_task": 9}, "supervise: CPUs"), ("supervise", {"memory": "5G"}, "supervise: memory"),
])
def test_what_it_calls_an_error_slurm_refuses(commands: Commands, kind: str, wrong: dict[str, Any], check: str) -> None:
    found = profile_alone(commands, {**SOUND, kind: {**SOUND.get(kind, {}), **wrong}})
    assert errors(found) == sorted([check, f"{kind}: sbatch"]), found
    assert exit_code(found) == 2


def test_a_time_limit_that_slurm_would_accept_and_never_start(commands: Commands) -> None:
    """EnforcePartLimits=NO: sbatch takes the job, which then waits for ever."""
    found = profile_alone(commands, {**SOUND, "evaluate": {"partition": "eval", "minutes": 1441}})
    assert errors(found) == ["evaluate: time limit"]


def test_a_preemptible_partition(commands: Commands) -> None:
    found = profile_alone(commands, {**SOUND, "evaluate": {"partition": "scavenge"}})
    told = {each.check: (each.level, each.text) for each in found}
    assert told["evaluate: preemption"][0] == "ok" and "are requeued" in told["evaluate: preemption"][1]
    assert told["evaluate: warning"][0] == "warning" and "leaves 5 s to save" in told["evaluate: warning"][1]


def test_a_folder_that_one_node_does_not_see(tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun runs the peers with another folder on n2, as an unmounted filesystem would have it."""
    hidden = tmp_path / "python"
    hidden.write_text(
        '#!/bin/sh\n[ "$SLURM_PROCID" = 1 ] && set -- "$1" "$2" "$3.not-mounted" "$4" "$5" "$6" "$7"\n' f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    hidden.chmod(0o755)
    monkeypatch.setattr("evo_hpc.controller.doctor.PATIENCE_SECONDS", 2.0)
    profile = Profile.model_validate({"executor": "slurm", "python": str(hidden), "slurm": SOUND})
    found = doctor(CampaignPaths(tmp_path), profile, cluster_checks=True, commands=commands)
    told = [each for each in found if each.check == VISIBLE and each.level == "error"]
    assert any("n2" in each.text and "not there" in each.text for each in told), found


def test_a_cluster_that_is_down(commands: Commands, tmp_path: Path) -> None:
    """The same configuration, but a port at which nobody answers."""
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text(re.sub(r"(?m)^SlurmctldPort=.*$", "SlurmctldPort=1", Path(commands.environment["SLURM_CONF"]).read_text()))
    found = profile_alone(replace(commands, environment={**commands.environment, "SLURM_CONF": str(elsewhere)}), SOUND)
    assert errors(found) == ["slurm"] and "Unable to contact slurm controller" in found[-1].text


def test_a_machine_without_slurms_commands(tmp_path: Path) -> None:
    with pytest.raises(SlurmMissing):
        read_site(Commands(10, {"PATH": str(tmp_path)}))


def test_lists_of_nodes_are_read_as_slurm_reads_them(commands: Commands) -> None:
    for text in ("n[1-4]", "n[1-3,07],login", "r[1-2]n[09-11]", "a,b[1]"):
        assert list(expand_nodes(text)) == commands.hostnames(text)


def test_every_question_is_answered(commands: Commands) -> None:
    site = read_site(commands)
    assert site.associations is not None and len(QUESTIONS) + len(ACCOUNTING_QUESTIONS) == 7
    assert site.partitions["train"].nodes == ("n1", "n2") and site.nodes["n1"].gpus("fake") == 4 and site.warns_of_preemption
