"""An evaluation that is cut off anywhere ends with the same rows, and samples again only what was not finished."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evo_hpc.evaluation.job as evaluation_job
import evo_hpc.store.atomic as atomic
import evo_hpc.store.manifest as manifest
import evo_hpc.store.tables as tables
from evo_hpc.evaluation.chunks import CHUNK_ROLLOUTS, Work
from evo_hpc.jobs.claims import Superseded
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.spec import Record
from evo_hpc.paths import EVALUATION_PART, CampaignPaths, IncarnationPaths, JobPaths
from evo_hpc.store.atomic import read_json, write_json
from evo_hpc.store.manifest import read_complete
from tests.evaluation.evaluating import CHUNK, TASKS, TOTAL, K, SeededEngine, make_folder, set_up, start


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[SeededEngine]:
    return set_up(monkeypatch)


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    return make_folder(tmp_path)


def finish(context: RoleContext) -> dict[str, Any]:
    """Run to the end: what is in the folders that the job names, without what says nothing of the rows."""
    made = {}
    for entry in evaluation_job.run(context)["evaluations"]:
        folder = context.resolve(entry["folder"])
        made[entry["suite"]] = (read_complete(folder, hashes=True)["meta"], (folder / EVALUATION_PART).read_bytes())
    return made


@pytest.fixture
def undisturbed(engines: list[SeededEngine], tmp_path: Path) -> dict[str, Any]:
    """What a run that nobody disturbs ends with, all rows in one chunk."""
    with pytest.MonkeyPatch.context() as patch:
        set_up(patch, chunk=1000)
        made = finish(start(make_folder(tmp_path / "undisturbed")))
    assert 0 < made["dev"][0]["avg_at_k"] < 1 and made["dev"][0]["rollouts"] == K * TASKS["dev"]
    return made


class Cut(BaseException):
    """A process dies here."""


@contextmanager
def cut_at(point: int, when: str) -> Iterator[list[int]]:
    """Dies before or after its point-th rollout or change of a name on disk; the number of points met."""
    count = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            mine = count[0] == point
            if mine and when == "before":
                raise Cut
            result = call(*args, **kwargs)
            if mine:
                raise Cut
            return result
        return wrapped

    class CountedOs:
        link, replace, rename = (staticmethod(counted(call)) for call in (os.link, os.replace, os.rename))

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (atomic, manifest, tables):
            patch.setattr(module, "os", CountedOs())
        patch.setattr(evaluation_job._Evaluator, "_finished_one", counted(evaluation_job._Evaluator._finished_one))
        patch.setattr(RoleContext, "progress", lambda self, **values: None)  # how often it is written depends on the time
        yield count


def finished_chunks(incarnation: IncarnationPaths) -> int:
    """Rollouts that an incarnation has safely listed or completed."""
    listed = read_json(incarnation.parts)["chunks"] if incarnation.parts.exists() else []
    whole = {s for s in TASKS if (incarnation.evaluation("v0001", s) / "COMPLETE.json").exists()}
    return sum(c["rollouts"] for c in listed if c["suite"] not in whole) + sum(K * TASKS[s] for s in whole)


def test_cut_off_anywhere_it_ends_with_the_same_rows(engines: list[SeededEngine], undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """Before one point, after the next, and so on to the end."""
    whole = start(make_folder(tmp_path / "counting"))
    with cut_at(-1, "before") as points:
        assert finish(whole) == undisturbed, "chunks do not change the rows"
    assert points[0] > TOTAL + 15, "rollouts and writes"
    saved = set()
    for point in range(1, points[0] + 1):
        paths = make_folder(tmp_path / str(point))
        first = start(paths)
        with cut_at(point, "before" if point % 2 else "after"), pytest.raises(Cut):
            evaluation_job.run(first)
        kept = finished_chunks(first.incarnation)
        assert finish(start(paths)) == undisturbed, f"cut at point {point}"
        assert len(engines[-1].sampled) == TOTAL - kept, "only what is missing is sampled"
        saved.add(kept)
    assert saved == {0, 4, 8, 12, 14, 18, 20}, "chunks of two tasks, and a smaller one at the end of each suite"


def test_cut_off_again_and_again_it_comes_to_its_end(engines: list[SeededEngine], undisturbed: dict[str, Any], paths: CampaignPaths) -> None:
    """Each start gets one chunk further, wherever the one before took its chunks from."""
    for _ in range(20):
        try:
            with cut_at(14, "after"):
                made = finish(start(paths))
            break
        except Cut:
            continue
    else:
        raise AssertionError("never came to its end")
    assert made == undisturbed
    assert len(paths.version("v0001").job("evaluate", 0).claims()) > 2


def stop_after(context: RoleContext, rollouts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the role to stop in the middle of a chunk."""
    real, seen = evaluation_job._Evaluator._finished_one, [0]

    def finished(self: Any, *args: Any) -> None:
        seen[0] += 1
        context.stop_requested = context.stop_requested or seen[0] >= rollouts
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation_job._Evaluator, "_finished_one", finished)
        with pytest.raises(Stopped):
            evaluation_job.run(context)


