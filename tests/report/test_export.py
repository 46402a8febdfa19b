"""Exports of the metric tables: TensorBoard files against an independent reader, W&B and Trackio against stand-ins of the calls that
the real ones offer (wandb 0.31, trackio 0.43); while a run goes on, again, and after another training.
"""

from __future__ import annotations

import json
import struct
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.controller.state import read_state
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths, event_file
from evo_hpc.report.export import to_tensorboard, to_trackio, to_wandb
from evo_hpc.report.export.export import export
from evo_hpc.report.export.event_file import FILE_VERSION, crc32c, scalar_event, version_event
from evo_hpc.report.export.points import RunPoints, StepPoints, read_runs
from tests.crash.campaign import STEPS, controller, evo, make_campaign

TAGS = {"optimisation/loss", "score/score_mean", "score/reward_mean"}


# -- an independent reader: protobuf's own runtime, and the CRC bit by bit


def event_class() -> Any:
    """tensorflow.Event, with the fields that scalars need."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in {
        "Value": [("tag", 1, kinds.TYPE_STRING, ""), ("simple_value", 2, kinds.TYPE_FLOAT, "")],
        "Summary": [("value", 1, kinds.TYPE_MESSAGE, ".t.Value")],
        "Event": [("wall_time", 1, kinds.TYPE_DOUBLE, ""), ("step", 2, kinds.TYPE_INT64, ""), ("file_version", 3, kinds.TYPE_STRING, ""),
                  ("summary", 5, kinds.TYPE_MESSAGE, ".t.Summary")],
    }.items():
        made = file.message_type.add(name=message)
        for name, number, kind, of in fields:
            label = kinds.LABEL_REPEATED if (message, name) == ("Summary", "value") else kinds.LABEL_OPTIONAL
            made.field.add(name=name, number=number, type=kind, type_name=of or None, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


EVENT = event_class()


def masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def events(data: bytes) -> list[Any]:
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at : at + 8])
        assert len(body) == length and struct.unpack_from("<I", data, at + 12 + length)[0] == masked(body)
        found.append(EVENT.FromString(body))
        at += 16 + length
    return found


def scalars(path: Path) -> dict[tuple[int, str], float]:
    """By step and tag; no point twice."""
    first, *rest = events(path.read_bytes())
    assert first.file_version == FILE_VERSION and not first.HasField("summary")
    points = [((event.step, value.tag), value.simple_value) for event in rest for value in event.summary.value]
    assert len(dict(points)) == len(points)
    return dict(points)


def test_the_crc_of_the_standard() -> None:
    """RFC 3720, appendix B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43 and crc32c(bytes(range(32))) == 0x46DD794E


@given(st.floats(0, 4e9), st.integers(0, 2**62), st.dictionaries(st.text(max_size=200), st.floats(width=32, allow_nan=False), max_size=5))
def test_any_event_is_read_as_it_was_written(wall_time: float, step: int, values: dict[str, float]) -> None:
    values = {tag: value for tag, value in values.items() if tag.isprintable()}
    first, event = events(version_event(wall_time) + scalar_event(wall_time, step, values))
    assert first.wall_time == event.wall_time == wall_time and event.step == step
    assert [(value.tag, value.simple_value) for value in event.summary.value] == list(values.items())


def test_a_value_beyond_float32_is_infinite() -> None:
    (event,) = events(scalar_event(0.0, 1, {"big": 1e300, "small": -1e300}))
    assert [value.simple_value for value in event.summary.value] == [float("inf"), float("-inf")]


# -- of a campaign


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> CampaignPaths:
    """Its jobs are stand-ins that write the real tables; exported for the first time while v0001 trains."""
    paths = make_campaign(tmp_path_factory.mktemp("export") / "campaign")
    process = controller(paths, FAKE_STEP_SECONDS="0.3")
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                export(read_state(paths), "tensorboard", [], None)
                break
            except UserError as error:
                assert "no version has metrics yet" in str(error)
            assert time.monotonic() < deadline and process.poll() is None, "no part of the run was ever to be seen"
            time.sleep(0.05)
    finally:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return paths


def test_while_it_trains_then_to_the_end_then_again(campaign: CampaignPaths) -> None:
    path = event_file(campaign.export("tensorboard"), "v0001")
    early, at_first = scalars(path), path.stat().st_ino
    assert {step for step, _ in early} == set(range(1, max(step for step, _ in early) + 1))
    assert max(step for step, _ in early) < STEPS, "whole parts of an unfinished run"
    told = json.loads(evo("export", "tensorboard", str(campaign.root), "v0001", "--json").stdout)
    (run,) = told["runs"]
    assert (run["version"], run["written"], run["steps"], run["points"], run["last_step"]) == ("v0001", "extended", STEPS, 3 * STEPS, STEPS)
    assert path.stat().st_ino == at_first, "a TensorBoard that has the file open reads on"
    found = scalars(path)
    assert set(found) == {(step, tag) for step in range(1, STEPS + 1) for tag in TAGS} and early.items() <= found.items()
    assert all(found[step, "optimisation/loss"] == pytest.approx(1 / step) for step in range(1, STEPS + 1))
    before = path.read_bytes()
    again = evo("export", "tensorboard", str(campaign.root))
    assert again.stdout.startswith("v0001: unchanged") and path.read_bytes() == before


def test_a_version_without_metrics_and_a_tracker_that_there_is_not(campaign: CampaignPaths) -> None:
    for words, said in ((("tensorboard", str(campaign.root), "v0000"), "v0000: no metrics yet"), (("aim", str(campaign.root)), "aim: no such tracker")):
        done = evo("export", *words)
        assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize("tracker", [to_wandb, to_trackio], ids=("wandb", "trackio"))
