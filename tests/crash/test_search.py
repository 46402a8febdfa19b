"""The whole loop with stand-in jobs: keep, merge, revert, a run stopped early; the same decisions wherever it was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.agent.proposal import read_round
from evo_hpc.config.yaml_io import dump_model
from evo_hpc.controller.act import spec_of
from evo_hpc.controller.actions import Submit
from evo_hpc.controller.state import read_state
from evo_hpc.errors import EvoError
from evo_hpc.lineage.decision import read_decision
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.manifest import read_complete
from tests.crash.campaign import HERE, controller, evo, finish, make_search

DRIVER = str(HERE / "killing_controller.py")


def story(paths: CampaignPaths) -> dict[str, Any]:
    """All that a campaign has found and decided, without times, generations and counters."""
    decisions = {}
    for version in paths.versions():
        if version.decision_yaml.exists():
            found = read_decision(version.decision_yaml).model_dump(mode="json")
            decisions[version.id] = found
    rounds = [read_round(path).model_dump(mode="json", exclude={"generation", "digest"}) for _, path in paths.rounds()]
    looks = [(look["number"], look["version"], look["against"], look["alpha"]) for look in (read_json(path) for _, path in paths.looks())]
    trained = {
        v.id: sorted((f["name"], f["sha256"]) for f in read_complete(v.train, hashes=True)["files"] if "policy" in f["name"])
        for v in paths.versions() if v.train.exists()
    }
    analyses = {
        v.id: sorted((f["name"], f["sha256"]) for f in read_complete(v.analysis("h0001"), hashes=True)["files"]) for v in paths.versions()
    }
    return {"decisions": decisions, "rounds": rounds, "looks": looks, "trained": trained, "analyses": analyses}


@pytest.fixture(scope="module")
def first_version(tmp_path_factory: pytest.TempPathFactory) -> CampaignPaths:
    """A campaign up to the decision on v0001, to start the others from."""
    paths = make_search(tmp_path_factory.mktemp("first") / "campaign")
    process = controller(paths, "-m", "evo_hpc.cli", "run", "--until", "v0001")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert [v.id for v in paths.versions()] == ["v0000", "v0001"] and not paths.rounds(), "nothing beyond what was asked for"
    assert read_decision(paths.version("v0001").decision_yaml).promoted
    return paths


def copy_of(first: CampaignPaths, folder: Path) -> CampaignPaths:
    shutil.copytree(first.root, folder)
    shutil.copyfile(first.root.parent / "python-of-the-jobs", folder.parent / "python-of-the-jobs")
    return CampaignPaths(folder)


@pytest.fixture(scope="module")
def undisturbed(first_version: CampaignPaths, tmp_path_factory: pytest.TempPathFactory) -> tuple[CampaignPaths, dict[str, Any], int]:
    paths = copy_of(first_version, tmp_path_factory.mktemp("undisturbed") / "campaign")
    process = controller(paths, DRIVER, KILL_AT="-1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return paths, story(paths), int(output.split()[-1])


def test_the_story(undisturbed: tuple[CampaignPaths, dict[str, Any], int]) -> None:
    paths, told, _ = undisturbed
    decisions = {name: (d["decision"], d["promoted"], d["outcome"]) for name, d in told["decisions"].items()}
    assert decisions == {
        "v0001": ("keep", True, "completed"),
        "v0002": ("keep", True, "completed"),
        "v0003": ("merge", False, "completed"),
        "v0004": ("keep", True, "completed"),
        "v0005": ("prune", False, "stopped_early"),
        "v0006": ("revert", False, "completed"),
    }
    versions = {n.id: n.node for n in read_state(paths).versions.values()}
    assert versions["v0002"].version.parents == versions["v0003"].version.parents == ["v0001"], "one round, from the same evidence"
    assert versions["v0004"].version.parents == ["v0002", "v0003"] and told["decisions"]["v0003"]["merge_with"] == ["v0002"]
    merged = versions["v0004"].recipe.optimizer
    assert (merged.kl_coef, merged.clip_high) == (0.0, 0.4)
    assert versions["v0005"].version.parents == ["v0002"] and versions["v0006"].version.parents == ["v0004"]
    pairs = [(version, against) for _, version, against, _ in told["looks"]]
    assert pairs == [
        ("v0001", "v0000"), ("v0002", "v0001"), ("v0003", "v0001"), ("v0003", "v0002"), ("v0004", "v0002"), ("v0004", "v0003"), ("v0006", "v0004"),
    ], "the parents, then the incumbent where it is no parent; the run that was stopped was never looked at"
    assert {d["prediction"]["outcome"] for d in told["decisions"].values()} >= {"held", "failed"}
    assert [len(r["proposals"]) for r in told["rounds"]] == [2, 2, 1]


def test_a_run_that_is_stopped_early_leaves_its_steps_and_no_policy(undisturbed: tuple[CampaignPaths, dict[str, Any], int]) -> None:
    version = undisturbed[0].version("v0005")
    meta = read_complete(version.train, hashes=True)["meta"]
    assert meta["stopped_early"] == {"step": 10, "findings": ["score.collapse"]} and meta["step"] == 10
    assert [step for step, _ in version.watches()] == [10]
    names = [f["name"] for f in read_complete(version.train)["files"]]
    assert names and all(name.endswith(".parquet") for name in names)
    assert not version.evaluation("dev").exists() and not version.evaluation("probe").exists()
    assert read_json(version.jobs()[-1].record)["state"] == "stopped_early"


def die_and_go_on(first: CampaignPaths, told: dict[str, Any], folder: Path, point: int, when: str) -> bool:
    paths = copy_of(first, folder / f"{when}-{point}" / "campaign")
    process = controller(paths, DRIVER, KILL_AT=str(point), KILL_WHEN=when)
    process.communicate(timeout=120)
    finish(paths)
    assert story(paths) == told, f"killed {when} write {point}"
    return process.returncode == -signal.SIGKILL


STRIDE = int(os.environ.get("CRASH_STRIDE", "120"))
"""CRASH_STRIDE=1 tries every write of the search (an hour on two cores)."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_at_every_write_of_the_search(
    first_version: CampaignPaths, undisturbed: tuple[CampaignPaths, dict[str, Any], int], tmp_path: Path
) -> None:
    points = range(1, undisturbed[2] + 1, STRIDE)
    reached = [die_and_go_on(first_version, undisturbed[1], tmp_path, point, "before" if i % 2 else "after") for i, point in enumerate(points)]
    assert sum(reached) > 0.8 * len(reached)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def promote_unread(paths: CampaignPaths) -> None:
    """v0003 was better than its parent and not than the incumbent: cut that look out of its decision and promote it."""
    path = paths.version("v0003").decision_yaml
    found = read_decision(path)
    parent = found.gate[0].model_copy(update={"role": "parent and incumbent"})
    path.write_bytes(dump_model(found.model_copy(update={"gate": [parent], "promoted": True})))


