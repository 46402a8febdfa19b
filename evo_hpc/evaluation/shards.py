"""Shards of an evaluation put together: the published evaluation is the same, however many jobs have scored it. Torch-free."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from evo_hpc.evaluation.chunks import PART
from evo_hpc.evaluation.epoch import differing
from evo_hpc.evaluation.scores import BadEvaluation, summarise_table, write_rows
from evo_hpc.paths import EVALUATION_PART, VersionPaths
from evo_hpc.store.atomic import temp_path
from evo_hpc.store.manifest import content, publish_folder, read_complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_tables

_SAME = ("version", "suite", "policy", "policy_step", "policy_identity", "k")
_MACHINE = ("device", "hardware")


class BadShards(BadEvaluation):
    """Folders that are not the shards of one evaluation."""


@dataclass(frozen=True)
class Merged:
    """A whole evaluation, as publish_folder takes it."""

    files: dict[str, Path]
    meta: dict[str, Any]


@dataclass(frozen=True)
class _Shard:
    folder: Path
    files: tuple[Path, ...]
    meta: dict[str, Any]

    @property
    def part(self) -> dict[str, Any]:
        """Which part it is; an evaluation from before there were shards is all of it."""
        return self.meta.get(PART) or {"shard": 0, "shards": 1, "suite_tasks": len(self.meta["task_ids"]), "identity": None}


def publish_evaluation(version: VersionPaths, suite: str, folders: Sequence[Path], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Publish a version's evaluation on a suite from the folders of all its shards, in any order; `meta` is added to its record.

    Done twice it changes nothing. Raises what merge_shards and publish_folder raise.
    """
    return publish_scores(version.evaluation(suite), folders, meta)


def publish_scores(final: Path, folders: Sequence[Path], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The same, under any name."""
    scratch = temp_path(final)  # swept, where a kill leaves it behind
    try:
        merged = merge_shards(folders, scratch)
        return publish_folder(final, merged.files, {**merged.meta, **meta})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def merge_shards(folders: Sequence[Path], scratch: Path) -> Merged:
    """The whole evaluation from the folders of its shards, in any order; rows and task ids in the order of the suite's tasks.

    Of one shard the files are its own; of several their rows are written anew, below `scratch`. Task i of the suite is task
    i // shards of shard i % shards. Missing rollouts stay missing. Raises Torn on a damaged folder, BadShards unless the
    folders are all shards of one evaluation, by one policy, under one evaluator epoch.
    """
    shards = sorted(map(_read, folders), key=lambda shard: shard.part["shard"])
    _check_same(shards)
    tasks = _all_tasks(shards)
    common = {name: value for name, value in shards[0].meta.items() if name != PART}
    if len(shards) == 1:
        return Merged({file.relative_to(shards[0].folder).as_posix(): file for file in content(shards[0].folder)}, common)
    table = _in_order(shards, tasks)
    target = scratch / EVALUATION_PART
    write_rows(target, table)
    machines = {name: "+".join(sorted({shard.meta[name] for shard in shards})) for name in _MACHINE}
    return Merged({EVALUATION_PART: target}, {**common, **summarise_table(table, tasks, common["k"]), **machines})


def _read(folder: Path) -> _Shard:
    record = read_complete(folder, hashes=True)
    return _Shard(folder, tuple(folder / f["name"] for f in record["files"] if f["name"].endswith(".parquet")), record["meta"])


def _check_same(shards: Sequence[_Shard]) -> None:
    if not shards:
        raise BadShards("an evaluation without a shard")
    first = shards[0]
    for other in shards[1:]:
        if other.meta["epoch"] != first.meta["epoch"]:
            what = "; ".join(differing(first.meta["epoch_components"], other.meta["epoch_components"]))
            raise BadShards(f"{first.folder} and {other.folder}: scored under different evaluator epochs ({what}). {_AGAIN}")
        if changed := [name for name in _SAME if other.meta[name] != first.meta[name]]:
            what = "; ".join(f"{name}: {first.meta[name]} and {other.meta[name]}" for name in changed)
            raise BadShards(f"{first.folder} and {other.folder}: not shards of one evaluation ({what}). {_AGAIN}")
        if any(other.part[name] != first.part[name] for name in ("identity", "shards", "suite_tasks")):
            raise BadShards(f"{first.folder} and {other.folder}: shards of different pieces of work. {_AGAIN}")
    numbers = [shard.part["shard"] for shard in shards]
    if numbers != list(range(first.part["shards"])):
        raise BadShards(f"{first.folder}: shards {', '.join(map(str, numbers))} of an evaluation in {first.part['shards']} shards, "
                        f"numbered from 0. {_AGAIN}")


_AGAIN = "Remove the job folders of this evaluation, and run again: it is scored anew"


def _all_tasks(shards: Sequence[_Shard]) -> list[str]:
    """Names of the suite's tasks, in order. Raises BadShards where one is missing, or in two shards."""
    where, total, n = shards[0].folder, shards[0].part["suite_tasks"], len(shards)
    expected = [len(range(number, total, n)) for number in range(n)]
    if (found := [len(shard.meta["task_ids"]) for shard in shards]) != expected:
        raise BadShards(f"{where}: the shards have {found} tasks where {expected} of {total} belong. {_AGAIN}")
    tasks = [shards[i % n].meta["task_ids"][i // n] for i in range(total)]
    if len(set(tasks)) != total:
        raise BadShards(f"{where}: {total - len(set(tasks))} tasks are in several shards. {_AGAIN}")
    return tasks


def _in_order(shards: Sequence[_Shard], tasks: Sequence[str]) -> pa.Table:
    """The rows of all shards, in the order of the suite's tasks."""
    slices: dict[str, pa.Table] = {}
    for shard in shards:
        own, table = set(shard.meta["task_ids"]), read_tables(shard.files, ROLLOUT)
        names = table.column("task_id").to_pylist()
        starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        for start, end in pairwise([*starts, len(names)]):
            if names[start] not in own or names[start] in slices:
                raise BadShards(f"{shard.folder}: has rows of tasks that are not its own, or not in their order. {_AGAIN}")
            slices[names[start]] = table.slice(start, end - start)
    return pa.concat_tables([ROLLOUT.empty_table(), *(slices[task] for task in tasks if task in slices)])
