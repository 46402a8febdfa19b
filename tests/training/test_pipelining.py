"""Trainer and workers over the real exchange, with stand-ins for policy and engine: whoever is slow or dies, each group is learned from once."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evo_hpc.config.cluster import Cluster, Engine
from evo_hpc.config.recipe import DataFilter, Optimizer, Recipe, Rollout
from evo_hpc.domains.base import Task
from evo_hpc.domains.environment import OneTurn
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.spec import JobSpec
from evo_hpc.paths import ExchangePaths, IncarnationPaths, JobPaths
from evo_hpc.rollout.episodes import Episode, Episodes
from evo_hpc.rollout.records import Completion, Request, Sampling
from evo_hpc.rollout.worker import Serving
from evo_hpc.seeds import derive_seed, positions_for_step
from evo_hpc.training import parallel
from evo_hpc.training.groups import score_groups
from evo_hpc.training.rollouts import RolloutSource, Rows
from evo_hpc.training.schedule import GroupName, Schedule

TASKS = [Task(f"t{i}", "train", ({"role": "user", "content": str(i)},), str(i), {}) for i in range(11)]
STEPS, GROUP_SIZE = 7, 2
SAMPLING = Sampling(1.0, 1.0, 4, (0,))


class Died(Exception):
    """A worker's process is gone."""


class Impatient(RoleContext):
    """A trainer that does not wait for ever."""

    def raise_if_stopped(self) -> None:
        super().raise_if_stopped()
        if time.monotonic() - self.started > 30:
            files = sorted(path.relative_to(self.exchange.root).as_posix() for path in self.exchange.root.rglob("*") if path.is_file())
            raise AssertionError(f"the trainer waits for ever; the exchange has {files}")


class FakeEngine:
    """Tokens are a function of seed and weights; how many requests a step finishes, and how long it takes, are chance."""

    def __init__(self, chance: random.Random, slowness: float, deaths: list[int]) -> None:
        self.chance, self.slowness, self.deaths = chance, slowness, deaths
        self.weight_version, self.running = -1, dict[str, Request]()

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def add(self, requests: list[Request], sampling: Sampling) -> None:
        assert not self.running.keys() & {request.request_id for request in requests}
        self.running |= {request.request_id: request for request in requests}

    def step(self) -> list[Completion]:
        if self.deaths and self.chance.random() < 0.2:
            self.deaths.pop()
            raise Died
        time.sleep(self.slowness * self.chance.random())
        finished = [name for name in self.running if self.chance.random() < 0.5]
        return [self._one(self.running.pop(name)) for name in finished]

    def _one(self, request: Request) -> Completion:
        ids = (request.seed % 97, self.weight_version + 1)
        return Completion(request.request_id, ids, np.full(2, -0.5, np.float32), "stop", self.weight_version, 0.0)

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name)

    def reload(self, folder: Path, weight_version: int, **probe: Any) -> float:
        assert not self.running, "other weights under requests that are being sampled"
        assert (folder / "weights").read_text() == str(weight_version)
        self.weight_version = weight_version
        return 0.0


class Silent:
    """A tokenizer without text."""

    def decode_response(self, ids: Any) -> str:
        return ""


@dataclass
class FakeSampler:
    """Rows without a domain: the reward is a function of the tokens."""

    engine: FakeEngine

    def __post_init__(self) -> None:
        self.under_way = Episodes(self.engine, cast(Any, Silent()), SAMPLING)

    def episodes(self, groups: list[Any]) -> list[Episode]:
        return [
            Episode(f"{g.group_id}/{i}", (1,), seed, OneTurn(cast(Any, None), g.task), SAMPLING.max_tokens)
            for g in groups for i, seed in enumerate(g.seeds)
        ]

    def verified(self, groups: list[Any], episodes: list[Episode], common: dict[str, Any]) -> Rows:
        each = iter(episodes)
        return [self._row(group, i, seed, next(each), common) for group in groups for i, seed in enumerate(group.seeds)]

    def _row(self, group: Any, sample: int, seed: int, episode: Episode, common: dict[str, Any]) -> dict[str, Any]:
        return {
            **common, "task_id": group.task.task_id, "group_id": group.group_id, "sample": sample, "seed": seed, "turns": 1, "prompt_ids": [1],
            "response_ids": episode.response_ids, "loss_mask": [1, 1], "logprobs": [-0.5, -0.5], "text": "", "messages": None, "tool_calls": [],
            "stop_reason": "stop", "reward": float(seed % 3 == 0), "components": [("correct", float(seed % 3 == 0))], "verifier_detail": "",
            "error_class": None, "weight_version": episode.weight_version, "generate_seconds": 0.0, "verify_seconds": 0.0, "prompt_tokens": 1,
            "response_tokens": 2, "truncated": False, "trigrams_total": 0, "trigrams_unique": 0, "longest_token_run": 1, "tool_call_count": 0,
            "tool_error_count": 0, "domain_features": [], "task_attributes": [], "advantage": None, "kept": None, "staleness": None,
        }


