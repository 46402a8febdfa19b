"""control.yaml: read with file and line, written without losing what a person wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evo_hpc.config.control import Control, place_of, read_control
from evo_hpc.config.yaml_io import ConfigError
from evo_hpc.controller.control import write_control
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import StoreError

VERSIONS = {"v0000": [], "v0001": ["v0000"], "v0012": ["v0001"]}


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    return CampaignPaths(tmp_path)


def test_no_file_means_go_on(paths: CampaignPaths) -> None:
    assert read_control(paths, VERSIONS) == Control() == Control(state="run", cancel=[], reason=None)


@pytest.mark.parametrize("text, message", [
    ("state: paus\n", r"control\.yaml:1: `state`: Input should be 'run', 'pause', 'drain' or 'stop' \(found 'paus'\)"),
    ("state: pause\nreasn: x\n", r"control\.yaml:2: unknown key `reasn`; did you mean `reason`\?"),
    ("cancel:\n  - v0001\n  - 12\n", r"control\.yaml:3: `cancel\.1`: "),
    ("cancel: [v1]\n", r"control\.yaml:1: `cancel\.0`: .*pattern"),
    ("state: [pause\n", r"control\.yaml:\d: "),
    ("# all commented out\n", r"control\.yaml:1: expected keys and values, found an empty file"),
    ("cancel:\n  - v0001\n\n  - v0013\n", r"control\.yaml:4: `cancel`: no version v0013 in this campaign; did you mean v0012\?"),
    ("cancel: [v9876543]\n", r"control\.yaml:1: `cancel`: no version v9876543 in this campaign; there are: v0000, v0001, v0012"),
    ("state: run\ncancel: [v0000]\n", r"control\.yaml:2: `cancel`: everything starts from v0000"),
])
def test_what_is_wrong_is_told_with_its_line(paths: CampaignPaths, text: str, message: str) -> None:
    paths.control_yaml.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_control(paths, VERSIONS)


def test_a_change_keeps_comments_order_and_what_it_does_not_name(paths: CampaignPaths) -> None:
    paths.control_yaml.write_text("# mine\nreason: disk is full   # ask Ada\nstate: pause  # until Monday\ncancel:\n  - v0001  # diverged\n  - v0012  # too slow\n")
    assert write_control(paths, state="run", cancel=["v0001"]) == Control(state="run", cancel=["v0001"], reason="disk is full")
    assert paths.control_yaml.read_text() == "# mine\nreason: disk is full   # ask Ada\nstate: run    # until Monday\ncancel:\n  - v0001  # diverged\n"
    write_control(paths, cancel=["v0001", "v0012"], reason=None)
    assert read_control(paths, VERSIONS) == Control(state="run", cancel=["v0001", "v0012"])
    assert "# diverged" in paths.control_yaml.read_text()


def test_a_new_file_explains_every_field(paths: CampaignPaths) -> None:
    written = write_control(paths, VERSIONS, state="drain", cancel=["v0012"], reason="a: 'quoted' # reason")
    assert read_control(paths, VERSIONS) == written == Control(state="drain", cancel=["v0012"], reason="a: 'quoted' # reason")
    text = paths.control_yaml.read_text()
    for name, field in Control.model_fields.items():
        assert f"\n{name}:" in text and field.description
    for word in ("pause", "drain", "stop"):
        assert f"{word}:" in text


def test_going_on_where_nothing_was_wished_leaves_no_file(paths: CampaignPaths) -> None:
    write_control(paths, state="run")
    assert not paths.control_yaml.exists()


@pytest.mark.parametrize("changes, message", [
    ({"state": "paused"}, "not changed: `state`"), ({"states": "pause"}, "not changed: `states`"), ({"cancel": ["v0011"]}, r"no version v0011.*did you mean v0012\?"),
    ({"cancel": ["v0000"]}, "cannot be cancelled"),
])
def test_a_change_that_does_not_fit_changes_nothing(paths: CampaignPaths, changes: dict[str, object], message: str) -> None:
    for before in (None, "state: pause  # mine\n"):
        if before is not None:
            paths.control_yaml.write_text(before)
        with pytest.raises(ConfigError, match=message):
            write_control(paths, VERSIONS, **changes)
        assert (paths.control_yaml.read_text() if paths.control_yaml.exists() else None) == before


def test_a_broken_file_is_not_written_over(paths: CampaignPaths) -> None:
    paths.control_yaml.write_text("state: pause\nreasn: my only copy of this note\n")
    with pytest.raises(ConfigError, match=r"control\.yaml:2: unknown key `reasn`"):
        write_control(paths, state="run")
    assert "my only copy" in paths.control_yaml.read_text()


def test_a_reader_sees_the_old_file_or_the_new_one(paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.control_yaml.write_text("state: pause\n")

    def killed(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(StoreError, match="control.yaml"):
        write_control(paths, state="stop")
    assert paths.control_yaml.read_text() == "state: pause\n" and [p.name for p in paths.root.iterdir()] == ["control.yaml"]


def test_the_place_of_a_wish_can_be_told(paths: CampaignPaths) -> None:
    paths.control_yaml.write_text("schema_version: 1\n\nstate: drain\n")
    assert place_of(paths, "state") == f"{paths.control_yaml}:3"
