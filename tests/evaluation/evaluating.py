"""A small campaign to evaluate in this process, with an engine whose rollouts are functions of their seeds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evo_hpc.evaluation.job as evaluation_job
import evo_hpc.rollout.groups as groups
from evo_hpc.config.campaign import Evaluation
from evo_hpc.domains.base import Task, get_domain, tasks_to_jsonl
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.jobs.claims import claim
from evo_hpc.jobs.context import RoleContext
from evo_hpc.jobs.spec import Identity, JobSpec
from evo_hpc.paths import CampaignPaths, ExchangePaths, JobPaths
from evo_hpc.rollout.exchange import Probe, policy_meta
from evo_hpc.rollout.records import Completion, Request
from evo_hpc.store.manifest import complete
from evo_hpc.store.processes import ProcessIdentity
from tests.rollout.one_at_a_time import OneAtATime

K, CHUNK = 2, 4
TASKS = {"dev": 7, "probe": 3}
TOTAL = K * sum(TASKS.values())


class SeededEngine(OneAtATime):
    """Says something that depends on the seed alone, finished in any order; as fast as it can."""

    def __init__(self, folder: Path, **_: Any) -> None:
        super().__init__()
        self.tokenizer = ChatTokenizer.from_folder(folder)
        self.sampled: list[str] = []

    def add(self, requests: Any, sampling: Any) -> None:
        super().add(random.Random(len(requests)).sample(list(requests), len(requests)), sampling)

    def answer(self, request: Request) -> Completion:
        chance = random.Random(request.seed)
        ids = (*self.tokenizer.encode_text(f"7+4=11;#{chance.choice([11, 12, chance.randrange(99)])}"), self.tokenizer.eos_ids[0])
        stop = chance.choice(["stop", "stop", "length"])
        self.sampled.append(request.request_id)
        return Completion(request.request_id, ids, np.full(len(ids), chance.random(), np.float32), stop, 0, 0.1)

    def reload(self, folder: Path, step: int, **_: Any) -> None:
        pass

    def identity(self) -> dict[str, str]:
        return {"engine": "stand-in"}

    def effective_config(self) -> dict[str, Any]:
        return {"device": "cpu"}


class StoppedClock:
    """`time` as the sampler sees it: verifying takes no time, so that two runs give the same rows to the byte."""

    @staticmethod
    def perf_counter() -> float:
        return 0.0


def set_up(monkeypatch: pytest.MonkeyPatch, chunk: int = CHUNK) -> list[SeededEngine]:
    """Put the engine and small chunks into the job; the engines made since."""
    made: list[SeededEngine] = []
    real = evaluation_job.work_of
    monkeypatch.setattr(evaluation_job, "Engine", lambda *args, **kwargs: made.append(SeededEngine(*args, **kwargs)) or made[-1])
    monkeypatch.setattr(evaluation_job, "work_of", lambda *args: replace(real(*args), chunk_rollouts=chunk))
    monkeypatch.setattr(groups, "time", StoppedClock)
    return made


def make_folder(root: Path) -> CampaignPaths:
    """Tasks of dev and probe, and two policies."""
    paths = CampaignPaths(root / "campaigns" / "c")
    for suite, count in TASKS.items():
        tasks = [Task(f"{suite}-{n}", suite, ({"role": "user", "content": "7+4"},), "11", {"number": n}) for n in range(count)]
        paths.tasks(suite).parent.mkdir(parents=True, exist_ok=True)
        paths.tasks(suite).write_text(tasks_to_jsonl(tasks))
    for number in range(2):
        folder = paths.root / f"policy-{number}"
        get_domain("arithmetic").write_policy_files(folder)  # type: ignore[attr-defined]
        (folder / "model.safetensors").write_text(f"weights {number}")
        complete(folder, policy_meta(number, Probe(token_ids=[1, 2], logprobs=[0.0, 0.0])))
    return paths


def start(
    paths: CampaignPaths, job: JobPaths | None = None, *, policy: str = "policy-0", suites: tuple[str, ...] = ("dev", "probe"),
    system_prompt: str | None = None, shard: int = 0, shards: int = 1, **evaluation: Any,
) -> RoleContext:
    """One more start of an evaluation job of v0001."""
    job = job or paths.version("v0001").job("evaluate", 0)
    job.root.mkdir(parents=True, exist_ok=True)
    settings = Evaluation(**{"samples_per_task": K, "max_response_tokens": 32, **evaluation})
    spec = JobSpec(
        name="job", kind="evaluate", campaign="c", owner="v0001", attempt=job.attempt, cluster={},
        config={"name": "c", "domain": {"name": "arithmetic"}, "base_model": {"supervised": {}}, "evaluation": settings.model_dump()},
        params={
            "evaluations": [
                {"version": "v0001", "policy": policy, "policy_step": 1, "suite": suite, "system_prompt": system_prompt} for suite in suites
            ],
            "shard": shard, "shards": shards,
        },
    )
    number = len(job.claims())
    incarnation = claim(job, Identity(job_name="job", generation=1, start=number, process=ProcessIdentity.current(), claimed_at=0.0))
    return RoleContext("evaluator", job, incarnation, spec, ExchangePaths(paths.root / "exchange"))