class FakePolicy:
    """Weights that say which they are."""

    dtype = "float32"

    def __init__(self, step: int) -> None:
        self.step = step

    def save_hf(self, folder: Path, tokenizer_from: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(self.step))

    def logprobs(self, samples: list[Any], temperature: float) -> list[np.ndarray]:
        return [np.zeros(len(sample.token_ids), np.float32) for sample in samples]


@dataclass
class Job:
    """One incarnation: an exchange, a trainer's source, workers in threads that are started again when they die."""

    root: Path
    recipe: Recipe
    workers: int
    batch_groups: int
    slowness: list[float]
    deaths: int = 0
    chance_seed: int = 0
    failures: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Job:
        self.root.mkdir(parents=True)
        (self.root / "logs").mkdir()
        self.exchange = ExchangePaths(self.root / "exchange")
        for folder in self.exchange.folders():
            folder.mkdir(parents=True)
        self.contexts = [self._context("rollout" if n == 0 else f"rollout-{n}") for n in range(self.workers)]
        self.deaths_left = [0] * self.deaths
        self.threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(self.workers)]
        for thread in self.threads:
            thread.start()
        self.trainer = self._context("trainer")
        self.source = RolloutSource(self.trainer, self.recipe, TASKS, Path("nowhere"))
        return self

    def __exit__(self, *_: object) -> None:
        for context in self.contexts:
            context.stop_requested = True
        for thread in self.threads:
            thread.join()
        shutil.rmtree(self.root)
        assert not self.failures, self.failures

    def _context(self, role: str) -> RoleContext:
        cluster = Cluster(engine=Engine(workers=self.workers, batch_groups=self.batch_groups)).model_dump(mode="json")
        campaign = {"name": "c", "seed": 3, "domain": {"name": "arithmetic"}}
        spec = JobSpec.model_construct(campaign="c", owner="v0001", cluster=cluster, config=campaign)
        return (Impatient if role == "trainer" else RoleContext)(role, JobPaths(self.root), IncarnationPaths(self.root), spec, self.exchange)

    def _work(self, number: int) -> None:
        chance = random.Random(derive_seed(self.chance_seed, number))
        while True:
            sampler = FakeSampler(FakeEngine(chance, self.slowness[number % len(self.slowness)], self.deaths_left))
            share = -(-self.recipe.rollout.groups_asked // self.workers) * GROUP_SIZE
            try:
                Serving(self.contexts[number], sampler, {t.task_id: t for t in TASKS}, share).run()  # type: ignore[arg-type]
            except Died:
                continue
            except Stopped:
                return
            except BaseException as error:  # shown by the test, which waits for the trainer
                self.failures.append(error)
                self.trainer.stop_requested = True
                return


def recipe(refill_rounds: int = 0, **rollout: Any) -> Recipe:
    return Recipe(
        steps=STEPS, rollout=Rollout(prompts_per_step=3, group_size=GROUP_SIZE, **rollout), data_filter=DataFilter(refill_rounds=refill_rounds),
        optimizer=Optimizer(old_logprobs="sampled"),
    )


@dataclass
class Trained:
    """What a run of some incarnations has learned from."""

    rows: dict[int, Rows] = field(default_factory=dict)
    dropped: float = 0.0
    """Groups, in the incarnations that were not cut off."""
    left: list[str] = field(default_factory=list)


def train(root: Path, job: dict[str, Any], run: Recipe, cuts: tuple[int, ...] = ()) -> Trained:
    """All steps; after each step of `cuts` everything is killed, and goes on in a new incarnation with the manifest."""
    found, step, incarnation = Trained(), 0, 0
    while step < STEPS:
        with Job(root / str(incarnation), run, **job) as each:
            each.source.publish(FakePolicy(step), step, [1, 2])  # type: ignore[arg-type]
            each.source.begin(step, found.left)
            while step < STEPS:
                rows = each.source.collect(step + 1)
                for _ in range(run.data_filter.refill_rounds):
                    batch = score_groups(rows, GROUP_SIZE, run.optimizer, run.data_filter, most=3)
                    if len(batch.kept()) == 3:
                        break
                    rows += each.source.refill(step + 1, 3 - len(batch.kept()))
                step += 1
                each.source.publish(FakePolicy(step), step, [1, 2])  # type: ignore[arg-type]
                each.source.request(step)
                found.rows[step], found.left = rows, each.source.manifest(step)
                found.dropped += each.source.counts()["groups_dropped_late"]
                versions = each.exchange.policies()
                assert len(versions) <= run.rollout.max_staleness + 2, "what nobody can ask for any more is removed"
                if step in cuts:
                    break
        cuts, incarnation = tuple(cut for cut in cuts if cut != step), incarnation + 1
    return found


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "gather_objects", lambda value: [value])
    monkeypatch.setattr("evo_hpc.rollout.exchange.POLL_SECONDS", 0.0005)