def test_a_tracker_that_is_not_installed(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tracker.__name__.rpartition("_")[2]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"pip install {name}"):
        tracker.export([made(1)], None)


def made(steps: int, *, id: str = "a", shift: float = 0.0) -> RunPoints:
    return RunPoints("c", "v0001", id, tuple(StepPoints(s, 1e9 + s, {"score/x": s + shift}) for s in range(1, steps + 1)))


def test_a_file_that_was_cut_off_and_one_of_another_run(tmp_path: Path) -> None:
    path = event_file(tmp_path, "v0001")
    assert to_tensorboard.export([made(5)], tmp_path)[0]["written"] == "new"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])  # a kill within a write
    assert to_tensorboard.export([made(5)], tmp_path)[0]["written"] == "extended" and path.read_bytes() == whole
    assert to_tensorboard.export([made(3, shift=0.5)], tmp_path)[0]["written"] == "new"
    assert scalars(path) == {(s, "score/x"): s + 0.5 for s in (1, 2, 3)}


# -- stand-ins of trackers: they keep what a server or database would, and append as those do


class FakeWandb(types.ModuleType):
    """`init` and the runs that it gives, as far as the export uses them."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.history: dict[tuple[str, str], list[tuple[int, dict[str, float]]]] = {}
        self.asked: dict[str, Any] = {}
        self.refuses = False

    def init(self, **asked: Any) -> Any:
        if self.refuses:
            raise self.Error("No API key configured")
        self.asked = asked
        history = self.history.setdefault((asked["project"], asked["id"]), [])
        run = types.SimpleNamespace(starting_step=history[-1][0] + 1 if history else 0, ended=None)
        run.log = lambda values, step: history.append((step, dict(values)))
        run.finish = lambda exit_code=0: setattr(run, "ended", exit_code)
        return run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_wandb_gets_each_step_once(wandb: FakeWandb, tmp_path: Path) -> None:
    assert to_wandb.export([made(3)], tmp_path / "out")[0]["written"] == "new"
    assert to_wandb.export([made(5)], tmp_path / "out")[0] == {
        "version": "v0001", "steps": 2, "points": 2, "last_step": 5, "where": "c/a", "written": "extended"}
    assert to_wandb.export([made(5)], tmp_path / "out")[0]["steps"] == 0
    assert wandb.history == {("c", "a"): [(s, {"score/x": float(s)}) for s in range(1, 6)]}
    assert wandb.asked["resume"] == "allow" and wandb.asked["dir"] == str(tmp_path / "out") and (tmp_path / "out").is_dir()
    to_wandb.export([made(2, id="b")], None)
    assert len(wandb.history) == 2, "a version that was trained anew is another run"


def test_wandb_offline_or_without_a_key_is_refused(wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.refuses = True
    with pytest.raises(UserError, match="No API key"):
        to_wandb.export([made(1)], None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="WANDB_MODE=offline"):
        to_wandb.export([made(1)], None)


class FakeTrackio(types.ModuleType):
    """A database of projects; `log` appends, whatever is there."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.projects: dict[str, dict[str, list[tuple[int, dict[str, float]]]]] = {}
        self.finished = 0

    def init(self, *, project: str, name: str, resume: str, **_: Any) -> Any:
        assert resume == "never"
        rows = self.projects.setdefault(project, {}).setdefault(name, [])
        return types.SimpleNamespace(log=lambda values, step: rows.append((step, dict(values))))

    def finish(self) -> None:
        self.finished += 1

    def Api(self) -> Any:  # noqa: N802
        def runs(project: str) -> list[Any]:
            if project not in self.projects:
                raise ValueError(f"Project '{project}' does not exist")
            return [types.SimpleNamespace(name=name, delete=lambda name=name: self.projects[project].pop(name)) for name in self.projects[project]]

        return types.SimpleNamespace(runs=runs)


def test_trackio_has_each_step_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    other = RunPoints("c", "v0002", "o", made(1).steps)
    for steps, written in ((3, "new"), (5, "replaced"), (5, "replaced")):
        assert to_trackio.export([made(steps), other], tmp_path)[0]["written"] == written
    assert trackio.projects == {"c": {"v0001-a": [(s, {"score/x": float(s)}) for s in range(1, 6)], "v0002-o": [(1, {"score/x": 1.0})]}}
    assert trackio.finished == 6
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    with pytest.raises(UserError, match="TRACKIO_SPACE_ID"):
        to_trackio.export([made(1)], None)


def test_what_a_tracker_prints_does_not_mix_with_the_record(campaign: CampaignPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from evo_hpc.cli import app

    trackio = FakeTrackio()
    trackio.finish = lambda: print("* Run finished")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    app(["export", "trackio", str(campaign.root), "--json"], standalone_mode=False)
    said = capsys.readouterr()
    assert json.loads(said.out)["runs"][0]["steps"] == STEPS and "* Run finished" in said.err


def test_the_id_of_a_run_follows_from_what_it_was_trained_with(campaign: CampaignPaths) -> None:
    state = read_state(campaign)
    (run,), again = read_runs(state), read_runs(read_state(campaign), ["v0001", "v0001"])
    assert [each.id for each in again] == [run.id] and len(run.id) == 16
    state.versions["v0001"] = replace(state.versions["v0001"], run="trained with something else")
    assert read_runs(state)[0].id != run.id