def test_told_to_stop_it_drops_the_chunk_in_progress_alone(
    engines: list[SeededEngine], undisturbed: dict[str, Any], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(paths)
    stop_after(first, 2 * CHUNK + 1, monkeypatch)
    assert len(engines[-1].sampled) == 2 * CHUNK + 1 and finished_chunks(first.incarnation) == 2 * CHUNK
    assert finish(start(paths)) == undisturbed
    assert len(engines[-1].sampled) == TOTAL - 2 * CHUNK


def test_progress_counts_what_was_taken_over(
    engines: list[SeededEngine], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(start(paths), 2 * CHUNK + 1, monkeypatch)
    second, shown = start(paths), list[dict[str, Any]]()
    monkeypatch.setattr(RoleContext, "progress", lambda self, **values: shown.append(values))
    evaluation_job.run(second)
    assert shown[0]["steps"] == TOTAL
    steps = [values["step"] for values in shown[1:]]
    assert steps == sorted(steps) and steps[0] == 2 * CHUNK and steps[-1] == TOTAL and set(range(steps[0], TOTAL + 1)) == set(steps)


def record(job: JobPaths, state: str) -> None:
    """The controller's final word on an attempt."""
    last = job.incarnations()[-1].number
    write_json(job.record, Record(
        state=state, incarnation=last if state == "done" else None, generation=1, started_by=1, starts=1, seconds=0.0,  # type: ignore[arg-type]
    ).model_dump())


def test_another_attempt_goes_on_where_one_that_failed_came_to(
    engines: list[SeededEngine], undisturbed: dict[str, Any], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes over a whole suite and a chunk of the next, and does not keep what it took twice on disk."""
    stop_after(first := start(paths), 2 * 7 + CHUNK + 1, monkeypatch)
    record(first.job, "failed")
    second = start(paths, paths.version("v0001").job("evaluate", 1))
    assert finish(second) == undisturbed
    assert len(engines[-1].sampled) == 2
    left = [p for p in paths.version("v0001").root.rglob("*.parquet") if p.name != EVALUATION_PART]
    assert not left, "chunks of what is complete are removed"


def test_what_was_published_and_removed_is_made_again(engines: list[SeededEngine], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attempt is recorded as done, after one that failed: nothing of either is taken over."""
    versions = paths.version("v0001")
    stop_after(start(paths, versions.job("evaluate", 0)), 2 * CHUNK + 1, monkeypatch)
    record(versions.job("evaluate", 0), "failed")
    finish(start(paths, versions.job("evaluate", 1), suites=("dev",)))
    record(versions.job("evaluate", 1), "done")
    finish(start(paths, versions.job("evaluate", 2)))
    assert len(engines[-1].sampled) == TOTAL


@pytest.mark.parametrize("changes", [
    {"policy": "policy-1"}, {"temperature": 0.5}, {"seed": 3}, {"system_prompt": "think"}, {"max_response_tokens": 31}, {"samples_per_task": K + 1},
    {"shards": 2},
], ids=lambda changes: next(iter(changes)))
def test_nothing_is_taken_over_from_another_evaluation(
    engines: list[SeededEngine], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Another policy, evaluator epoch, prompt, or division of the work; of the first suite all is there, of the second a chunk."""
    stop_after(start(paths), 2 * 7 + CHUNK + 1, monkeypatch)
    made = finish(start(paths, **changes))
    assert len(engines[-1].sampled) == sum(meta["expected"] for meta, _ in made.values()) > 0


def test_tasks_in_another_order_are_not_mistaken(engines: list[SeededEngine], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set and so the epoch are the same, but the chunks are of other tasks."""
    stop_after(start(paths), 2 * CHUNK + 1, monkeypatch)
    lines = paths.tasks("dev").read_text().splitlines(keepends=True)
    paths.tasks("dev").write_text("".join(lines[::-1]))
    made = finish(start(paths))
    assert made["dev"][0]["task_ids"] == [json.loads(line)["task_id"] for line in lines[::-1]] and len(engines[-1].sampled) == TOTAL


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])


def first_chunk(incarnation: IncarnationPaths) -> Path:
    return sorted(incarnation.rollouts.rglob("*.parquet"))[0]


@pytest.mark.parametrize("damage, lost", [
    (lambda inc: first_chunk(inc).write_bytes(first_chunk(inc).read_bytes()[:-10]), 1),
    (lambda inc: flip(first_chunk(inc)), 1),
    (lambda inc: first_chunk(inc).unlink(), 1),
    (lambda inc: inc.parts.write_text('{"chunks": ['), 2),
    (lambda inc: inc.parts.write_text('{"chunks": [{"first": 0}]}'), 2),
    (lambda inc: inc.parts.unlink(), 2),
], ids=["cut short", "changed", "missing", "torn list", "strange list", "no list"])
def test_a_torn_chunk_is_passed_over_and_made_again(
    engines: list[SeededEngine], undisturbed: dict[str, Any], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], damage: Callable[[IncarnationPaths], None], lost: int,
) -> None:
    first = start(paths)
    stop_after(first, 2 * CHUNK + 1, monkeypatch)
    listed = first.incarnation.parts
    damage(first.incarnation)
    assert finish(start(paths)) == undisturbed
    assert len(engines[-1].sampled) == TOTAL - (2 - lost) * CHUNK
    assert ("passed over" in capfd.readouterr().out) == listed.exists(), "said aloud"


def test_a_damaged_whole_evaluation_is_passed_over(
    engines: list[SeededEngine], undisturbed: dict[str, Any], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(paths)
    stop_after(first, 2 * 7 + CHUNK + 1, monkeypatch)
    flip(first.incarnation.evaluation("v0001", "dev") / EVALUATION_PART)
    assert finish(start(paths)) == undisturbed
    assert len(engines[-1].sampled) == TOTAL - CHUNK


def test_an_incarnation_that_was_superseded_adds_nothing(engines: list[SeededEngine], paths: CampaignPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old step lives on beside its requeued copy: from the copy's claim on, no chunk of its is listed."""
    first, real = start(paths), evaluation_job._Evaluator._finished_one

    def finished(self: Any, spec: Any, count: int) -> None:
        if count == CHUNK + 1:
            start(paths)
        real(self, spec, count)

    monkeypatch.setattr(evaluation_job._Evaluator, "_finished_one", finished)
    with pytest.raises(Superseded):
        evaluation_job.run(first)
    assert finished_chunks(first.incarnation) == CHUNK


@given(tasks=st.integers(0, 200), k=st.integers(1, 40), rollouts=st.integers(1, 300))
def test_chunks_are_all_tasks_once_in_order(tasks: int, k: int, rollouts: int) -> None:
    work = Work("v0001", "dev", "i", tuple(map(str, range(tasks))), k, tasks, chunk_rollouts=rollouts)
    chunks = work.chunks()
    assert [i for chunk in chunks for i in chunk] == list(range(tasks)) and all(chunks)
    assert all(len(chunk) * k <= rollouts or len(chunk) == 1 for chunk in chunks)
    assert len({len(chunk) for chunk in chunks[:-1]}) <= 1 and Work("v0001", "dev", "i", ("a",), k, 1).chunk_rollouts == CHUNK_ROLLOUTS