@pytest.fixture
def root() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="evo-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder)


JOBS = st.fixed_dictionaries({
    "workers": st.integers(1, 3), "batch_groups": st.integers(0, 3), "deaths": st.integers(0, 4), "chance_seed": st.integers(0, 99),
    "slowness": st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=1, max_size=3),
})
SLOW_ONE: dict[str, Any] = {"workers": 3, "batch_groups": 1, "deaths": 2, "chance_seed": 7, "slowness": [0.0, 0.0, 0.02]}
CUTS = st.sets(st.integers(1, STEPS - 1), max_size=2).map(lambda cuts: tuple(sorted(cuts)))
SLOWER = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def said(rows: Rows) -> list[tuple[Any, ...]]:
    return [tuple(row[name] if name != "response_ids" else tuple(row[name]) for name in NAMES) for row in rows]


NAMES = ("trainer_step", "group_id", "sample", "task_id", "seed", "response_ids", "weight_version", "policy_step", "staleness", "reward")


@SLOWER
@given(job=JOBS, stale=st.integers(0, 2), rounds=st.sampled_from([0, 2]), cuts=CUTS)
def test_exact_weights_give_the_same_rows_whoever_samples_them(root: Path, job: dict[str, Any], stale: int, rounds: int, cuts: tuple[int, ...]) -> None:
    run = recipe(max_staleness=stale, refill_rounds=rounds)
    found = train(root, job, run, cuts)
    plain = train(root, {"workers": 1, "batch_groups": 0, "slowness": [0.0]}, run, cuts)
    assert {step: said(rows) for step, rows in found.rows.items()} == {step: said(rows) for step, rows in plain.rows.items()}
    for step, rows in found.rows.items():
        began = max((cut for cut in cuts if cut < step), default=0)
        assert {row["weight_version"] for row in rows} == {max(step - 1 - stale, began)}
        own = [f"{step:06d}-{i:04d}" for i in range(3)]
        names = list(dict.fromkeys(row["group_id"] for row in rows))
        assert names[:3] == own and names == sorted(names) and (rounds or names == own)
        tasks = [TASKS[i].task_id for i in positions_for_step(len(TASKS), 3, step, 3, run.seed)]
        assert [next(row["task_id"] for row in rows if row["group_id"] == name) for name in own] == tasks
        if rounds:  # the first of the seeds decides by chance, but always alike
            assert all(row["seed"] == derive_seed(3, run.seed, "v0001", "rollout", step, names.index(row["group_id"]), row["sample"]) for row in rows)


