"""The doctor: what it asks, what it makes of the answers, and how it says so. Slurm's answers are recordings of a real cluster."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evo_hpc.config.cluster import Cluster
from evo_hpc.controller.doctor import check_saving, check_this_machine, doctor, exit_code, newest_save_seconds, record, view
from evo_hpc.dispatch.slurm.commands import Answer, SlurmMissing
from evo_hpc.dispatch.slurm.environment import login
from evo_hpc.dispatch.slurm.site import ACCOUNTING_QUESTIONS, QUESTIONS, parse_site
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.checks import CheckResult
from evo_hpc.store.mount_peers import NAMES, PeerReport

RECORDED = {path.stem: path.read_text() for path in (Path(__file__).parents[1] / "dispatch/slurm/recorded_site").glob("*.txt")}
SOUND = {"defaults": {"partition": "train", "memory": "2G", "minutes": 120, "gpus_per_node": "fake:4"}, "shards": 2}
REFUSAL = "sbatch: error: invalid partition specified: trian\nallocation failure: Invalid partition name specified\n"
ACCEPTED = "sbatch: Job 28 to start at 2026-11-30T08:13:31 using 1 processors on nodes n1 in partition train\n"
NO_NODES = "srun: error: Unable to allocate resources: Requested nodes are busy\n"


def peers(*wins: list[int]) -> Answer:
    return Answer(0, "".join(json.dumps(asdict(PeerReport(n, f"n{n}", each, [0.01], 0.0))) + "\n" for n, each in enumerate(wins)), "")


@dataclass
class Recorded:
    """Answers as the real cluster did."""

    sbatch: Callable[[str], Answer] = lambda script: Answer(0, "", ACCEPTED)
    srun: Callable[[tuple[str, ...]], Answer] = lambda argv: peers(list(range(0, NAMES, 2)), list(range(1, NAMES, 2)))
    answers: dict[str, str] = field(default_factory=lambda: RECORDED)
    scripts: list[str] = field(default_factory=list)
    races: list[tuple[str, ...]] = field(default_factory=list)

    def run(self, *argv: str, seconds: float | None = None) -> Answer:
        if argv[:2] == ("sbatch", "--test-only"):
            self.scripts.append(Path(argv[2]).read_text())
            return self.sbatch(self.scripts[-1])
        if argv[0] == "srun":
            self.races.append(argv)
            assert Path(argv[argv.index("--peer") - 1]).is_dir()
            return self.srun(argv)
        for name, question in {**QUESTIONS, **ACCOUNTING_QUESTIONS}.items():
            if argv == tuple(each.format_map({"user": login(), "cluster": "evo"}) for each in question):
                return Answer(0, self.answers[name], "")
        raise AssertionError(argv)


def examine(tmp_path: Path, commands: Any, slurm: dict[str, Any] = SOUND) -> list[CheckResult]:
    cluster = Cluster.model_validate({"executor": "slurm", "slurm": slurm})
    return doctor(CampaignPaths(tmp_path), cluster, cluster_checks=True, commands=commands)


def named(found: list[CheckResult], check: str) -> CheckResult:
    [result] = [each for each in found if each.check == check]
    return result


def test_a_sound_profile_on_a_sound_cluster(tmp_path: Path) -> None:
    commands = Recorded()
    found = examine(tmp_path, commands)
    assert [each for each in found if each.level == "error"] == [] and exit_code(found) == 0
    assert named(found, "mount: filesystem").level == "ok", "another node has seen it, whatever its type"
    assert named(found, "controller, supervise, train, evaluate: sbatch").level == "ok"
    assert list(tmp_path.iterdir()) == [], "nothing is left in the campaign"


def test_slurm_judges_the_scripts_that_would_be_submitted(tmp_path: Path) -> None:
    commands = Recorded()
    examine(tmp_path, commands)
    assert len(commands.scripts) == 4
    assert all("--partition=train" in script and "--gpus-per-node=fake:4" in script for script in commands.scripts)
    assert ["--array=0-1" in script for script in commands.scripts] == [False, False, False, True]
    assert ["--dependency=singleton" in script for script in commands.scripts] == [True, False, False, False]


def test_slurms_own_refusal_is_an_error_of_that_kind(tmp_path: Path) -> None:
    commands = Recorded(sbatch=lambda script: Answer(1, "", REFUSAL) if "--array" in script else Answer(0, "", ""))
    found = examine(tmp_path, commands)
    refused = named(found, "evaluate: sbatch")
    assert refused.level == "error" and "invalid partition specified: trian" in refused.text
    assert named(found, "controller, supervise, train: sbatch").level == "ok"
    assert exit_code(found) == 2


def test_a_script_that_cannot_be_written_is_an_error_of_that_kind(tmp_path: Path) -> None:
    found = examine(tmp_path, Recorded(), {**SOUND, "train": {"sbatch_arguments": ["--output=elsewhere"]}})
    assert named(found, "train: sbatch").level == "error" and "output" in named(found, "train: sbatch").text


def test_a_cluster_that_does_not_answer_is_a_finding(tmp_path: Path) -> None:
    class Silent:
        def run(self, *argv: str, seconds: float | None = None) -> Answer:
            return Answer(1, "", "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)\n")

    found = examine(tmp_path, Silent())
    assert named(found, "slurm").level == "error" and "Unable to contact" in named(found, "slurm").text
    assert named(found, "mount: link").level == "ok", "the rest is told all the same"


def test_a_machine_without_slurm_is_a_finding(tmp_path: Path) -> None:
    class Absent:
        def run(self, *argv: str, seconds: float | None = None) -> Answer:
            raise SlurmMissing("sinfo: no such program")

    assert named(examine(tmp_path, Absent()), "slurm").text == "sinfo: no such program"


def test_a_shared_name_won_twice_is_an_error(tmp_path: Path) -> None:
    found = examine(tmp_path, Recorded(srun=lambda argv: peers(list(range(NAMES)), [5])))
    assert named(found, "nodes: race").level == "error" and exit_code(found) == 2


def test_no_free_nodes_for_the_race(tmp_path: Path) -> None:
    commands = Recorded(srun=lambda argv: Answer(1, "", NO_NODES))
    found = examine(tmp_path, commands, {**SOUND, "evaluate": {"partition": "scavenge", "gpus_per_node": "1"}})
    assert [next(word for word in argv if word.startswith("--partition")) for argv in commands.races] == ["--partition=train", "--partition=scavenge"]
    result = named(found, "nodes: race")
    assert result.level == "warning" and "Requested nodes are busy" in result.text
    assert named(found, "mount: filesystem").level == "warning"


def test_a_profile_with_one_node_has_no_race(tmp_path: Path) -> None:
    commands = Recorded(answers={**RECORDED, "nodes": "\n".join(line for line in RECORDED["nodes"].splitlines() if line.startswith("n1|"))})
    assert "not tested between nodes: no partition" in named(examine(tmp_path, commands), "nodes: race").text
    assert commands.races == []


def test_without_a_campaign_and_without_the_cluster(tmp_path: Path) -> None:
    commands = Recorded()
    found = doctor(None, Cluster.model_validate({"slurm": SOUND}), cluster_checks=True, commands=commands)  # type: ignore[arg-type]
    assert commands.races == [] and not any(each.check.startswith(("mount", "nodes", "train: save")) for each in found)
    alone = doctor(CampaignPaths(tmp_path), Cluster(), cluster_checks=False)
    assert {each.check.split(":")[0] for each in alone} == {"machine", "mount"}


def test_interpreters(tmp_path: Path) -> None:
    assert [each.level for each in check_this_machine(Cluster(), tmp_path)] == ["ok"]
    assert [each.level for each in check_this_machine(Cluster(python=sys.executable), tmp_path)] == ["ok"]
    [missing] = check_this_machine(Cluster(python="/no/such/python"), tmp_path)
    assert missing.level == "error" and "/no/such/python" in missing.text
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'evo_hpc'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    [other] = check_this_machine(Cluster(python=str(bare)), tmp_path)
    assert other.level == "error" and "No module named 'evo_hpc'" in other.text


def progress(paths: CampaignPaths, version: str, incarnation: int, **values: Any) -> None:
    path = paths.version(version).job("train", 0).incarnation(incarnation).progress
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def test_the_newest_measured_save_counts(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    assert newest_save_seconds(paths) is None
    progress(paths, "v0001", 0, time=100.0, save_seconds=7.5)
    progress(paths, "v0002", 0, time=200.0, save_seconds=3.25)
    progress(paths, "v0002", 1, time=300.0, stage="loading")
    torn = paths.version("v0003").job("train", 0).incarnation(0).progress
    torn.parent.mkdir(parents=True)
    torn.write_text("{")
    assert newest_save_seconds(paths) == 3.25


@pytest.mark.parametrize(("seconds", "partition", "levels", "words"), [
    (None, "train", ["ok"], "not measured yet"), (20.0, "train", ["ok"], "took 20.0 s"), (130.0, "train", ["warning"], "comes 120 s ahead"),
    (4.0, "scavenge", ["ok", "ok"], "at most one step is lost"), (6.0, "scavenge", ["ok", "warning"], "leaves 5 s, a checkpoint took 6.0 s"),
])
def test_saves_against_the_warning_and_the_grace(seconds: float | None, partition: str, levels: list[str], words: str) -> None:
    site = parse_site(RECORDED, "root", frozenset({"root"}))
    found = check_saving(seconds, Cluster.model_validate({"slurm": {"train": {"partition": partition}}}), site)
    assert [each.level for each in found] == levels
    assert any(words in each.text for each in found)


def test_record_and_view() -> None:
    results = [CheckResult("a: b", "ok", "fine"), CheckResult("c", "warning", "so so", "look"), CheckResult("d", "error", "broken [x]", "mend it")]
    assert record(results) == {
        "checks": [asdict(each) for each in results], "errors": 1, "warnings": 1, "exit_code": 2,
    }
    assert exit_code(results[:2]) == 0
    shown = io.StringIO()
    Console(file=shown, width=120).print(view(results))
    for words in ("a: b", "broken [x]", "-> mend it", "1 errors, 1 warnings."):
        assert words in shown.getvalue()
