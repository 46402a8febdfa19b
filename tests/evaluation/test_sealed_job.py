"""Sealed tasks in the evaluation job: only under a declared read, for its candidates alone, and without a word in what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evo_hpc.evaluation.job as evaluation_job
from evo_hpc.domains.base import Task, get_domain, task_set_hash, tasks_to_jsonl
from evo_hpc.evaluation.scores import read_evaluation_folder, scores_in_folder
from evo_hpc.evaluation.sealed import SealedRefused, hidden_ids
from evo_hpc.evaluation.shards import merge_shards
from evo_hpc.jobs.claims import claim
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.spec import Identity, JobSpec
from evo_hpc.lineage.identity import policy_identity
from evo_hpc.lineage.reads import Candidate, Read
from evo_hpc.lineage.sealed import declare_read
from evo_hpc.paths import EVALUATION_PART, CampaignPaths, ExchangePaths
from evo_hpc.rollout.exchange import Probe, policy_meta
from evo_hpc.rollout.records import Completion, Request
from evo_hpc.store.manifest import complete
from evo_hpc.store.processes import ProcessIdentity
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_table
from tests.rollout.one_at_a_time import OneAtATime
from tests.lineage.test_sealed import draft

TASKS = [Task(f"secret-{n}", "sealed", ({"role": "user", "content": f"{n}+4"},), str(n + 4), {"digits": 1}) for n in (7, 8, 9)]
SET = task_set_hash(TASKS)
K = 2


class Answerer(OneAtATime):
    """A stand-in for the engine: always says 7+4=11;#11."""

    def __init__(self, folder: Path, **_: Any) -> None:
        from evo_hpc.domains.tokenizer import ChatTokenizer

        super().__init__()
        self.ids = [*(t := ChatTokenizer.from_folder(folder)).encode_text("7+4=11;#11"), t.eos_ids[0]]
        self.requests: list[str] = []

    def answer(self, request: Request) -> Completion:
        self.requests.append(request.request_id)
        return Completion(request.request_id, tuple(self.ids), np.zeros(len(self.ids), np.float32), "stop", 0, 0.1)

    def reload(self, folder: Path, step: int, **_: Any) -> None:
        pass

    def identity(self) -> dict[str, str]:
        return {"engine": "stand-in"}

    def effective_config(self) -> dict[str, Any]:
        return {"device": "cpu"}


@pytest.fixture
def paths(tmp_path: Path) -> CampaignPaths:
    paths = CampaignPaths(tmp_path / "campaigns" / "c")
    sealed = paths.workspace.sealed_tasks(SET)
    sealed.parent.mkdir(parents=True)
    sealed.write_text(tasks_to_jsonl(TASKS))
    for number in range(3):
        folder = paths.root / f"policy-{number}"
        get_domain("arithmetic").write_policy_files(folder)  # type: ignore[attr-defined]
        (folder / "model.safetensors").write_text(f"weights {number}")
        complete(folder, policy_meta(number, Probe(token_ids=[1, 2], logprobs=[0.0, 0.0])))
    return paths


def declared(paths: CampaignPaths) -> Read:
    a, b = (Candidate(version=f"v000{n}", policy=policy_identity(paths.root / f"policy-{n}")) for n in (0, 1))
    return declare_read(paths.workspace, draft("c", task_set=SET, baseline=a, candidate=b))