@pytest.mark.parametrize("damage, message", [
    (lambda c: c.round(2).unlink(), r"round-0003\.yaml: round 3 where round 2 is expected"),
    (lambda c: edit(c.round(1), "Without the KL term", "Without it"), r"round-0001\.yaml: edited after it was written"),
    (lambda c: shutil.rmtree(c.round(1).parent), r"v0002/version\.yaml: says `author: agent`, but no round in .* proposed it"),
    (promote_unread, r"v0003/decision\.yaml: rests on other looks at dev than the gate takes now"),
    (lambda c: shutil.rmtree(c.version("v0005").watch(10).parent), r"v0005/train: was stopped early, which watch/ beside it contradicts: .* rm -r .*v0005/analysis"),
    (lambda c: edit(c.version("v0005").watch(10) / "score" / "findings.json", "critical", "warning"), r"Restore it: a look at a run that has ended is not taken again"),
], ids=["lost round", "edited round", "no rounds", "promoted unread", "lost watch", "edited watch"])
def test_records_of_the_search_are_not_to_be_edited(
    undisturbed: tuple[CampaignPaths, dict[str, Any], int], tmp_path: Path, damage: Any, message: str
) -> None:
    paths = copy_of(undisturbed[0], tmp_path / "campaign")
    damage(paths)
    with pytest.raises(EvoError, match=message):
        read_state(paths)


