"""The ledger of reads of a sealed task set: numbered, write-once, shared by all campaigns that use the same tasks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from evo_hpc.errors import UserError
from evo_hpc.lineage.reads import Read, ReadResult, Signed
from evo_hpc.paths import CampaignPaths, Workspace
from evo_hpc.store.atomic import AlreadyWritten, StoreError, dump_json, read_json, write_once
from evo_hpc.store.manifest import read_complete

_MODE = 0o600
_RESTORE = ("This ledger keeps the final claims honest: restore the file from a backup. Where there is none, these sealed tasks are spent: "
            "take others (another domain.config in a new campaign)")
_RECOMPUTE = "Restore it, or remove it: `evo-hpc finalize` computes it again from the scores of the same read"

M = TypeVar("M", bound=Signed)


class BadSealedLedger(UserError):
    """The ledger was damaged or edited: how often these tasks were read is no longer known."""


@dataclass(frozen=True)
class Entry:
    """One read and, once it is finished, its result."""

    read: Read
    result: ReadResult | None


def place_of(paths: CampaignPaths) -> str:
    """The campaign's folder relative to its workspace."""
    return paths.root.absolute().relative_to(paths.workspace.root.absolute()).as_posix()


def read_ledger(workspace: Workspace, task_set: str) -> list[Entry]:
    """All reads of a task set, oldest first. Raises BadSealedLedger, naming each file, on damage, a gap or an edit."""
    entries, problems = _examine(workspace, task_set)
    if problems:
        raise BadSealedLedger("\n".join(problems))
    return entries


def ledger_problems(workspace: Workspace, task_set: str) -> list[str]:
    """Everything that is wrong with the ledger, one message a file."""
    return _examine(workspace, task_set)[1]


def declare_read(workspace: Workspace, draft: Read) -> Read:
    """Write a read down under the next number. Raises BadSealedLedger. Several campaigns may declare at once: each gets its own number."""
    while True:
        entries = read_ledger(workspace, draft.task_set)
        read = draft.model_copy(update={
            "number": len(entries) + 1, "declared_at": time.time(), "previous": entries[-1].read.digest if entries else "",
        }).signed()
        try:
            write_once(workspace.sealed_read(read.task_set, read.number), dump_json(read.model_dump(mode="json")), mode=_MODE)
        except AlreadyWritten:
            continue  # another campaign took this number
        return read


def write_result(workspace: Workspace, read: Read, result: ReadResult) -> ReadResult:
    """Commit the result of a read. Raises AlreadyWritten when another is there."""
    signed = result.signed()
    write_once(workspace.sealed_result(read.task_set, read.number), dump_json(signed.model_dump(mode="json")), mode=_MODE)
    return signed


def sealed_problems(paths: CampaignPaths, task_set: str) -> list[str]:
    """What is wrong with the ledger, the sealed tasks' file (its mode, not its content) and this campaign's own sealed scores."""
    workspace, place = paths.workspace, place_of(paths)
    problems = ledger_problems(workspace, task_set)
    tasks = workspace.sealed_tasks(task_set)
    if tasks.is_file() and tasks.stat().st_mode & 0o077:  # a campaign copied without its workspace has none, and needs none before its claim
        problems.append(f"{tasks}: sealed tasks, readable by others than the owner: chmod 600 it")
    if problems:
        return problems
    reads = {entry.read.number: entry.read for entry in read_ledger(workspace, task_set)}
    for number, folder in paths.final.reads():
        read = reads.get(number)
        if read is None or read.place != place:
            whose = "the ledger does not have" if read is None else f"belongs to {read.place}"
            remedy = (f"A copied campaign starts without {paths.final.root.name}/: remove it here" if _copied(paths) else
                      "Restore the ledger from a backup: without it these tasks are spent, and a claim needs others (another seed in domain.config, a new campaign)")
            problems.append(f"{folder}: scores under read {number}, which {whose} ({workspace.sealed_read(task_set, number)}). {remedy}")
            continue
        for version in (read.baseline.version, read.candidate.version):
            scores = paths.final.evaluation(number, version)
            try:
                if scores.exists():
                    read_complete(scores, hashes=True)
            except StoreError as error:
                problems.append(f"{error}. Remove {scores}: it is published again from the job that made it")
    return problems


def _copied(paths: CampaignPaths) -> bool:
    """Whether the scores in final/ were made by another campaign folder's jobs."""
    intents = [read_json(job.intent) for job in paths.final.jobs() if job.intent.exists()]
    return any(intent.get("root") != str(paths.root.resolve()) for intent in intents)


def _examine(workspace: Workspace, task_set: str) -> tuple[list[Entry], list[str]]:
    entries: list[Entry] = []
    problems: list[str] = []
    reads = workspace.sealed_reads(task_set)
    for expected, (number, path) in enumerate(reads, start=1):
        try:
            read = _load(Read, path, "a read", _RESTORE)
            if number != expected or read.number != number:
                raise BadSealedLedger(f"{path}: read number {read.number}, expected {expected}; one was removed or added by hand. {_RESTORE}")
            if read.task_set != task_set:
                raise BadSealedLedger(f"{path}: is a read of other tasks ({read.task_set}). {_RESTORE}")
            if len(entries) == expected - 1 and read.previous != (entries[-1].read.digest if entries else ""):
                raise BadSealedLedger(f"{path}: does not follow the read before it, which was replaced by hand. {_RESTORE}")
            entries.append(Entry(read, _result_of(workspace, read)))
        except BadSealedLedger as error:
            problems.append(str(error))
    declared = {number for number, _ in reads}
    problems += [f"{path}: result of a read that is not in the ledger. {_RESTORE}" for number, path in workspace.sealed_results(task_set)
                 if number not in declared]
    return entries, problems


def _result_of(workspace: Workspace, read: Read) -> ReadResult | None:
    path = workspace.sealed_result(read.task_set, read.number)
    if not path.exists():
        return None
    result = _load(ReadResult, path, "the result of a read", _RECOMPUTE)
    if (result.read, result.read_digest) != (read.number, read.digest):
        raise BadSealedLedger(f"{path}: is the result of another read than {workspace.sealed_read(read.task_set, read.number)}. {_RECOMPUTE}")
    return result


def _load(model: type[M], path: Path, what: str, remedy: str) -> M:
    try:
        found = model.model_validate(read_json(path))
    except ValidationError as error:
        problem = error.errors()[0]
        raise BadSealedLedger(f"{path}: not {what} ({'.'.join(map(str, problem['loc']))}: {problem['msg']}). {remedy}") from error
    except StoreError as error:
        raise BadSealedLedger(f"{error}. {remedy}") from error
    if not found.intact():
        raise BadSealedLedger(f"{path}: edited after it was written (its digest differs). {remedy}")
    return found
