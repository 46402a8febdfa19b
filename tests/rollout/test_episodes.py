"""Rollouts of several turns: which tokens carry a loss, when an episode is over, and what a slow environment holds up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from evo_hpc.config.recipe import DataFilter, Optimizer, Reward
from evo_hpc.domains.base import SCORE, DomainError, Task, Verdict, get_domain
from evo_hpc.domains.environment import Environment, Reply, ToolCall, check_turns
from evo_hpc.domains.tokenizer import ChatTokenizer, TokenizerError
from evo_hpc.rollout.groups import Group, Sampler
from evo_hpc.rollout.records import Completion, Request, Sampling
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import table_of
from evo_hpc.training.groups import score_groups, to_sample
from evo_hpc.training.packing import Sample
from evo_hpc.training.policy import Policy
from evo_hpc.training.random_init import write_random_weights

TASK = Task("add-2-3", "train", ({"role": "user", "content": "2+3"},), "5", {"digits": 1})
COMMON = {"campaign": "c", "version": "v", "suite": "train", "policy_step": 3, "trainer_step": 4, "evaluator_epoch": None}


class TryAgain:
    """Says whether the answer is right, and asks again while it is not; a tool call each time."""

    def __init__(self, answer: str, delay: float = 0.0) -> None:
        self.answer, self.delay, self.heard = answer, delay, list[str]()

    def reply(self, text: str) -> Reply:
        time.sleep(self.delay)
        self.heard.append(text)
        call = ToolCall("check", text, text == self.answer, 0.0)
        return Reply((), (call,)) if call.ok else Reply(({"role": "user", "content": "9+9"},), (call,))

    def verdict(self, text: str, *, truncated: bool) -> Verdict:
        return Verdict({SCORE: float(text == self.answer)}, "")


class Trying:
    """The arithmetic domain with another go."""

    name, component_names = "trying", ("correct",)

    def __init__(self, delays: dict[str, float] | None = None) -> None:
        self.delays, self.begun = delays or {}, list[TryAgain]()

    def environment(self, task: Task) -> Environment:
        self.begun.append(TryAgain(task.answer, self.delays.get(task.task_id, 0.0)))
        return self.begun[-1]

    def features(self, text: str) -> dict[str, int | float]:
        return {"characters": len(text)}


class Speaker:
    """An engine that says what it is told to, by request, one token of each request a step."""

    def __init__(self, says: Callable[[Request], Sequence[int]], eos: int) -> None:
        self.says, self.eos = says, eos
        self.running: dict[str, tuple[Request, list[int], int]] = {}
        self.asked: list[Request] = []

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        for request in requests:
            self.asked.append(request)
            most = sampling.max_tokens if request.max_tokens is None else request.max_tokens
            self.running[request.request_id] = (request, list(self.says(request))[:most], most)

    def step(self) -> list[Completion]:
        done, self.running = self.running, {}
        return [
            Completion(name, tuple(ids), np.full(len(ids), -0.5, np.float32), "stop" if ids[-1] == self.eos else "length", 3, 0.1)
            for name, (_, ids, _) in done.items()
        ]

    def drop(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self.running.pop(name, None)

    @property
    def unfinished(self) -> int:
        return len(self.running)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("policy")
    get_domain("arithmetic").write_policy_files(folder)  # type: ignore[attr-defined]
    return ChatTokenizer.from_folder(folder)


def sampler_of(tokenizer: ChatTokenizer, texts: Sequence[str], *, domain: Trying | None = None, turns: int = 3, tokens: int = 40, **more: float) -> tuple[Sampler, Speaker]:
    """One whose engine says texts[n] in turn n of every rollout."""
    eos = tokenizer.eos_ids[0]

    def says(request: Request) -> list[int]:
        turn = int(request.request_id.split("/")[2]) if request.request_id.count("/") == 2 else 0
        return [*tokenizer.encode_text(texts[turn]), eos]

    engine = Speaker(says, eos)
    sampling = Sampling(1.0, 1.0, tokens, tokenizer.eos_ids)
    return Sampler(engine, tokenizer, domain or Trying(), sampling, Reward(), max_turns=turns, **more), engine  # type: ignore[arg-type]


def test_only_the_policys_own_tokens_carry_a_loss(tokenizer: ChatTokenizer) -> None:
    sampler, engine = sampler_of(tokenizer, ["4", "6", "5"])
    [row] = sampler.rows([Group("g", TASK, (7,))], COMMON)
    eos, between = tokenizer.eos_ids[0], tokenizer.encode_continuation([{"role": "user", "content": "9+9"}])
    said = [[*tokenizer.encode_text(text), eos] for text in ("4", "6", "5")]
    assert row["response_ids"] == [*said[0], *between, *said[1], *between, *said[2]]
    assert row["loss_mask"] == [1] * len(said[0]) + [0] * len(between) + [1] * len(said[1]) + [0] * len(between) + [1] * len(said[2])
    assert [p for p, m in zip(row["logprobs"], row["loss_mask"], strict=True) if not m] == [0.0] * 2 * len(between)
    assert (row["turns"], row["stop_reason"], row["reward"], row["tool_call_count"], row["tool_error_count"]) == (3, "stop", 1.0, 3, 2)
    assert [m["role"] for m in json.loads(row["messages"])] == ["assistant", "user", "assistant", "user", "assistant"]
    # The engine is given what it said itself, and what it is asked for depends on no other rollout.
    assert [list(r.prompt_ids) for r in engine.asked] == [
        row["prompt_ids"] + row["response_ids"][:n] for n in (0, len(said[0] + between), len(said[0] + between + said[1] + between))
    ]
    assert len({r.seed for r in engine.asked}) == 3 and engine.asked[0].seed == 7
    assert table_of([row], ROLLOUT).num_rows == 1
    sample = to_sample({**row, "advantage": 1.0})
    assert sample.loss_mask == [0] * len(row["prompt_ids"]) + row["loss_mask"] and sample.token_ids == row["prompt_ids"] + row["response_ids"]


@pytest.mark.parametrize("texts, turns, tokens, stop_reason, taken", [
    (["5"], 3, 40, "stop", 1), (["4", "6"], 2, 40, "turns", 2), (["4"], 1, 40, "turns", 1), (["4", "6", "5"], 3, 13, "length", 2), (["444444"], 3, 3, "length", 1),
    (["4", "5"], 3, 5, "length", 1),  # the answer would leave no room for a token
])
def test_when_an_episode_is_over(tokenizer: ChatTokenizer, texts: list[str], turns: int, tokens: int, stop_reason: str, taken: int) -> None:
    sampler, engine = sampler_of(tokenizer, texts, turns=turns, tokens=tokens)
    [row] = sampler.rows([Group("g", TASK, (7,))], COMMON)
    assert (row["stop_reason"], row["turns"], row["truncated"]) == (stop_reason, taken, stop_reason == "length")
    assert len(row["response_ids"]) <= tokens and row["loss_mask"][-1] == 1, "nothing of the environment's comes last"
    assert len(engine.asked) == taken


def test_a_slow_environment_holds_up_its_own_episode_alone(tokenizer: ChatTokenizer) -> None:
    slow, quick = TASK, Task("add-1-1", "train", ({"role": "user", "content": "1+1"},), "5", {})
    sampler, engine = sampler_of(tokenizer, ["4", "5"], domain=Trying({slow.task_id: 0.4}))
    episodes = sampler.episodes([Group("s", slow, (1,)), Group("q", quick, (2,))])
    sampler.under_way.add(episodes)
    over: list[str] = []
    while sampler.under_way.unfinished:
        over += [episode.name for episode in sampler.under_way.step()]
    assert over == ["q/0", "s/0"]
    assert [r.request_id for r in engine.asked] == ["s/0", "q/0", "q/0/1", "s/0/1"]
    assert episodes[0].reply_seconds > 0.7 > 0.3 > episodes[1].reply_seconds


def test_an_environment_that_fails_or_never_answers_is_no_wrong_answer(tokenizer: ChatTokenizer) -> None:
    class Broken(Trying):
        """One raises, one hangs, the third is well."""

        def environment(self, task: Task) -> Environment:
            found = super().environment(task)
            if len(self.begun) == 1:
                found.reply = None  # type: ignore[method-assign, assignment]
            elif len(self.begun) == 2:
                found.reply = lambda text: threading.Event().wait()  # type: ignore[method-assign, assignment, return-value]
            return found

    sampler, engine = sampler_of(tokenizer, ["4", "5"], domain=Broken(), reply_seconds=0.3)
    quiet = 0

    def looked(_: int) -> None:
        nonlocal quiet
        quiet += 0 if sampler.under_way.went_on else 1

    rows = sampler.rows([Group("g", TASK, (1, 2, 3))], COMMON, looked)
    assert [row["error_class"] for row in rows] == ["environment", "environment", None] and [row["reward"] for row in rows] == [None, None, 1.0]
    assert "not callable" in rows[0]["verifier_detail"] and rows[1]["verifier_detail"] == "no answer within 0.3 s" and rows[1]["stop_reason"] == "error"
    assert sampler.under_way.unfinished == engine.unfinished == 0 and quiet == 0
    assert table_of(rows, ROLLOUT).num_rows == 3
    groups = score_groups(rows, 3, Optimizer(), DataFilter())
    assert groups.metrics["groups_errored"] == 1 and not groups.kept()


def test_waiting_for_an_environment_is_no_sign_of_life(tokenizer: ChatTokenizer) -> None:
    sampler, _ = sampler_of(tokenizer, ["4", "5"], domain=Trying({TASK.task_id: 0.3}))
    sampler.under_way.add(sampler.episodes([Group("g", TASK, (1,))]))
    seen = []
    while sampler.under_way.unfinished:
        sampler.under_way.step()
        seen.append(sampler.under_way.went_on)
    assert seen[0] and seen[-1] and seen.count(False) >= 3


def test_given_up_episodes_say_nothing_more(tokenizer: ChatTokenizer) -> None:
    sampler, engine = sampler_of(tokenizer, ["4", "5"], domain=Trying({TASK.task_id: 0.2}))
    first, second = sampler.episodes([Group("g", TASK, (1, 2))])
    sampler.under_way.add([first, second])
    assert sampler.under_way.step() == []
    sampler.under_way.drop([first])
    over = []
    while sampler.under_way.unfinished:
        over += sampler.under_way.step()
    assert over == [second] and first.turns == 1 and "g/0/1" not in [r.request_id for r in engine.asked]


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template, expected", [
    (TEMPLATE, "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
    ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "][42]"),  # this template ends a response with no end token
])
def test_what_comes_between_two_responses(template: str, expected: str) -> None:
    class Bytes:
        """A tokenizer of characters, with one end token."""

        def encode(self, text: str, add_special_tokens: bool = False):  # type: ignore[no-untyped-def]
            return type("Encoding", (), {"ids": [ord(c) for c in text]})

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join("<|im_end|>" if i == 7 else chr(i) for i in ids)

    made = ChatTokenizer(Bytes(), template, {}, (7,))  # type: ignore[arg-type]
    assert made.decode(made.encode_continuation([{"role": "tool", "content": "42"}])) == expected
    with pytest.raises(TokenizerError, match="leaves out what the assistant said"):
        ChatTokenizer(Bytes(), "{{ messages[-1].content }}", {}, (7,)).encode_continuation([{"role": "tool", "content": "42"}])  # type: ignore[arg-type]


def test_turns_are_refused_where_a_domain_has_none() -> None:
    check_turns(get_domain("arithmetic"), 1)
    check_turns(Trying(), 5)  # type: ignore[arg-type]
    with pytest.raises(DomainError, match="tool_use.max_turns is 2, but the tasks of domain arithmetic are answered in one turn"):
        check_turns(get_domain("arithmetic"), 2)


@pytest.mark.slow
def test_the_real_engine_goes_on_from_its_own_tokens(tmp_path: Path) -> None:
    """Two turns of the real vLLM: its log-probabilities in both are those that the trainer gives for the very ids of the row."""
    folder = tmp_path / "policy"
    folder.mkdir()
    get_domain("arithmetic").write_policy_files(folder)  # type: ignore[attr-defined]
    write_random_weights(folder, seed=3)
    command = [sys.executable, "-m", "tests.rollout.episodes_process", str(folder), str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    policy = Policy.from_hf(folder, trainable=False, token_budget=512)
    samples = [Sample([*r["prompt_ids"], *r["response_ids"]], [0] * (len(r["prompt_ids"]) + len(r["response_ids"]))) for r in rows]
    assert any(r["turns"] == 2 and 0 in r["loss_mask"] for r in rows)
    for row, found in zip(rows, policy.logprobs(samples, temperature=0.7), strict=True):
        mask = np.array(row["loss_mask"], bool)
        assert np.abs(np.array(row["logprobs"])[mask] - found[len(row["prompt_ids"]):][mask]).max() < 1e-3