def context_of(paths: CampaignPaths, read: Read | None, policies: tuple[int, int] = (0, 1), attempt: int = 0, **params: int) -> RoleContext:
    job = paths.final.job("evaluate", attempt)
    job.root.mkdir(parents=True, exist_ok=True)
    spec = JobSpec(
        name="job", kind="evaluate", campaign="c", owner="final", attempt=attempt, cluster={},
        config={"name": "c", "domain": {"name": "arithmetic"}, "base_model": {"supervised": {}},
                "evaluation": {"samples_per_task": K, "max_response_tokens": 32}},
        params={
            "evaluations": [
                {"version": f"v000{n}", "policy": f"policy-{policy}", "policy_step": n, "suite": "sealed"} for n, policy in enumerate(policies)
            ],
            "sealed": {"task_set": SET, "number": read.number, "digest": read.digest} if read else None, **params,
        },
    )
    incarnation = claim(job, Identity(job_name="job", generation=1, start=len(job.claims()), process=ProcessIdentity.current(), claimed_at=0.0))
    return RoleContext("evaluator", job, incarnation, spec, ExchangePaths(paths.root / "exchange"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Answerer]:
    made: list[Answerer] = []
    monkeypatch.setattr(evaluation_job, "Engine", lambda *args, **kwargs: made.append(Answerer(*args, **kwargs)) or made[-1])
    return made


def test_both_candidates_are_scored_and_no_word_of_a_task_is_kept(
    paths: CampaignPaths, engine: list[Answerer], capfd: pytest.CaptureFixture[str]
) -> None:
    context = context_of(paths, declared(paths))
    outputs = evaluation_job.run(context)
    assert [e["version"] for e in outputs["evaluations"]] == ["v0000", "v0001"]
    ids = [hidden_ids(TASKS)[task.task_id] for task in TASKS]
    for entry in outputs["evaluations"]:
        folder = paths.root / entry["folder"]
        record = read_evaluation_folder(folder, entry["version"])
        assert record.task_ids == ids and (record.rollouts, record.missing, record.k) == (len(TASKS) * K, 0, K)
        assert scores_in_folder(folder) == {ids[0]: [1.0, 1.0], ids[1]: [0.0, 0.0], ids[2]: [0.0, 0.0]} and record.avg_at_k == pytest.approx(1 / 3)
        for row in read_table(folder / EVALUATION_PART, ROLLOUT).to_pylist():
            empty = ("text", "prompt_ids", "response_ids", "loss_mask", "logprobs", "messages", "verifier_detail", "tool_calls", "domain_features",
                     "task_attributes")
            assert not any(row[name] for name in (*empty, "seed"))
            assert row["task_id"] in ids and row["group_id"] in ids and row["stop_reason"] == "stop"
            assert row["prompt_tokens"] > 3 and row["response_tokens"] == 11, "lengths stay"
    assert len(engine) == 1 and len(engine[0].requests) == 2 * len(TASKS) * K, "one engine for both"
    assert not any("secret" in name for name in engine[0].requests)
    check_wordless(paths, "".join(capfd.readouterr()))


def check_wordless(paths: CampaignPaths, printed: str) -> None:
    """No task is named or shown in what was printed, nor in any file, or in the text of any table."""
    for path in paths.final.root.rglob("*"):
        printed += path.read_bytes().decode(errors="ignore") if path.is_file() else ""
        printed += str(read_table(path, ROLLOUT).to_pylist()) if path.suffix == ".parquet" else ""
    for task in TASKS:
        assert task.task_id not in printed and task.messages[0]["content"] not in printed


def test_chunks_and_shards_are_as_wordless(
    paths: CampaignPaths, engine: list[Answerer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A chunk that a stopped job leaves behind holds no word, and each shard hides its tasks under the names that all shards use."""
    read, work_of = declared(paths), evaluation_job.work_of
    monkeypatch.setattr(evaluation_job, "work_of", lambda *args: replace(work_of(*args), chunk_rollouts=K))
    stopped = context_of(paths, read, shards=2, shard=0)
    finished_one = evaluation_job._Evaluator._finished_one

    def stopping(self: Any, spec: Any, finished: int) -> None:
        stopped.stop_requested = finished > K
        finished_one(self, spec, finished)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(evaluation_job._Evaluator, "_finished_one", stopping)
        evaluation_job.run(stopped)
    chunks = list(stopped.incarnation.rollouts.rglob("*.parquet"))
    assert len(chunks) == 1
    check_wordless(paths, "".join(capfd.readouterr()))
    outputs = [evaluation_job.run(context_of(paths, read, shards=2, shard=n, attempt=n)) for n in range(2)]
    assert len(engine[1].requests) == 3 * K, "of the four tasks of its two policies one was taken over"
    for number in range(2):
        merged = merge_shards([paths.root / made["evaluations"][number]["folder"] for made in outputs], paths.root / "scratch")
        assert merged.meta["task_ids"] == [hidden_ids(TASKS)[task.task_id] for task in TASKS] and merged.meta["avg_at_k"] == pytest.approx(1 / 3)
    check_wordless(paths, "".join(capfd.readouterr()))


def test_hidden_names_depend_on_all_tasks_and_not_on_their_order() -> None:
    """So nobody finds a task by hashing its likely ids."""
    assert hidden_ids(TASKS) == hidden_ids(TASKS[::-1]) and len(set(hidden_ids(TASKS).values())) == len(TASKS)
    assert hidden_ids(TASKS)["secret-7"] != hidden_ids(TASKS[:1])["secret-7"]


def refused(paths: CampaignPaths, read: Read | None, engine: list[Answerer], message: str, **kwargs: Any) -> str:
    with pytest.raises(SealedRefused, match=message) as error:
        evaluation_job.run(context_of(paths, read, **kwargs))
    assert engine == [], "refused before an engine starts"
    return str(error.value)


def test_nothing_is_read_without_a_declared_read(paths: CampaignPaths, engine: list[Answerer]) -> None:
    refused(paths, None, engine, "for the final claim alone")
    refused(paths, draft(number=1).signed(), engine, "does not declare the read that this job is for")
    real = declared(paths)
    refused(paths, real.model_copy(update={"digest": "0" * 16}), engine, "does not declare the read")


def test_nobody_but_the_candidates_is_scored(paths: CampaignPaths, engine: list[Answerer]) -> None:
    refused(paths, declared(paths), engine, "was declared for v0000 and v0001 with the policies that they had then", policies=(0, 2))


@pytest.mark.parametrize("damage", [
    lambda path: path.unlink(),
    lambda path: path.write_text(path.read_text().replace("7+4", "7+5")),
    lambda path: path.write_text(path.read_text().replace('"task_id":"secret-7"', '"secret_id":"secret-7"')),
    lambda path: path.write_text(path.read_text() * 2),
])
def test_damaged_tasks_are_refused_without_showing_them(paths: CampaignPaths, engine: list[Answerer], damage: Any) -> None:
    damage(paths.workspace.sealed_tasks(SET))
    message = refused(paths, declared(paths), engine, "missing, damaged or edited")
    assert "secret" not in message and "7+" not in message
