"""Rewards, contexts, rows, and the file protocol between trainer and workers; the engine is a stand-in that repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from evo_hpc.config.recipe import Recipe, Reward
from evo_hpc.domains.base import Task, get_domain
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.role import outcome_of
from evo_hpc.jobs.spec import JobSpec
from evo_hpc.paths import ExchangePaths, IncarnationPaths, JobPaths
from evo_hpc.rollout.errors import EngineUnavailable
from evo_hpc.rollout.exchange import (
    BatchRequest,
    GroupRequest,
    Probe,
    claim_batch,
    policy_meta,
    post_request,
    published,
    read_probe,
    read_request,
)
from evo_hpc.rollout.groups import ContextError, Group, Sampler, longest_context, positions
from evo_hpc.rollout.records import Completion, Request, Sampling
from evo_hpc.rollout.reward import RewardError, check_weights, total_reward
from evo_hpc.rollout.vllm_setup import engine_arguments
from evo_hpc.rollout.worker import Serving
from evo_hpc.store.manifest import Torn, complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_table, table_of

TASK = Task("add-2-3", "train", ({"role": "user", "content": "2+3"},), "5", {"digits": 1, "carries": 0})


@pytest.mark.parametrize("reward, truncated, expected", [
    (Reward(), False, 1.0),
    (Reward(weights={"correct": 1.0, "format": 0.1}), False, 1.05),
    (Reward(weights={"correct": 3.0}, clip=2.0), False, 2.0),
    (Reward(weights={"correct": -3.0}, clip=2.0), False, -2.0),
    (Reward(truncated="zero"), True, 0.0),
    (Reward(truncated="score"), True, 1.0),
])
def test_total_reward(reward: Reward, truncated: bool, expected: float) -> None:
    assert total_reward(reward, {"correct": 1.0, "format": 0.5}, truncated=truncated) == pytest.approx(expected)


@pytest.mark.parametrize("tokens, reward, truncated, expected", [
    (0, Reward(overlong_tokens=20), False, 1.0), (80, Reward(overlong_tokens=20), False, 1.0), (81, Reward(overlong_tokens=20), False, 0.95),
    (100, Reward(overlong_tokens=20), True, 0.0), (90, Reward(overlong_tokens=20, overlong_penalty=4.0), False, -1.0),
    (100, Reward(overlong_tokens=20, truncated="zero"), True, -1.0), (100, Reward(overlong_tokens=20, overlong_penalty=4.0, clip=2.0), True, -2.0),
    (100, Reward(truncated="mask"), True, 1.0),
])
def test_a_response_that_is_almost_too_long_earns_less(tokens: int, reward: Reward, truncated: bool, expected: float) -> None:
    assert total_reward(reward, {"correct": 1.0}, truncated=truncated, tokens=tokens, max_tokens=100) == pytest.approx(expected)


def test_the_penalty_begins_within_the_longest_response() -> None:
    with pytest.raises(ValueError, match=r"reward.overlong_tokens \(97\) must not be more than rollout.max_response_tokens \(96\)"):
        Recipe(reward=Reward(overlong_tokens=97))


def test_an_unknown_component_is_named() -> None:
    with pytest.raises(RewardError, match="unknown component style; this domain's verifier gives correct, format"):
        check_weights(Reward(weights={"style": 1.0}), ("correct", "format"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("policy")
    get_domain("arithmetic").write_policy_files(folder)  # type: ignore[attr-defined]
    assert positions(folder) == 256
    return ChatTokenizer.from_folder(folder)


def test_the_context_is_as_long_as_needed_or_refused(tokenizer: ChatTokenizer) -> None:
    prompt = len(tokenizer.encode_prompt(TASK.messages))
    assert longest_context(tokenizer, [TASK], None, 64, 256) == prompt + 64 + 1
    assert longest_context(tokenizer, [TASK], None, 256 - prompt, 256) == 256
    assert longest_context(tokenizer, [TASK], "123", 64, None) == prompt + 64 + 1 + 4
    with pytest.raises(ContextError, match=r"need 25[7-9] positions, the model has 256"):
        longest_context(tokenizer, [TASK], None, 257 - prompt, 256)


class Repeater:
    """Answers every request with one text; its log-probabilities are minus the position."""

    def __init__(self, ids: list[int], stop_reason: str) -> None:
        self.ids, self.stop_reason = ids, stop_reason
        self.running: list[Request] = []
        self.seeds: list[int] = []

    def add(self, requests: list[Request], sampling: Sampling) -> None:
        self.running += requests
        self.seeds += [request.seed for request in requests]

    def step(self) -> list[Completion]:
        done, self.running = self.running, []
        return [self._one(request) for request in done]

    def drop(self, request_ids: list[str]) -> None:
        self.running = [request for request in self.running if request.request_id not in request_ids]

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def _one(self, request: Request) -> Completion:
        logprobs = -np.arange(len(self.ids), dtype=np.float32)
        return Completion(request.request_id, tuple(self.ids), logprobs, self.stop_reason, 4, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop_reason, reward", [("stop", 1.1), ("length", 0.0)])
def test_rows_hold_the_engines_tokens_and_the_verdict(tokenizer: ChatTokenizer, stop_reason: str, reward: float) -> None:
    ids = [*tokenizer.encode_text("2+3=5;#5"), *([tokenizer.eos_ids[0]] if stop_reason == "stop" else [])]
    engine, seen = Repeater(ids, stop_reason), []
    sampler = Sampler(
        engine, tokenizer, get_domain("arithmetic"), Sampling(1.0, 1.0, 64, tokenizer.eos_ids),  # type: ignore[arg-type]
        Reward(weights={"correct": 1.0, "format": 0.1}),
    )
    common = {"campaign": "c", "version": "v", "suite": "train", "policy_step": 3, "trainer_step": 4, "evaluator_epoch": None}
    rows = sampler.rows([Group("a", TASK, (1, 2)), Group("b", TASK, (3,))], common, seen.append)
    assert table_of(rows, ROLLOUT).num_rows == 3 and engine.seeds == [1, 2, 3] and seen == [1, 2, 3]
    assert [(r["group_id"], r["sample"]) for r in rows] == [("a", 0), ("a", 1), ("b", 0)]
    row = rows[0]
    assert row["response_ids"] == ids and row["text"] == "2+3=5;#5" and row["weight_version"] == 4
    assert row["reward"] == pytest.approx(reward) and row["truncated"] is (stop_reason == "length")
    assert dict(row["task_attributes"]) == {"digits": "1", "carries": "0"} and row["trigrams_total"] == len(ids) - 2


def test_a_request_is_claimed_by_one_worker(tmp_path: Path) -> None:
    exchange = ExchangePaths(tmp_path)
    request = BatchRequest(number=5, step=3, weight_version=2, groups=[GroupRequest(group_id="g", task_id="t", seeds=[1, 2])])
    post_request(exchange, request)
    assert read_request(exchange, 5) == request and read_request(exchange, 6) is None
    assert [claim_batch(exchange, 5, worker) for worker in ("w0", "w1", "w0")] == [True, False, False]


def test_of_workers_with_the_same_name_one_wins(tmp_path: Path) -> None:
    exchange = ExchangePaths(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda _: claim_batch(exchange, 1, "rollout"), range(8)))
    assert won.count(True) == 1


def serving(
    folder: Path, tokenizer: ChatTokenizer, after: Callable[[RoleContext], None]
) -> tuple[RoleContext, Sampler]:
    """A worker with one request before it; `after` is what happens when the first of its rollouts is sampled."""
    context = RoleContext(
        "rollout", JobPaths(folder), IncarnationPaths(folder / "inc-0"), JobSpec.model_construct(campaign="c", owner="v0001"),
        ExchangePaths(folder),
    )
    group = GroupRequest(group_id="g", task_id=TASK.task_id, seeds=[1, 2, 3])
    for each in context.exchange.folders():
        each.mkdir()
    post_request(context.exchange, BatchRequest(number=1, step=7, weight_version=6, groups=[group]))

    class Engine(Repeater):
        weight_version, sampled = 6, ()  # type: ignore[var-annotated]

        def step(self) -> list[Completion]:
            request, *self.running = self.running
            self.sampled = [*self.sampled, request.request_id]
            if len(self.sampled) == 1:
                after(context)
            return [self._one(request)]

    return context, Sampler(
        Engine([tokenizer.eos_ids[0]], "stop"), tokenizer, get_domain("arithmetic"),  # type: ignore[arg-type]
        Sampling(1.0, 1.0, 64, tokenizer.eos_ids), Reward(weights={"correct": 1.0}),
    )


def test_a_worker_stops_in_the_middle_of_a_batch(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    def stop(context: RoleContext) -> None:
        context.stop_requested = True

    context, sampler = serving(tmp_path, tokenizer, stop)
    with pytest.raises(Stopped):
        Serving(context, sampler, {TASK.task_id: TASK}, share=3).run()
    assert sampler.engine.sampled == ["g/0"], "the rest of the batch is not waited for"  # type: ignore[attr-defined]
    assert not context.exchange.rollouts(1).exists()


def test_what_the_engine_raises_ends_the_worker_with_its_cause(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    def fail(context: RoleContext) -> None:
        try:
            raise ValueError("what vLLM found")
        except ValueError as error:
            raise RuntimeError("engine core died") from error

    context, sampler = serving(tmp_path, tokenizer, fail)
    with pytest.raises(RuntimeError) as caught:
        Serving(context, sampler, {TASK.task_id: TASK}, share=3).run()
    told = outcome_of(caught.value, context.incarnation.log("rollout"))["error"]
    assert told.startswith("RuntimeError: engine core died, caused by ValueError: what vLLM found (test_groups_and_exchange.py:")


def test_a_worker_answers_and_then_waits_for_its_end(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    context, sampler = serving(tmp_path, tokenizer, lambda context: None)
    timer = Timer(1.0, lambda: setattr(context, "stop_requested", True))
    timer.start()
    with pytest.raises(Stopped):
        Serving(context, sampler, {TASK.task_id: TASK}, share=3).run()
    timer.join()
    assert read_table(context.exchange.rollouts(1), ROLLOUT).column("trainer_step").to_pylist() == [7, 7, 7]


def test_only_a_gpu_engine_can_be_divided(tmp_path: Path) -> None:
    settings = {"max_model_len": 64, "kv_cache_bytes": 1 << 20, "dtype": "float32", "seed": 0, "tensor_parallel": 2}
    with pytest.raises(EngineUnavailable, match="engine.tensor_parallel is 2, and there is no GPU here"):
        engine_arguments(tmp_path, cuda=False, **settings)  # type: ignore[arg-type]
    assert engine_arguments(tmp_path, cuda=True, **settings)["tensor_parallel_size"] == 2  # type: ignore[arg-type]


def test_a_policy_is_seen_as_a_whole_and_brings_its_probe(tmp_path: Path) -> None:
    exchange = ExchangePaths(tmp_path)
    folder = exchange.policy(5)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")
    assert not published(exchange, 5)
    with pytest.raises(Torn):
        read_probe(folder)
    complete(folder, policy_meta(5, Probe.of([1, 2], np.array([0.0, -0.25], np.float32))))
    probe = read_probe(folder)
    assert published(exchange, 5) and probe is not None and probe.array().tolist() == [0.0, -0.25]
    (folder / "model.safetensors").write_text("weigh")
    with pytest.raises(Torn, match="truncated"):
        read_probe(folder)
