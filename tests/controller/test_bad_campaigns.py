"""Hand-edited and damaged campaigns: one clear error that says what to do, exit code 2, nothing lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evo_hpc.paths import COMPLETE, CampaignPaths
from tests.crash.campaign import check_sound, finish, make_campaign, outcome


def evo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "evo_hpc.cli", *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CampaignPaths:
    paths = make_campaign(tmp_path_factory.mktemp("finished") / "campaign")
    finish(paths)
    return paths


@pytest.fixture
def campaign(finished: CampaignPaths, tmp_path: Path) -> CampaignPaths:
    """A finished campaign of one's own, to damage."""
    shutil.copytree(finished.root, tmp_path / "campaign")
    return CampaignPaths(tmp_path / "campaign")


def test_a_finished_campaign_is_valid_and_has_nothing_left_to_do(campaign: CampaignPaths) -> None:
    assert evo("validate", str(campaign.root)).returncode == 0
    before = outcome(campaign)
    events = campaign.events.read_text()
    finish(campaign)
    assert outcome(campaign) == before and campaign.events.read_text() == events


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


DAMAGE: list[tuple[str, Callable[[CampaignPaths], object], str]] = [
    ("mistyped key", lambda c: edit(c.campaign_yaml, "samples_per_task", "sample_per_task"),
     r"campaign\.yaml:8: unknown key `evaluation\.sample_per_task`; did you mean `samples_per_task`\?"),
    ("mistyped domain key", lambda c: edit(c.campaign_yaml, "sealed: 8", "seeled: 8"),
     r"campaign\.yaml:4: unknown key `domain\.config\.seeled`; did you mean `sealed`\?"),
    ("unknown domain", lambda c: edit(c.campaign_yaml, "name: arithmetic", "name: aritmetic"), "did you mean 'arithmetic'"),
    ("other tasks", lambda c: edit(c.campaign_yaml, "train: 16", "train: 32"), "`domain` changed after the tasks were made"),
    ("unknown reward", lambda c: edit(c.recipe_yaml, "correct: 1.0", "corect: 1.0"), r"recipe\.yaml: reward\.weights: unknown component corect"),
    ("edited tasks", lambda c: edit(c.tasks("dev"), '"answer":"', '"answer":"1'), "edited after it was made"),
    ("half tasks file", lambda c: truncate(c.tasks("dev")), r"dev\.jsonl:20: not JSON"),
    ("lost parent", lambda c: shutil.rmtree(c.version("v0000").root), "parent v0000 does not exist. Its folder was removed"),
    ("copied version", lambda c: shutil.copytree(c.version("v0001").root, c.version("v0002").root), "set it to the folder's name"),
    ("no version.yaml", lambda c: c.version("v0001").version_yaml.unlink(), r"v0001/version\.yaml: missing"),
    ("recipe edited after training", lambda c: edit(c.version("v0001").recipe_yaml, "steps: 12", "steps: 13"), "the recipe was edited after training"),
    ("hook", lambda c: (c.version("v0001").hooks.mkdir(), (c.version("v0001").hooks / "reward.py").write_text("")), "hooks are not supported yet"),
    ("half evaluation", lambda c: truncate(c.version("v0001").evaluation("dev") / "part-00000.parquet"), "truncated or changed"),
    ("evaluation without record", lambda c: (c.version("v0000").evaluation("probe") / COMPLETE).unlink(), "the write never finished"),
    ("half training table", lambda c: truncate(next(c.version("v0001").metrics.glob("*.parquet"))), "truncated or changed"),
    ("half policy", lambda c: truncate(c.base.policy / "model.safetensors"), "truncated or changed"),
    ("damaged record", lambda c: c.version("v0001").job("train", 0).record.write_text("{"), r"record\.json:\d: not valid JSON"),
    ("edited looks", lambda c: c.looks.write_text("{}\n"), r"looks\.jsonl:1: not a look"),
    ("damaged lease", lambda c: c.lease.write_text("[]"), "not a lease"),
]


@pytest.mark.parametrize("damage, message", [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_damage_is_named_by_validate_and_stops_the_controller(campaign: CampaignPaths, damage: Callable, message: str) -> None:
    damage(campaign)
    found = evo("validate", str(campaign.root))
    assert found.returncode == 2 and re.search(message, found.stdout), found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    as_json = json.loads(evo("validate", str(campaign.root), "--json").stdout)
    assert as_json["valid"] is False and as_json["problems"]


STOPS = {"half training table", "edited looks"}


@pytest.mark.parametrize("damage, message", [d[1:] for d in DAMAGE if d[0] not in STOPS], ids=[d[0] for d in DAMAGE if d[0] not in STOPS])
def test_the_controller_refuses_to_guess(campaign: CampaignPaths, damage: Callable, message: str) -> None:
    damage(campaign)
    before = sorted(p for p in campaign.root.rglob("*") if p.is_file() and "controller" not in p.parts)
    ran = evo("run", str(campaign.root))
    assert ran.returncode in (1, 2) and re.search(message, ran.stderr), ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    assert sorted(p for p in campaign.root.rglob("*") if p.is_file() and "controller" not in p.parts) == before, "nothing touched"


@pytest.mark.parametrize("remove", [
    lambda c: shutil.rmtree(c.version("v0001").evaluation("dev")),
    lambda c: shutil.rmtree(c.version("v0001").train),
    lambda c: shutil.rmtree(c.base.policy),
])
def test_what_was_removed_is_published_again_from_its_job(campaign: CampaignPaths, remove: Callable) -> None:
    before = outcome(campaign)
    remove(campaign)
    finish(campaign)
    assert outcome(campaign) == before
    check_sound(campaign)


def test_a_missing_base_model(tmp_path: Path) -> None:
    paths = make_campaign(tmp_path / "campaign")
    edit(paths.campaign_yaml, "supervised: {steps: 1}", "path: /nowhere/model")
    for command in ("validate", "run"):
        done = evo(command, str(paths.root))
        assert done.returncode == 2 and "/nowhere/model" in done.stdout + done.stderr and "base_model" in done.stdout + done.stderr


def test_not_a_campaign(tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "absent", "no such campaign folder"), (tmp_path, "not a campaign folder")):
        done = evo("run", str(folder))
        assert done.returncode == 2 and message in done.stderr and list(tmp_path.iterdir()) == []


def test_evaluations_of_different_epochs_are_not_compared(campaign: CampaignPaths) -> None:
    from evo_hpc.store.manifest import quarantine

    version = campaign.version("v0001")
    shutil.rmtree(version.root / "comparisons")
    folder = version.evaluation("dev")
    record = json.loads((folder / COMPLETE).read_text())
    record["meta"].update(epoch="0123456789abcdef", epoch_components={**record["meta"]["epoch_components"], "engine.engine_version": "9"})
    (folder / COMPLETE).write_text(json.dumps(record))
    done = evo("run", str(campaign.root))
    assert done.returncode == 2 and "different evaluator epochs (engine.engine_version: None -> 9)" in done.stderr
    quarantine(folder)
    finish(campaign)
    check_sound(campaign)


def test_a_torn_folder_is_set_aside_not_deleted(campaign: CampaignPaths) -> None:
    folder = campaign.version("v0001").evaluation("dev")
    (folder / COMPLETE).unlink()
    shutil.move(folder, folder.with_name("dev.mine"))
    finish(campaign)
    assert folder.with_name("dev.mine").is_dir() and (folder / COMPLETE).exists()
