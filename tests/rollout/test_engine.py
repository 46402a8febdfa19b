"""Sampling with the real engine: log-probabilities against transformers, seeds, stops, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_process import EngineProcess
from tiny_policy import MAX_MODEL_LEN, VOCABULARY, TinyPolicy

from evo_hpc.rollout.engine import Request, Sampling
from evo_hpc.rollout.errors import RequestError

pytestmark = pytest.mark.slow

PLAIN = Sampling(temperature=1.0, top_p=1.0, max_tokens=24, stop_token_ids=())


def _groups(prompts: int = 4, group_size: int = 6) -> list[Request]:
    texts = [tuple((3 * prompt + 5 * i) % VOCABULARY for i in range(4 + 3 * prompt)) for prompt in range(prompts)]
    return [
        Request(f"{prompt}/{sample}", text, 100 * prompt + sample)
        for prompt, text in enumerate(texts)
        for sample in range(group_size)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy], temperature: float
) -> None:
    requests = _groups()
    completions = engine.generate(requests, Sampling(temperature, 1.0, 24, ()))
    for request, completion in zip(requests, completions, strict=True):
        expected = policies[0].score([*request.prompt_ids, *completion.token_ids], temperature)
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, expected[len(request.prompt_ids) :], atol=1e-4)


def test_logprobs_under_top_p_are_renormalised_over_the_nucleus(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    requests = _groups(2, 4)
    for request, completion in zip(requests, engine.generate(requests, Sampling(1.0, 0.6, 16, ())), strict=True):
        rows = policies[0].logprobs([*request.prompt_ids, *completion.token_ids])[len(request.prompt_ids) :].exp()
        ordered, order = rows.sort(-1, descending=True)
        inside = ordered.cumsum(-1) - ordered < 0.6
        nucleus = torch.zeros_like(rows).scatter(1, order, torch.where(inside, ordered, 0.0))
        nucleus /= nucleus.sum(-1, keepdim=True)
        expected = nucleus.log().gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_score_is_that_of_transformers_up_to_the_longest_sequence(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    token_ids = [(7 * i * i + i) % VOCABULARY for i in range(MAX_MODEL_LEN)]
    for temperature in (1.0, 0.7, 1.0):  # the last: a temperature does not outlive its call
        found = engine.call("score", token_ids, temperature)
        np.testing.assert_allclose(found, policies[0].score(token_ids, temperature), atol=1e-4)
    assert found[0] == 0.0
    with pytest.raises(RequestError, match="scored sequence"):
        engine.call("score", [*token_ids, 1])


def test_a_seed_gives_the_same_tokens_whatever_the_batch(engine: EngineProcess) -> None:
    requests = _groups()
    together = engine.generate(requests, PLAIN)
    backwards = engine.generate(requests[::-1], PLAIN)[::-1]
    alone = [engine.generate([request], PLAIN)[0] for request in requests]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        np.testing.assert_array_equal(a.logprobs, c.logprobs)


def test_a_seed_gives_the_same_tokens_in_another_process_with_other_settings(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    requests = _groups()
    first = engine.generate(requests, PLAIN)
    other = EngineProcess(policies[0].folder, max_model_len=128, kv_cache_bytes=64 << 20, seed=7)
    second = other.generate(requests[::2], PLAIN)
    probe = list(range(2, 20))
    for policy in policies[::-1]:  # a reload is exact without a prefix cache as well
        other.call("reload", policy.folder, 1, probe_ids=probe, probe_logprobs=policy.score(probe), tolerance=1e-4)
    assert not other.call("effective_config")["prefix_caching"]
    third = other.generate(requests[::2], PLAIN)
    assert other.close() == 0
    for completions in (second, third):
        assert [c.token_ids for c in completions] == [c.token_ids for c in first[::2]]


def test_a_group_is_diverse(engine: EngineProcess) -> None:
    completions = engine.generate(_groups(1, 16), PLAIN)
    assert len({completion.token_ids for completion in completions}) == 16


def test_sampled_frequencies_are_the_probabilities(
    engine: EngineProcess, policies: tuple[TinyPolicy, TinyPolicy]
) -> None:
    prompt = (3, 9, 4)
    requests = [Request(str(seed), prompt, seed) for seed in range(4000)]
    completions = engine.generate(requests, Sampling(1.0, 1.0, 1, ()))
    counts = np.bincount([completion.token_ids[0] for completion in completions], minlength=VOCABULARY)
    expected = 4000 * policies[0].logprobs([*prompt, 0])[-1].exp().numpy()
    frequent = expected >= 5
    chi_square = float(((counts - expected)[frequent] ** 2 / expected[frequent]).sum())
    assert chi_square < 2.5 * frequent.sum() + 20  # far in the tail; consecutive seeds must not correlate


def test_a_response_ends_with_a_stop_token_or_at_its_budget(engine: EngineProcess) -> None:
    stops = (1, 8, 21)
    completions = engine.generate(_groups(), Sampling(1.0, 1.0, 24, stops))
    assert {completion.stop_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        *body, last = completion.token_ids
        assert not set(body) & set(stops)
        assert (completion.stop_reason == "stop") == (last in stops)
        assert completion.stop_reason == "stop" or len(completion.token_ids) == 24


def test_only_the_named_tokens_stop_a_response(engine: EngineProcess) -> None:
    completions = engine.generate(_groups(), PLAIN)
    assert {completion.stop_reason for completion in completions} == {"length"}
    assert any(1 in completion.token_ids[:-1] for completion in completions)  # 1 is the model's end of sequence


def test_a_response_never_exceeds_the_model_length(engine: EngineProcess) -> None:
    [completion] = engine.generate([Request("long", (3,) * (MAX_MODEL_LEN - 2), 0)], PLAIN)
    assert (len(completion.token_ids), completion.stop_reason) == (2, "length")


def test_completions_come_in_request_order_and_are_announced_as_they_finish(engine: EngineProcess) -> None:
    requests = _groups()
    completions = engine.generate(requests, Sampling(1.0, 1.0, 40, (1, 8, 21)))
    announced = engine.finished
    assert [completion.request_id for completion in completions] == [request.request_id for request in requests]
    lengths = [len(completion.token_ids) for completion in announced]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    seconds = [completion.seconds for completion in announced]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert {c.request_id for c in announced} == {c.request_id for c in completions}


def test_no_requests_give_no_completions(engine: EngineProcess) -> None:
    assert engine.generate([], PLAIN) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request("bad one", (3,) * MAX_MODEL_LEN, 0), f"bad one.*{MAX_MODEL_LEN} tokens"),
        (Request("bad one", (), 0), "bad one.*0 tokens"),
        (Request("bad one", (3, VOCABULARY), 0), f"bad one.*{VOCABULARY} is outside"),
        (Request("bad one", (3, -1), 0), "bad one.*-1 is outside"),
        (Request("bad one", (3,), -1), "bad one.*seed"),
        (Request("0/0", (3,), 0), "0/0.*twice"),
    ],
)
def test_a_bad_request_is_named_before_anything_is_sampled(engine: EngineProcess, bad: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate([*_groups(1, 2), bad], PLAIN)
    assert engine.finished == []


@pytest.mark.parametrize("sampling", [Sampling(0.0, 1.0, 8, ()), Sampling(1.0, 0.0, 8, ()), Sampling(1.0, 1.0, 0, ())])
def test_bad_sampling_is_refused(engine: EngineProcess, sampling: Sampling) -> None:
    with pytest.raises(RequestError, match="temperature > 0"):
        engine.generate(_groups(1, 2), sampling)


def test_an_interrupted_call_leaves_the_engine_as_it_was(engine: EngineProcess) -> None:
    requests = _groups()
    before = engine.generate(requests, PLAIN)
    with pytest.raises(KeyboardInterrupt):
        engine.call("generate_broken", requests, Sampling(1.0, 1.0, 40, (1, 8, 21)))
    after = engine.generate(requests, PLAIN)
    assert [completion.token_ids for completion in after] == [completion.token_ids for completion in before]


def test_requests_join_and_leave_while_others_are_sampled(engine: EngineProcess) -> None:
    requests = _groups()
    expected = {completion.request_id: completion for completion in engine.generate(requests, PLAIN)}
    first, second, dropped = requests[::3], requests[1::3], requests[2::3]
    done = []
    engine.call("add", [*first, *dropped], PLAIN)
    for step in range(60):
        done += engine.call("step")
        if step == 4:
            engine.call("add", second, PLAIN)
        if step == 9:
            engine.call("drop", [request.request_id for request in dropped])
            assert engine.call("unfinished") == len(first) + len(second)
            for name, arguments in (("generate", (dropped, PLAIN)), ("score", ([3, 4],))):
                with pytest.raises(RequestError, match=f"{name}: {len(first) + len(second)} requests are being sampled"):
                    engine.call(name, *arguments)
            with pytest.raises(RequestError, match="is being sampled; make"):
                engine.call("add", first[:1], PLAIN)
    assert engine.call("unfinished") == 0 and engine.call("step") == []
    assert {completion.request_id for completion in done} == {request.request_id for request in (*first, *second)}
    for completion in done:
        assert completion.token_ids == expected[completion.request_id].token_ids
        np.testing.assert_array_equal(completion.logprobs, expected[completion.request_id].logprobs)


def test_effective_configuration_is_read_back(engine: EngineProcess) -> None:
    config = engine.call("effective_config")
    stated = {"dtype": "float32", "logprobs_mode": "processed_logprobs", "chunked_prefill": False}
    assert stated.items() <= config.items() and config["prefix_caching"]
    assert config["kv_cache_bytes"] == 32 << 20 and config["threads"] == 1 and config["tensor_parallel"] == 1
    assert all(isinstance(value, str | int | float | bool | None) for value in config.values())
    identity = engine.call("identity")
    assert identity["engine"] == "vllm" and identity["dtype"] == "float32"
    assert all(isinstance(value, str) for value in identity.values())
