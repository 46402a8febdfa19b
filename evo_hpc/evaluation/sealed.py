"""Sealed tasks in an evaluation job: read only under a read that the ledger holds, scored without keeping a word of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

from evo_hpc.config.base import Config
from evo_hpc.domains.base import Task, TaskError, read_tasks, task_set_hash, task_to_json
from evo_hpc.errors import UserError
from evo_hpc.jobs.context import RoleContext
from evo_hpc.lineage.identity import policy_identity
from evo_hpc.lineage.reads import Candidate
from evo_hpc.lineage.sealed import read_ledger

SEALED = "sealed"

_WORDLESS: dict[str, Any] = {
    "text": "", "messages": None, "verifier_detail": None, "prompt_ids": [], "response_ids": [], "loss_mask": [], "logprobs": [],
    "tool_calls": [], "domain_features": [], "task_attributes": [], "seed": 0,  # a seed is a function of the task's id
}


class SealedRefused(UserError):
    """Sealed tasks may not be read for this, or are not what they were."""


class SealedRead(Config):
    """The read that allows a job to see sealed tasks."""

    task_set: str
    """Hash of the tasks."""
    number: int
    """Of the read in the ledger."""
    digest: str
    """Of the read's record."""


def read_sealed_tasks(context: RoleContext, allowed: SealedRead | None, policies: Mapping[str, str]) -> list[Task]:
    """The sealed tasks, for a job that scores the candidates of a declared read and nobody else.

    policies: folder of each version's policy, relative to the campaign. Raises SealedRefused; no message holds a task.
    """
    if allowed is None:
        raise SealedRefused("sealed tasks are read for the final claim alone: `evo-hpc finalize`")
    workspace = context.campaign_paths.workspace
    entries = [e for e in read_ledger(workspace, allowed.task_set) if e.read.number == allowed.number]
    if not entries or entries[0].read.digest != allowed.digest:
        raise SealedRefused(f"{workspace.sealed_read(allowed.task_set, allowed.number)}: does not declare the read that this job is for; run "
                            "`evo-hpc finalize` again")
    read = entries[0].read
    scored = [Candidate(version=v, policy=policy_identity(context.resolve(folder))) for v, folder in policies.items()]
    if not all(candidate in (read.baseline, read.candidate) for candidate in scored):
        raise SealedRefused(f"{workspace.sealed_read(allowed.task_set, allowed.number)}: was declared for {read.baseline.version} and "
                            f"{read.candidate.version} with the policies that they had then; restore them")
    path = workspace.sealed_tasks(allowed.task_set)
    try:
        tasks = read_tasks(path)
    except (TaskError, OSError):  # a message of theirs could show a piece of a task, and so could a traceback
        tasks = []
    if task_set_hash(tasks) != allowed.task_set:
        raise SealedRefused(f"{path}: missing, damaged or edited. Remove {context.campaign_paths.tasks_folder} and run `evo-hpc run` to have "
                            "all tasks made again, then finalize")
    return tasks


def hidden_ids(tasks: Sequence[Task]) -> dict[str, str]:
    """The names under which sealed tasks are shown, by task id: they pair scores and tell nothing.

    The tasks themselves are the key of the hash. An id can be the problem (`add-2-3`): a plain hash of it could be
    found by trying all of them.
    """
    key = hashlib.sha256("\n".join(["hidden ids", *sorted(map(task_to_json, tasks))]).encode()).digest()
    return {task.task_id: hmac.new(key, task.task_id.encode(), hashlib.sha256).hexdigest()[:16] for task in tasks}


def without_words(row: Mapping[str, Any], hidden: Mapping[str, str]) -> dict[str, Any]:
    """A rollout row with its scores, lengths and times, without text, tokens, attributes, seed or the task's id; `hidden` is of hidden_ids."""
    name = hidden[row["task_id"]]
    return {**row, **_WORDLESS, "task_id": name, "group_id": name}
