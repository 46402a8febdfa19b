"""However many jobs score an evaluation, what is published is the same; what is no whole evaluation is not published."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import evo_hpc.evaluation.job as evaluation_job
from evo_hpc.controller.commit import publish_evaluations
from evo_hpc.evaluation.chunks import PART
from evo_hpc.evaluation.scores import read_evaluation, scores_by_task
from evo_hpc.evaluation.shards import BadShards, merge_shards, publish_evaluation
from evo_hpc.paths import COMPLETE, EVALUATION_PART, TEMP_PREFIX, CampaignPaths, JobPaths
from evo_hpc.store.manifest import Torn, complete, read_complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_table, write_table
from tests.evaluation.evaluating import TASKS, K, SeededEngine, make_folder, set_up, start


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[SeededEngine]:
    return set_up(monkeypatch)


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    return make_folder(tmp_path)


def run_shards(paths: CampaignPaths, shards: int, **changes: Any) -> dict[JobPaths, dict[str, Any]]:
    """One job a shard, each to its end; what they made."""
    jobs = [paths.version("v0001").job("evaluate", number) for number in range(shards)]
    return {job: evaluation_job.run(start(paths, job, shard=n, shards=shards, **changes)) for n, job in enumerate(jobs)}


def folders_of(paths: CampaignPaths, made: dict[JobPaths, dict[str, Any]], suite: str) -> list[Path]:
    return [paths.root / entry["folder"] for outputs in made.values() for entry in outputs["evaluations"] if entry["suite"] == suite]


def published(paths: CampaignPaths, suite: str) -> tuple[dict[str, Any], bytes]:
    folder = paths.version("v0001").evaluation(suite)
    return read_complete(folder, hashes=True)["meta"], (folder / EVALUATION_PART).read_bytes()


def test_the_published_evaluation_is_the_same_for_any_number_of_shards(engines: list[SeededEngine], tmp_path: Path) -> None:
    """To the byte, with more shards than a suite has tasks, in whatever order their folders come."""
    made = {}
    for shards in (1, 2, 3, 5, 9):
        paths = make_folder(tmp_path / str(shards))
        outputs = run_shards(paths, shards)
        for suite in TASKS:
            publish_evaluation(paths.version("v0001"), suite, folders_of(paths, outputs, suite)[::-1], {"job": "evaluate"})
        assert not list(paths.root.rglob(f"{TEMP_PREFIX}*"))
        made[shards] = {suite: published(paths, suite) for suite in TASKS}
        record = read_evaluation(paths.version("v0001"), "dev")
        assert record is not None and len(scores_by_task(paths.version("v0001"), "dev")) == TASKS["dev"]
        sampled = [len(engine.sampled) for engine in engines[-shards:]]
        assert sum(sampled) == K * sum(TASKS.values()) and max(sampled) - min(sampled) <= 2 * K
    assert all(each == made[1] for each in made.values())
    meta, _ = made[1]["dev"]
    assert meta["task_ids"] == [f"dev-{n}" for n in range(TASKS["dev"])] and meta["rollouts"] == K * TASKS["dev"] and PART not in meta
    rows = read_table(paths.version("v0001").evaluation("dev") / EVALUATION_PART, ROLLOUT, ["task_id", "sample"]).to_pylist()
    assert [(row["task_id"], row["sample"]) for row in rows] == [(name, s) for name in meta["task_ids"] for s in range(K)]


def test_a_shard_has_its_own_tasks_under_the_suites_epoch(engines: list[SeededEngine], paths: CampaignPaths) -> None:
    made = run_shards(paths, 2)
    first, second = (read_complete(folder)["meta"] for folder in folders_of(paths, made, "dev"))
    assert first["task_ids"] == ["dev-0", "dev-2", "dev-4", "dev-6"] and second["task_ids"] == ["dev-1", "dev-3", "dev-5"]
    alone = evaluation_job.run(start(make_folder(paths.workspace.root / "alone")))
    whole = read_complete(paths.workspace.root / "alone" / "campaigns" / "c" / alone["evaluations"][0]["folder"])["meta"]
    assert first["epoch"] == second["epoch"] == whole["epoch"]


def test_the_controller_publishes_each_suite_once(engines: list[SeededEngine], paths: CampaignPaths) -> None:
    """From the outputs of all shards; doing it twice changes nothing."""
    state: Any = SimpleNamespace(paths=paths, versions={"v0001": SimpleNamespace(node=SimpleNamespace(paths=paths.version("v0001")))})
    made = run_shards(paths, 3)
    publish_evaluations(state, made, "the job")
    before = {suite: published(paths, suite) for suite in TASKS}
    assert all(meta["job"] == "the job" and meta["missing"] == 0 for meta, _ in before.values())
    publish_evaluations(state, made, "the job")
    assert {suite: published(paths, suite) for suite in TASKS} == before
    assert sorted(p.name for p in paths.version("v0001").evaluation("dev").parent.iterdir()) == sorted(TASKS)


def rewrite(folder: Path, change: Callable[[list[dict[str, Any]]], Sequence[dict[str, Any]]], **meta: Any) -> None:
    """Complete a shard's folder again with other rows or another record."""
    said = read_complete(folder)["meta"]
    rows = read_table(folder / EVALUATION_PART, ROLLOUT).to_pylist()
    shutil.rmtree(folder)
    write_table(folder / EVALUATION_PART, change(rows), ROLLOUT)
    complete(folder, {**said, **meta})