def test_what_is_removed_on_advice_is_made_again_and_the_story_stays(undisturbed: tuple[CampaignPaths, dict[str, Any], int], tmp_path: Path) -> None:
    """The base policy, a decision in the middle, and an analysis are gone: nobody is decided anew meanwhile, no look is taken."""
    paths = copy_of(undisturbed[0], tmp_path / "campaign")
    shutil.rmtree(paths.base.policy)
    paths.version("v0002").decision_yaml.unlink()
    shutil.rmtree(paths.version("v0004").analysis("h0001"))
    finish(paths)
    assert story(paths) == undisturbed[1]


@pytest.mark.slow
def test_siblings_whose_parent_has_a_higher_id(undisturbed: tuple[CampaignPaths, dict[str, Any], int], tmp_path: Path) -> None:
    """By hand, in an order that nobody would choose: decided all the same, siblings joined or not without a crash."""
    paths = copy_of(undisturbed[0], tmp_path / "campaign")
    recipe = paths.version("v0001").recipe_yaml.read_text()
    for name, parent, old, new in (("v0007", "v0009", "beta1: 0.9", "beta1: 0.8"), ("v0008", "v0009", "beta2: 0.999", "beta2: 0.99"),
                                   ("v0009", "v0001", "weight_decay: 0.0", "weight_decay: 0.1")):
        folder = paths.version(name)
        folder.root.mkdir()
        folder.version_yaml.write_text(f"id: {name}\nparents: [{parent}]\n")
        assert old in recipe
        folder.recipe_yaml.write_text(recipe.replace(old, new))
    finish(paths)
    assert {name: read_decision(paths.version(name).decision_yaml).decision for name in ("v0007", "v0008", "v0009")} == {
        "v0007": "prune", "v0008": "prune", "v0009": "prune",
    }


def test_a_second_attempt_at_a_run_is_watched_as_the_first_was(first_version: CampaignPaths, tmp_path: Path) -> None:
    """The futility rule is declared once a run: what campaign.yaml says by the time of a retry does not count for it."""
    paths = copy_of(first_version, tmp_path / "campaign")
    edit(paths.campaign_yaml, "watch: {every: 10}", "watch: {every: 3, stop_on: []}")
    state = read_state(paths)
    (first,) = state.versions["v0001"].jobs["train"]
    assert first.intent is not None
    again = spec_of(Submit("v0001", "train", 1, {}, first.intent.work), state, paths.version("v0001").job("train", 1))
    assert again.config["watch"] == {"every": 10, "stop_on": ["score.collapse"]}
    other = spec_of(Submit("v0001", "train", 1, {}, "another recipe"), state, paths.version("v0001").job("train", 1))
    assert other.config["watch"] == {"every": 3, "stop_on": []}


def test_dry_run_writes_nothing(first_version: CampaignPaths) -> None:
    before = {p: p.stat().st_mtime_ns for p in first_version.root.rglob("*")}
    plan = json.loads(evo("run", str(first_version.root), "--dry-run", "--json").stdout)
    assert [(a["action"], a["versions"]) for a in plan["actions"]] == [("Propose", ["v0002", "v0003"])]
    assert "Propose" in evo("run", str(first_version.root), "--dry-run").stdout
    assert {p: p.stat().st_mtime_ns for p in first_version.root.rglob("*")} == before
