"""A controller that remembers what it read sees what one that reads everything anew sees, at the latest when its sweep has come round."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from evo_hpc.controller.books import Books
from evo_hpc.controller.cache import StateCache
from evo_hpc.controller.plan import make_plan
from evo_hpc.controller.state import CampaignState, read_state
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.errors import EvoError
from evo_hpc.jobs.outputs import Part, PartsSoFar
from evo_hpc.jobs.spec import Result
from evo_hpc.paths import COMPLETE, CampaignPaths, part_name
from evo_hpc.store.atomic import dump_json, read_json
from tests.controller.attempts import Owner
from tests.controller.many_versions import add_live_jobs, add_version, dispatch_of, extend, make_versions, quick_yaml
from tests.report.campaign_folder import STEPS

SWEEP, COUNT = 4, 10
CLOSED = "v0005"
HEIR = "v0012"
"""Starts from the policy of v0001."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CampaignPaths]:
    with quick_yaml():
        yield make_versions(tmp_path_factory.mktemp("many") / "campaign", COUNT)


class Looks:
    """Both controllers, and the campaign as it was before each edit."""

    def __init__(self, paths: CampaignPaths) -> None:
        self.paths = paths
        self.dispatch: Dispatch = dispatch_of(paths, add_live_jobs(paths, 2), poll_seconds=3600)
        heir = paths.version(HEIR)
        heir.root.mkdir()
        heir.version_yaml.write_bytes(dump_json({"id": HEIR, "parents": ["v0000"], "init": f"v0001@{STEPS}", "hypothesis": "An heir."}))
        heir.recipe_yaml.write_bytes(paths.version("v0001").recipe_yaml.read_bytes())
        self.cache = StateCache(sweep=SWEEP, settle_seconds=0.05)
        self.backup = paths.root.with_name("backup")
        shutil.copytree(paths.root, self.backup)
        self.agree()

    def restore(self) -> None:
        shutil.rmtree(self.paths.root)
        shutil.copytree(self.backup, self.paths.root)
        self.agree()

    def cached(self) -> dict[str, Any] | str:
        return told(lambda: read_state(self.paths, dispatch=self.dispatch, cache=self.cache))

    def agree(self) -> tuple[dict[str, Any] | str, int]:
        """What both see, once they do, and after how many looks that was."""
        fresh = told(lambda: read_state(self.paths, dispatch=self.dispatch))
        most = ceil((COUNT + 1) / SWEEP) + 1
        for looks in range(1, most + 1):
            if self.cached() == fresh:
                for _ in range(most):
                    assert self.cached() == fresh, "and it stays so"
                return fresh, looks
        raise AssertionError(f"still otherwise after {most} looks")


def told(read: Callable[[], CampaignState]) -> dict[str, Any] | str:
    """A state but for its time, or why it is refused."""
    try:
        state = read()
    except EvoError as error:
        return str(error)
    versions = {
        name: replace(version, jobs={kind: [replace(status, silent=0.0, said_at=None) for status in attempts] for kind, attempts in version.jobs.items()})
        for name, version in state.versions.items()
    }
    return {f.name: versions if f.name == "versions" else getattr(state, f.name) for f in fields(state) if f.name != "now"}


@pytest.fixture(scope="module")
def looks(campaign: CampaignPaths) -> Looks:
    return Looks(campaign)


def in_place(path: Path, before: str, after: str) -> None:
    """As an editor that writes into the file, its times set back: only the inode's change time tells."""
    stat, text = path.stat(), path.read_text()
    assert before in text
    with path.open("r+") as file:
        file.write(text.replace(before, after))
        file.truncate()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def result(paths: CampaignPaths) -> None:
    paths.version("v0010").job("train", 0).incarnation(0).result.write_bytes(dump_json(Result(outcome="failed", error="x", seconds=1).model_dump()))


def parts(paths: CampaignPaths) -> None:
    found = paths.version("v0010").job("train", 0)
    path = (found.incarnation(0).steps / part_name(1, 2)).relative_to(paths.root)
    part = Part(table="steps", path=str(path), first_step=1, last_step=2, bytes=1, sha256="")  # type: ignore[arg-type]
    made = PartsSoFar(run=read_json(found.intent)["work"], parts=[part])
    found.incarnation(0).parts.write_bytes(dump_json(made.model_dump(mode="json")))


