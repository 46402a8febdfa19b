"""The harness of a campaign: built-in and own analyzers found, numbered, copied, and never trusted blindly again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evo_hpc.assets import asset_dir
from evo_hpc.harness.harness import BadHarness, current_harness, discover, make_harness, read_harnesses
from evo_hpc.harness.manifest import BadAnalyzer
from evo_hpc.paths import CampaignPaths
from tests.harness.data import write_analyzer

BUILT_IN = ["length", "optimisation", "score", "signal"]


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignPaths:
    (tmp_path / "c").mkdir()
    return CampaignPaths(tmp_path / "c")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CampaignPaths:
    """A campaign with h0001 of the built-in analyzers and of `mine`."""
    paths = CampaignPaths(tmp_path_factory.mktemp("c"))
    write_analyzer(paths.analyzers_folder / "mine")
    make_harness(paths, discover(paths), 1)
    return paths


@pytest.fixture
def copied(made: CampaignPaths, tmp_path: Path) -> CampaignPaths:
    shutil.copytree(made.root, tmp_path / "copied")
    return CampaignPaths(tmp_path / "copied")


def test_own_analyzers_join_and_replace_the_built_in_ones(campaign: CampaignPaths) -> None:
    assert [a.name for a in discover(campaign).analyzers] == BUILT_IN
    plain = discover(campaign).digest
    write_analyzer(campaign.analyzers_folder / "mine")
    joined = discover(campaign)
    assert [a.name for a in joined.analyzers] == sorted([*BUILT_IN, "mine"]) and joined.digest != plain
    write_analyzer(campaign.analyzers_folder / "score")
    replaced = discover(campaign)
    assert replaced.folders["score"].root == campaign.analyzers_folder / "score" and len(replaced.folders) == 5 and replaced.digest != joined.digest
    shutil.rmtree(campaign.analyzers_folder)
    assert discover(campaign).digest == plain


def test_the_digest_is_that_of_names_and_contents(campaign: CampaignPaths) -> None:
    folder = write_analyzer(campaign.analyzers_folder / "mine")
    before = discover(campaign).digest
    for name in ("README.md", ".hidden", "__pycache__/x.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
        (campaign.analyzers_folder / name).parent.mkdir(exist_ok=True)
        (campaign.analyzers_folder / name).write_text("x")
    assert discover(campaign).digest == before
    (folder / "report.md.j2").write_text("other")
    assert discover(campaign).digest != before


def test_own_rules_take_the_place_of_the_built_in_ones(campaign: CampaignPaths) -> None:
    before = discover(campaign)
    assert before.rules == asset_dir("analyzers") / "rules.yaml"
    campaign.rules_yaml.write_text("schema_version: 1\nrules: []\n")
    after = discover(campaign)
    assert after.rules == campaign.rules_yaml and after.digest != before.digest and after.hashes == before.hashes


def test_what_is_no_analyzer_is_one_clear_error(campaign: CampaignPaths) -> None:
    campaign.analyzers_folder.mkdir()
    (campaign.analyzers_folder / "rules.yaml").touch()
    with pytest.raises(BadHarness, match="analyzers/rules.yaml: not an analyzer"):
        discover(campaign)
    (campaign.analyzers_folder / "rules.yaml").unlink()
    (campaign.analyzers_folder / "empty").mkdir()
    with pytest.raises(BadHarness, match="analyzers/empty: an empty folder among the analyzers"):
        discover(campaign)


def test_a_harness_is_a_numbered_copy(made: CampaignPaths) -> None:
    found, harness = discover(made), current_harness(made)
    assert harness is not None and harness.id == "h0001" and harness.number == 1 and harness.digest == found.digest
    assert harness.manifest.previous is None and harness.manifest.added == sorted([*BUILT_IN, "mine"]) and not harness.manifest.changed
    assert [a.name for a in harness.analyzers()] == sorted([*BUILT_IN, "mine"])
    assert [a.name for a in harness.analyzers(live=True)] == ["optimisation", "score", "signal"]
    assert all(a.paths.root.is_relative_to(made.root / "harness/h0001") for a in harness.analyzers())
    assert harness.rules.read_bytes() == found.rules.read_bytes()
    assert "score.collapse" in harness.finding_ids(live=True) and "length.truncation" not in harness.finding_ids(live=True)
    assert make_harness(made, found, 1).digest == harness.digest  # again changes nothing


def test_the_copy_is_not_the_source(copied: CampaignPaths) -> None:
    source, copy = copied.analyzers_folder / "mine/report.md.j2", copied.harness(1).analyzer("mine").report
    make_harness(copied, discover(copied), 2)
    assert copied.harness(2).analyzer("mine").report.stat().st_ino != source.stat().st_ino
    with source.open("a") as file:  # in place, as some editors write
        file.write("more")
    assert copy.read_text() != source.read_text() and len(read_harnesses(copied)) == 2


def test_the_next_harness_says_what_changed(copied: CampaignPaths) -> None:
    write_analyzer(copied.analyzers_folder / "other")
    write_analyzer(copied.analyzers_folder / "score")
    shutil.rmtree(copied.analyzers_folder / "mine")
    copied.rules_yaml.write_text("schema_version: 1\nrules: []\n")
    manifest = make_harness(copied, discover(copied), 2).manifest
    assert (manifest.id, manifest.previous) == ("h0002", "h0001")
    assert (manifest.added, manifest.changed, manifest.removed) == (["other"], ["score", "rules"], ["mine"])
    assert [h.id for h in read_harnesses(copied)] == ["h0001", "h0002"]


def test_nothing_is_published_of_a_broken_set(campaign: CampaignPaths) -> None:
    write_analyzer(campaign.analyzers_folder / "mine", query="SELECT nosuch FROM steps")
    with pytest.raises(BadAnalyzer, match="mine/query.sql.j2:1: .*nosuch"):
        make_harness(campaign, discover(campaign), 1)
    (campaign.analyzers_folder / "mine/measures.sql.j2").unlink()
    write_analyzer(campaign.analyzers_folder / "other", report="{{")
    with pytest.raises(BadAnalyzer, match="(?s)missing measures.sql.j2.*report.md.j2:1") as caught:
        make_harness(campaign, discover(campaign), 1)
    assert len(str(caught.value).splitlines()) == 2 and current_harness(campaign) is None and not (campaign.root / "harness").exists()


def test_a_change_while_it_is_made_is_noticed(copied: CampaignPaths) -> None:
    found = discover(copied)
    (copied.analyzers_folder / "mine/report.md.j2").write_text("other")
    with pytest.raises(BadHarness, match="run again|not as"):
        make_harness(copied, found, 2)


@pytest.mark.parametrize("harm", ["edit", "remove", "add", "folder", "rules", "manifest", "complete"])
def test_an_edited_harness_is_refused(copied: CampaignPaths, harm: str) -> None:
    paths = copied.harness(1)
    if harm == "edit":
        text = paths.analyzer("score").query.read_text()
        paths.analyzer("score").query.write_text(text.replace("-- One row", "-- Two row"))
    elif harm == "remove":
        paths.analyzer("score").report.unlink()
    elif harm == "add":
        (paths.analyzer("score").root / "more.sql").touch()
    elif harm == "folder":
        write_analyzer(paths.analyzers_folder / "other")
    elif harm == "rules":
        paths.rules.write_text(paths.rules.read_text().replace("schema_version: 1", "schema_version: 2"))
    elif harm == "manifest":
        paths.manifest.write_text(paths.manifest.read_text().replace("id: h0001", "id: h0002"))
    else:
        (paths.root / "COMPLETE.json").unlink()
    with pytest.raises(BadHarness, match=r"(?s)h0001.*is never edited: restore it\. Your own analyzers go into .*/copied/analyzers"):
        current_harness(copied)