@SLOWER
@given(
    job=JOBS, cuts=CUTS, stale=st.integers(0, 3), weights=st.sampled_from(["exact", "newest"]), late=st.sampled_from(["carry", "drop", "wait"]),
    oversample=st.sampled_from([1.0, 1.34, 2.0]),
)
@example(job=SLOW_ONE, cuts=(2, 5), stale=2, weights="newest", late="carry", oversample=2.0)
@example(job=SLOW_ONE, cuts=(3,), stale=1, weights="newest", late="drop", oversample=2.0)
def test_every_group_is_learned_from_once_or_dropped_and_none_is_too_old(
    root: Path, job: dict[str, Any], cuts: tuple[int, ...], stale: int, weights: str, late: str, oversample: float
) -> None:
    late = "drop" if late == "carry" and (not stale or weights == "exact") else late
    run = recipe(max_staleness=stale, weights=weights, late_groups=late, oversample=oversample)
    found = train(root, job, run, cuts)
    learned = Counter(row["group_id"] for rows in found.rows.values() for row in rows)
    assert set(learned.values()) == {GROUP_SIZE}, "every rollout of a group once, over all incarnations"
    for step, rows in found.rows.items():
        assert len(rows) == GROUP_SIZE * (run.rollout.groups_asked if late == "wait" else 3)
        assert all(0 <= row["staleness"] == step - 1 - row["weight_version"] <= stale and row["trainer_step"] == step for row in rows)
        assert all(GroupName.parse(row["group_id"]).step <= step for row in rows)
    asked = STEPS * run.rollout.groups_asked
    assert asked == len(learned) + found.dropped + len(found.left), "none is lost"
    assert late != "drop" or not found.left
    assert late != "wait" or not found.dropped


def test_a_late_group_is_carried_to_the_next_step_and_no_further() -> None:
    run = Schedule(Rollout(prompts_per_step=2, group_size=2, max_staleness=1, weights="newest", late_groups="carry", oversample=1.5), 0)
    assert [run.weights_for(step) for step in (1, 2, 3)] == [0, 0, 1] and run.posted_by(0) == 2 and run.oldest_needed(3) == 2
    names = [GroupName(1, i) for i in range(3)]
    batches = run.ask(names, 0, 1)
    run.answer(batches[2].number, {names[2]: 0})
    assert run.choose(1) is None
    run.answer(batches[0].number, {names[0]: 0})
    assert run.choose(1) == [names[0], names[2]]
    run.take([names[0], names[2]])
    rest = run.settle(1)
    assert (rest.late, rest.dropped, rest.over) == (1, [], []) and run.carried(1) == [names[1]]
    run.answer(batches[1].number, {names[1]: 0})
    more = run.ask([GroupName(2, 0), GroupName(2, 1)], 0, 2)
    assert run.choose(2) is None, "one carried group is not a step"
    run.answer(more[0].number, {GroupName(2, 0): 1, GroupName(2, 1): 1})
    assert run.choose(2) == [names[1], GroupName(2, 0)]
    run.take([names[1], GroupName(2, 0)])
    assert run.settle(2).dropped == [] and run.carried(2) == [GroupName(2, 1)]
    assert run.settle(3).dropped == [GroupName(2, 1)] and not run.carried(3), "at step 4 it would be 2 steps old"


def test_a_group_that_was_carried_and_comes_with_old_weights_is_not_taken() -> None:
    run = Schedule(Rollout(prompts_per_step=1, group_size=2, max_staleness=1, weights="newest", late_groups="carry", oversample=2.0), 0)
    late, other, own = GroupName(2, 0), GroupName(2, 1), GroupName(3, 0)
    batches = [*run.ask([late, other], run.weights_for(2), 1), *run.ask([own], run.weights_for(3), 1)]
    run.answer(batches[1].number, {other: 1})
    run.take(run.choose(2) or [])
    assert run.settle(2).dropped == [] and run.carried(2) == [late], "it may yet be sampled with newer weights"
    run.answer(batches[0].number, {late: 0})
    assert run.choose(3) is None, "it was not"
    run.answer(batches[2].number, {own: 2})
    assert run.choose(3) == [own]
    run.take([own])
    assert run.settle(3).dropped == [late]


def test_what_nobody_wants_is_not_sampled() -> None:
    run = Schedule(Rollout(prompts_per_step=1, group_size=2, max_staleness=0, late_groups="drop", oversample=3.0), 0)
    names = [GroupName(1, i) for i in range(3)]
    one, two, three = run.ask(names, 0, 1)
    run.answer(two.number, {names[1]: 0})
    assert run.choose(1) == [names[1]]
    run.take([names[1]])
    rest = run.settle(1)
    assert rest.over == [one.number, three.number] and rest.dropped == [names[0], names[2]] and rest.late == 2 and not run.open(1)


@pytest.mark.parametrize("fields, message", [
    ({"late_groups": "carry"}, "carry needs max_staleness"), ({"late_groups": "carry", "max_staleness": 2}, "carry needs weights: newest"), ({"oversample": 0.9}, "greater than or equal to 1"), ({"max_staleness": 9}, "less than or equal to 8"),
])
def test_impossible_schedules_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rollout(**fields)