EDITS: dict[str, tuple[Callable[[CampaignPaths], object], str | None]] = {
    # What is done, and what is refused then, if anything.
    "reason of a decision": (lambda p: in_place(p.version(CLOSED).decision_yaml, "So it came", "So it goes"), None),
    "decision turned": (lambda p: in_place(p.version("v0009").decision_yaml, '"promoted": false', '"promoted": true '), "cannot be promoted"),
    "decision of another": (lambda p: in_place(p.version(CLOSED).decision_yaml, CLOSED, "v0006"), "copied together with results of another"),
    "decision removed": (lambda p: p.version(CLOSED).decision_yaml.unlink(), None),
    "hypothesis": (lambda p: in_place(p.version(CLOSED).version_yaml, "Again.", "Again!"), None),
    "parent that is not there": (lambda p: in_place(p.version(CLOSED).version_yaml, "v0000", "v0777"), "does not exist"),
    "recipe of another training": (lambda p: in_place(p.version(CLOSED).recipe_yaml, "lr: ", "lr: 1"), "trained with another recipe"),
    "recipe that is none": (lambda p: in_place(p.version(CLOSED).recipe_yaml, "steps:", "stops:"), "unknown key"),
    "evaluation removed": (lambda p: shutil.rmtree(p.version(CLOSED).evaluation("dev")), None),
    "evaluation of the root removed": (lambda p: shutil.rmtree(p.version("v0000").evaluation("dev")), None),
    "evaluation edited": (lambda p: in_place(p.version(CLOSED).evaluation("dev") / COMPLETE, '"missing": 0', '"missing": 3'), None),
    "evaluation cut": (lambda p: os.truncate(p.version(CLOSED).evaluation("dev") / "part-00000.parquet", 9), "damaged"),
    "policy cut": (lambda p: os.truncate(p.version(CLOSED).policy(STEPS) / "model.safetensors", 1), "truncated"),
    "training of an ancestor removed": (lambda p: shutil.rmtree(p.version("v0001").train), None),
    "analysis removed": (lambda p: shutil.rmtree(p.version(CLOSED).analysis("h0001")), None),
    "comparison removed": (lambda p: p.version(CLOSED).comparisons()[0].unlink(), None),
    "version removed": (lambda p: shutil.rmtree(p.version(CLOSED).root), None),
    "parent removed": (lambda p: shutil.rmtree(p.version("v0000").root), "does not exist"),
    "version added": (lambda p: add_version(p, 13), None),
    "version copied": (lambda p: shutil.copytree(p.version(CLOSED).root, p.version("v0013").root), "needs its own id"),
    "version misnamed": (lambda p: shutil.copytree(p.version(CLOSED).root, p.versions_folder / "copy"), "not a version's name"),
    "job removed": (lambda p: shutil.rmtree(p.version(CLOSED).job("train", 0).root), None),
    "record removed": (lambda p: p.version(CLOSED).job("train", 0).record.unlink(), None),
    "job of another": (lambda p: in_place(p.version(CLOSED).job("train", 0).intent, CLOSED, "v0006"), "copied together with results of another"),
    "look edited": (lambda p: in_place(p.look(3), '"generation": 1', '"generation": 2'), "not in the ledger"),
    "look removed": (lambda p: p.look(3).unlink(), "expected 3"),
    "last look removed": (lambda p: p.look(COUNT - 1).unlink(), "not in the ledger"),
    "seed of the campaign": (lambda p: in_place(p.campaign_yaml, "description:", "seed: 7\ndescription:"), "trained with another"),
    "a job ended": (result, None),
    "a job showed more": (parts, None),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_seen(looks: Looks, edit: str) -> None:
    before = looks.cached()
    change, refused = EDITS[edit]
    change(looks.paths)
    try:
        seen, _ = looks.agree()
        assert seen != before
        assert isinstance(seen, str) == (refused is not None) and (refused or "") in str(seen)
    finally:
        looks.restore()


def test_open_versions_and_lost_folders_are_seen_at_once(looks: Looks) -> None:
    in_place(looks.paths.version(HEIR).version_yaml, "An heir.", "No heir.")
    result(looks.paths)
    shutil.rmtree(looks.paths.version(CLOSED).root)
    assert looks.agree()[1] == 1
    looks.restore()


def test_a_version_on_a_disk_that_was_away_for_a_moment_is_seen(looks: Looks) -> None:
    folder = looks.paths.version(CLOSED).root
    away = looks.paths.root.with_name("away")
    folder.rename(away)
    folder.symlink_to(away)
    looks.agree()
    away.rename(away.with_name("not mounted"))
    time.sleep(3 * looks.cache.settle_seconds)
    assert f"{CLOSED}/version.yaml: missing" in str(looks.agree()[0]), "it is not taken for one that was never there"
    away.with_name("not mounted").rename(away)
    seen, _ = looks.agree()
    assert isinstance(seen, dict) and CLOSED in seen["versions"]
    folder.unlink()
    shutil.rmtree(away)
    looks.restore()


def test_a_job_that_beats_is_never_taken_for_silent(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are not read at every look; what is known of one is never so old that a living job would be killed for it."""
    job, now = looks.paths.version("v0010").job("train", 0), time.time()
    for minute in range(1, 31):
        monkeypatch.setattr(looks.dispatch, "now", lambda minute=minute: now + 60.0 * minute)
        job.incarnation(0).heartbeat.write_bytes(dump_json({"time": now + 60.0 * minute}))
        (status,) = read_state(looks.paths, dispatch=looks.dispatch, cache=looks.cache).versions["v0010"].jobs["train"]
        assert status.phase == "running" and status.silent < 60
    monkeypatch.setattr(looks.dispatch, "now", lambda: now + 7200.0)
    (status,) = read_state(looks.paths, dispatch=looks.dispatch, cache=looks.cache).versions["v0010"].jobs["train"]
    assert status.silent == pytest.approx(5400.0)
    monkeypatch.undo()
    looks.restore()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tick_hardly_grows_with_closed_versions(tmp_path: Path) -> None:
    """In CPU time of this process, the least of several."""
    with quick_yaml():
        paths = make_versions(tmp_path / "campaign", 200)
        cache, books, times = StateCache(sweep=20, settle_seconds=0.2), Books(), []
        dispatch = dispatch_of(paths, add_live_jobs(paths, 0))
        for count in (200, 2000):
            extend(paths, count)
            read_state(paths, dispatch=dispatch, cache=cache)
            time.sleep(0.3)
            read_state(paths, dispatch=dispatch, cache=cache)
            least = float("inf")
            for _ in range(12):
                began = time.process_time()
                state = read_state(paths, dispatch=dispatch, cache=cache)
                books.keep(state, Owner())  # type: ignore[arg-type]
                make_plan(state, 3)
                least = min(least, time.process_time() - began)
            assert len(state.versions) == count and not cache.changed
            times.append(least)
    assert times[1] < 3 * times[0] + 0.005
