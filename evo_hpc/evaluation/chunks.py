"""An evaluation in chunks of tasks: each is durable once it is finished, and a later incarnation samples only what is missing. Torch-free."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evo_hpc.evaluation.scores import summarise_table, write_rows
from evo_hpc.jobs.context import RoleContext
from evo_hpc.jobs.outputs import Chunk, ChunksSoFar
from evo_hpc.lineage.identity import digest
from evo_hpc.paths import COMPLETE, EVALUATION_PART, IncarnationPaths, JobPaths, OwnerPaths, part_name
from evo_hpc.store.atomic import StoreError, fsync_folder, read_json, write_json
from evo_hpc.store.manifest import complete, link_or_copy, read_complete, sha256
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_tables, write_table

CHUNK_ROLLOUTS = 1024
"""Rollouts in one chunk, about: what a job that is killed loses at most. A few times what an engine decodes together, since
it runs half empty while the longest responses of a chunk come to their end."""
PART = "part"
"""Key of a job's completion record under which it says which part of the evaluation it is; not published."""

Sample = Callable[[range, int], Sequence[Mapping[str, Any]]]
"""From the positions of a chunk's tasks and the rollouts finished before it to its rows, in the order of tasks and samples."""


@dataclass(frozen=True)
class Work:
    """What one job scores of one suite for one version."""

    version: str
    suite: str
    identity: str
    """Of everything that determines its rows but the tasks' order; what is of another is never taken over."""
    tasks: tuple[str, ...]
    """Names under which the job's tasks are stored, in order: all of the suite, or its shard's."""
    k: int
    """Rollouts a task."""
    suite_tasks: int
    """Tasks of the whole suite."""
    shard: int = 0
    shards: int = 1
    chunk_rollouts: int = CHUNK_ROLLOUTS

    @property
    def part(self) -> dict[str, Any]:
        """Which part of the evaluation it is, as its completion record says."""
        return {"identity": self.identity, "shard": self.shard, "shards": self.shards, "suite_tasks": self.suite_tasks}

    def chunks(self) -> list[range]:
        """Positions of each chunk's tasks. A function of the work alone: where a run was cut off does not move them, so an engine
        whose numbers depend on what it decodes together gives a chunk that is redone the same rows."""
        size = max(1, self.chunk_rollouts // self.k)
        return [range(first, min(first + size, len(self.tasks))) for first in range(0, len(self.tasks), size)]

    def names(self, chunk: range) -> str:
        """Hash of the names of a chunk's tasks."""
        return digest(list(self.tasks[chunk.start : chunk.stop]))


def evaluation_identity(
    *, campaign: str, version: str, suite: str, policy: str, policy_step: int, epoch: str, system_prompt: str | None, max_turns: int = 1,
    read: str | None
) -> str:
    """Identity of an evaluation. policy: the policy's identity; read: digest of the declared read, where the tasks are sealed."""
    return digest([campaign, version, suite, policy, policy_step, epoch, system_prompt, read, *([max_turns] if max_turns > 1 else [])])


def score_in_chunks(context: RoleContext, work: Work, meta: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    """Finish an evaluation in this incarnation; returns what its completion record says (`meta` and the scores).

    What earlier incarnations of this attempt, and of attempts that came to nothing, have finished is taken over; `sample`
    is asked for the rest, a chunk at a time. Raises Stopped: what is finished by then stays.
    """
    store = _Store(context, work)
    if (whole := store.take_over_whole()) is not None:
        return whole
    kept = store.take_over()
    finished = sum(chunk.rollouts for chunk in kept.values())
    if kept:
        print(f"{work.version} on {work.suite}: {finished} rollouts in {len(kept)} of {len(work.chunks())} chunks are taken over", flush=True)
    for chunk in work.chunks():
        if chunk not in kept:
            context.raise_if_stopped()
            rows = sample(chunk, finished)
            store.add(chunk, rows)
            finished += len(rows)
    return store.finish(meta)


class _Store:
    """The chunks of one evaluation, in this incarnation and in those before it."""

    def __init__(self, context: RoleContext, work: Work) -> None:
        self.context, self.work, self.own = context, work, context.incarnation
        self.earlier = _earlier(context, work)
        self.folder = self.own.evaluation(work.version, work.suite)

    def take_over_whole(self) -> dict[str, Any] | None:
        """Link the evaluation here where an earlier incarnation has completed it."""
        for incarnation in self.earlier:
            source = incarnation.evaluation(self.work.version, self.work.suite)
            try:
                if not (source / COMPLETE).exists() or not self._is_ours(read_complete(source)["meta"]):
                    continue
                meta = read_complete(source, hashes=True)["meta"]
            except StoreError as error:
                print(f"{source} is not usable and is passed over: {error}", flush=True)
                continue
            self.context.check_claim()
            shutil.rmtree(self.folder, ignore_errors=True)
            for name in (EVALUATION_PART, COMPLETE):
                link_or_copy(source / name, self.folder / name)
            fsync_folder(self.folder)
            return meta
        return None

    def _is_ours(self, meta: Mapping[str, Any]) -> bool:
        return meta.get(PART) == self.work.part and meta.get("task_ids") == list(self.work.tasks)

    def take_over(self) -> dict[range, Chunk]:
        """Link the whole chunks of earlier incarnations here, and list them as this incarnation's."""
        kept: dict[range, Chunk] = {}
        for incarnation in self.earlier:
            for chunk, at in self._chunks_in(incarnation):
                if at in kept:
                    continue
                source = _file(incarnation, chunk)
                if damage := _damage(source, chunk):
                    print(f"chunk {source} is not usable and is passed over: {damage}", flush=True)
                    continue
                link_or_copy(source, _file(self.own, chunk))
                kept[at] = chunk
        if kept:
            self._list([*_listed(self.own), *kept.values()])
        return kept

    def add(self, at: range, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make a finished chunk durable: the file first, then its entry in the list."""
        work = self.work
        self.context.check_claim()
        path = _path(self.own, work.version, work.suite, at.start, at.stop - 1)
        write_table(path, rows, ROLLOUT)
        chunk = Chunk(
            version=work.version, suite=work.suite, identity=work.identity, first=at.start, last=at.stop - 1, tasks=work.names(at),
            rollouts=len(rows), bytes=path.stat().st_size, sha256=sha256(path),
        )
        self._list([*_listed(self.own), chunk])

    def finish(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Put the chunks together in the order of tasks and complete the evaluation; then they are not needed any more."""
        work = self.work
        table = read_tables([_path(self.own, work.version, work.suite, at.start, at.stop - 1) for at in work.chunks()], ROLLOUT)
        self.context.check_claim()
        shutil.rmtree(self.folder, ignore_errors=True)
        write_rows(self.folder / EVALUATION_PART, table)
        said = complete(self.folder, {**meta, **summarise_table(table, work.tasks, work.k), PART: work.part})["meta"]
        self._discard()
        return said

    def _discard(self) -> None:
        """Remove this evaluation's chunks; earlier incarnations hold other names of the same files."""
        for incarnation in self.earlier:
            for chunk, _ in self._chunks_in(incarnation):
                _file(incarnation, chunk).unlink(missing_ok=True)
        work = self.work
        if left := _listed(self.own):
            self._list([chunk for chunk in left if (chunk.version, chunk.suite) != (work.version, work.suite)])
        shutil.rmtree(_path(self.own, work.version, work.suite, 0, 0).parent, ignore_errors=True)

    def _chunks_in(self, incarnation: IncarnationPaths) -> Iterable[tuple[Chunk, range]]:
        """The chunks of exactly this work that an incarnation lists, each with its place in it."""
        places = {(at.start, at.stop - 1, self.work.names(at)): at for at in self.work.chunks()}
        for chunk in _listed(incarnation):
            at = places.get((chunk.first, chunk.last, chunk.tasks))
            if at is not None and chunk.identity == self.work.identity:
                yield chunk, at

    def _list(self, chunks: Sequence[Chunk]) -> None:
        write_json(self.own.parts, ChunksSoFar(chunks=list(chunks)).model_dump())


def _earlier(context: RoleContext, work: Work) -> list[IncarnationPaths]:
    """Incarnations that may hold chunks of this work, newest first.

    None of an attempt whose evaluation was recorded as done, nor any before it: whoever removes what it published wants
    the evaluation made again.
    """
    own, found = context.incarnation, list[IncarnationPaths]()
    for job in reversed([job for job in OwnerPaths(context.job.owner).jobs() if job.kind == context.job.kind]):
        if job.root == context.job.root:
            found += reversed([incarnation for incarnation in job.incarnations() if incarnation.number < own.number])
        elif _was_done(job, work):
            break
        else:
            found += reversed(job.incarnations())
    return found


def _was_done(job: JobPaths, work: Work) -> bool:
    """Whether an attempt is recorded as done that had this very part of the evaluation."""
    if not job.record.exists():
        return False
    record = read_json(job.record)
    if record["state"] != "done":
        return False
    folder = job.incarnation(record["incarnation"]).evaluation(work.version, work.suite)
    if not folder.exists():
        return False
    try:
        meta = read_complete(folder)["meta"]
    except StoreError:  # nobody can tell, so it is made again
        return True
    return meta["task_ids"] == list(work.tasks) and meta.get(PART, work.part)["shard"] == work.shard


def _path(incarnation: IncarnationPaths, version: str, suite: str, first: int, last: int) -> Path:
    return incarnation.rollouts / version / suite / part_name(first, last)


def _file(incarnation: IncarnationPaths, chunk: Chunk) -> Path:
    return _path(incarnation, chunk.version, chunk.suite, chunk.first, chunk.last)


def _listed(incarnation: IncarnationPaths) -> list[Chunk]:
    """The chunks that an incarnation says it has; none where the list is damaged."""
    if not incarnation.parts.exists():
        return []
    try:
        return ChunksSoFar.model_validate(read_json(incarnation.parts)).chunks
    except (StoreError, ValidationError) as error:
        words = f"{error.error_count()} problems" if isinstance(error, ValidationError) else str(error)
        print(f"{incarnation.parts} is not usable and is passed over: {words}", flush=True)
        return []


def _damage(file: Path, chunk: Chunk) -> str | None:
    """What is wrong with a chunk's file, in words."""
    if not file.is_file():
        return "missing"
    if file.stat().st_size != chunk.bytes:
        return f"{file.stat().st_size} bytes, listed with {chunk.bytes}"
    return None if sha256(file) == chunk.sha256 else "its content differs from the hash in the list"