def test_missing_rollouts_and_errors_of_the_verifier_count_as_failures(engines: list[SeededEngine], paths: CampaignPaths) -> None:
    folders = folders_of(paths, run_shards(paths, 2), "dev")
    whole = merge_shards(folders, paths.root / "scratch").meta
    rewrite(folders[1], lambda rows: [row for row in rows if row["task_id"] != "dev-3"])
    rewrite(folders[0], lambda rows: [{**rows[0], "error_class": "verifier", "reward": None, "components": []}, *rows[1:]])
    meta = merge_shards(folders, paths.root / "scratch").meta
    assert (meta["n_tasks"], meta["expected"], meta["rollouts"], meta["missing"]) == (7, 14, 12, 3)
    assert meta["avg_at_k"] <= whole["avg_at_k"] and meta["scores_digest"] != whole["scores_digest"]


def same(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows


def part(folders: list[Path], **changes: Any) -> dict[str, Any]:
    return {PART: {**read_complete(folders[1])["meta"][PART], **changes}}


@pytest.mark.parametrize("change, message", [
    (lambda f: f.pop(), r"shards 0, 1 of an evaluation in 3 shards"),
    (lambda f: f.pop(0), r"shards 1, 2 of an evaluation in 3 shards"),
    (lambda f: f.append(f[1]), r"shards 0, 1, 1, 2 of an evaluation in 3 shards"),
    (lambda f: f.clear(), r"without a shard"),
    (lambda f: rewrite(f[1], same, epoch="another", epoch_components={"dtype": "bfloat16"}),
     r"different evaluator epochs \(.*dtype: None -> bfloat16"),
    (lambda f: rewrite(f[1], same, policy_identity="another"), r"not shards of one evaluation \(policy_identity: \w+ and another\)"),
    (lambda f: rewrite(f[1], same, suite="probe"), r"not shards of one evaluation \(suite: dev and probe\)"),
    (lambda f: rewrite(f[1], same, **part(f, identity="another prompt")), r"different pieces of work"),
    (lambda f: rewrite(f[1], same, **part(f, shards=4)), r"different pieces of work"),
    (lambda f: rewrite(f[1], same, task_ids=["dev-1"]), r"\[3, 1, 2\] tasks where \[3, 2, 2\] of 7 belong"),
    (lambda f: rewrite(f[1], same, task_ids=["dev-1", "dev-0"]), r"1 tasks are in several shards"),
    (lambda f: rewrite(f[1], lambda rows: [{**row, "task_id": "dev-0"} for row in rows]), r"rows of tasks that are not its own"),
    (lambda f: rewrite(f[1], lambda rows: rows[::2] + rows[1::2]), r"not in their order"),
], ids=["last missing", "first missing", "one twice", "none", "epoch", "policy", "suite", "prompt", "number", "too few", "one task twice",
        "foreign rows", "mixed rows"])
def test_what_is_not_one_whole_evaluation_is_refused(
    engines: list[SeededEngine], paths: CampaignPaths, change: Callable[[list[Path]], object], message: str
) -> None:
    folders = folders_of(paths, run_shards(paths, 3), "dev")
    change(folders)
    with pytest.raises(BadShards) as error:
        publish_evaluation(paths.version("v0001"), "dev", folders, {})
    assert re.search(message, str(error.value)) and not paths.version("v0001").evaluation("dev").exists()
    assert not list(paths.root.rglob(f"{TEMP_PREFIX}*"))


def test_one_shard_of_several_is_no_evaluation(engines: list[SeededEngine], paths: CampaignPaths) -> None:
    folders = folders_of(paths, run_shards(paths, 2), "dev")
    with pytest.raises(BadShards, match="shards 0 of an evaluation in 2 shards"):
        publish_evaluation(paths.version("v0001"), "dev", folders[:1], {})


def test_a_damaged_shard_is_refused(engines: list[SeededEngine], paths: CampaignPaths) -> None:
    folders = folders_of(paths, run_shards(paths, 2), "dev")
    (folders[1] / EVALUATION_PART).write_bytes(b"x")
    with pytest.raises(Torn, match=EVALUATION_PART):
        publish_evaluation(paths.version("v0001"), "dev", folders, {})


def test_an_evaluation_from_before_there_were_shards_is_whole(engines: list[SeededEngine], paths: CampaignPaths) -> None:
    (folder,) = folders_of(paths, run_shards(paths, 1), "dev")
    said = read_complete(folder)["meta"]
    (folder / COMPLETE).unlink()
    complete(folder, {name: value for name, value in said.items() if name != PART})
    publish_evaluation(paths.version("v0001"), "dev", [folder], {})
    assert published(paths, "dev")[0]["avg_at_k"] == said["avg_at_k"]


def test_a_shard_is_one_of_its_number() -> None:
    one = {"version": "v0001", "policy": "p", "policy_step": 0, "suite": "dev"}
    for shard, shards in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError):
            evaluation_job.EvaluateParams.model_validate({"evaluations": [one], "shard": shard, "shards": shards})
