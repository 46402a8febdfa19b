"""The rollout engine: vLLM in this process, spoken to in token ids, with weights that can be replaced in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evo_hpc.rollout.errors import EngineClosed, EngineUnavailable, RequestError, RolloutError, WeightMismatch
from evo_hpc.rollout.model_folder import longest_score, require_same_tensors, tensor_shapes
from evo_hpc.rollout.records import Completion, Request, Sampling
from evo_hpc.rollout.vllm_setup import (
    LOGPROBS_MODE,
    engine_arguments,
    import_vllm,
    quick_and_quiet,
    register_architecture,
    require_vllm,
)

__all__ = ["Completion", "Engine", "Request", "Sampling"]


class Engine:
    """One vLLM engine; one a process, and the process should do little else: vLLM takes over torch's settings.

    `model`: folder in HF layout. `max_model_len`: tokens of prompt and response together. `kv_cache_bytes`: memory
    of the KV cache. `threads`: CPU threads. `tensor_parallel`: GPUs that the model is divided over. Raises `EngineUnavailable`, `ModelFolderError`.
    """

    def __init__(
        self,
        model: Path,
        *,
        weight_version: int = 0,
        max_model_len: int,
        kv_cache_bytes: int = 128 << 20,
        dtype: str = "float32",
        threads: int = 1,
        seed: int = 0,
        tensor_parallel: int = 1,
    ) -> None:
        require_vllm()
        self._shapes = tensor_shapes(model)
        self._longest_score = longest_score(model, max_model_len)
        import_vllm(threads)
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.weight_version = weight_version
        self._max_model_len = max_model_len
        self._unusable = ""
        self._running: dict[str, float] = {}
        """When each unfinished request was taken in."""
        arguments = engine_arguments(
            model,
            cuda=torch.cuda.is_available(),
            max_model_len=self._longest_score + 1,
            kv_cache_bytes=kv_cache_bytes,
            dtype=dtype,
            seed=seed,
            tensor_parallel=tensor_parallel,
        )
        try:
            with quick_and_quiet():
                register_architecture(model)
                self._vllm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, RuntimeError, OSError) as error:
            raise EngineUnavailable(
                f"vLLM does not start on {model} (dtype {dtype}, max_model_len {max_model_len}): {error}"
            ) from error
        self._vocab_size = int(self._vllm.model_config.get_vocab_size())

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_finish: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Sample every request; returns completions in the order of `requests`.

        `on_finish` sees each completion as soon as its last token is sampled. If it raises, or on a signal, the
        remaining requests are dropped and the engine stays usable. Raises `RequestError` before anything is sampled.
        """
        self._require_idle("generate")
        done: dict[str, Completion] = {}
        try:
            self.add(requests, sampling)
            while self._running:
                for completion in self.step():
                    done[completion.request_id] = completion
                    if on_finish is not None:
                        on_finish(completion)
        finally:
            self.drop(list(self._running))
        return [done[request.request_id] for request in requests]

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Take requests in beside those that are being sampled; `step` samples them (continuous batching).

        Raises `RequestError`, on a name that is being sampled already too, before anything is taken in.
        """
        self._require_usable()
        budgets = self._check(requests, sampling)
        now = time.perf_counter()
        for request, max_tokens in zip(requests, budgets, strict=True):
            self._running[request.request_id] = now
            self._submit(request, _sampling_params(sampling, request.seed, max_tokens))

    def step(self) -> list[Completion]:
        """Sample one more token of every request that has room; returns those that are finished with it."""
        self._require_usable()
        now, found = time.perf_counter, []
        for output in self._vllm.step():
            seconds = now() - self._running.pop(output.request_id)
            found.append(_completion(output, self.weight_version, seconds))
        return found

    @property
    def unfinished(self) -> int:
        """Requests that were taken in and are neither finished nor dropped."""
        return len(self._running)

    def drop(self, request_ids: Sequence[str]) -> None:
        """Give up requests that are being sampled; their tokens are lost."""
        if left := [name for name in request_ids if name in self._running]:
            for name in left:
                del self._running[name]
            self._vllm.abort_request(left)

    def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> npt.NDArray[np.float32]:
        """Log-probabilities `[len(token_ids)]` of a given sequence, each token given those before; position 0 is 0."""
        self._require_usable()
        self._require_idle("score")
        return self._score(token_ids, temperature)

    def reload(
        self,
        folder: Path,
        weight_version: int,
        *,
        probe_ids: Sequence[int],
        probe_logprobs: npt.NDArray[np.floating[Any]],
        tolerance: float = 1e-3,
        by_mean: bool = False,
    ) -> float:
        """Replace the weights in place by those of `folder`; returns max |engine - trainer| over the probe.

        `probe_logprobs` `[len(probe_ids)]` are the trainer's, at temperature 1, position 0 ignored. Raises
        `ModelFolderError` or `RequestError` before anything is touched: the engine goes on with the old weights.
        Raises `WeightMismatch` after loading: the engine then refuses to sample until a reload succeeds.
        """
        self._require_open()
        self._require_idle("reload")
        expected = np.asarray(probe_logprobs, dtype=np.float64)
        if len(probe_ids) < 2 or expected.shape != (len(probe_ids),):
            raise RequestError(
                f"the probe of weights {weight_version} has {len(probe_ids)} tokens and log-probabilities of shape "
                f"{list(expected.shape)}; give at least 2 tokens and one log-probability each"
            )
        self._check_sequence("the probe", probe_ids, self._longest_score)
        require_same_tensors(folder, tensor_shapes(folder), self._shapes)
        self._unusable = f"loading weights {weight_version} from {folder} failed half-way; reload again"
        self._vllm.collective_rpc("load_policy", args=(str(folder),))
        # Keys and values of old weights under new ones: an error of nats, and silent.
        if not self._vllm.reset_prefix_cache():
            raise RolloutError(f"the prefix cache could not be reset after loading {folder}; restart the engine")
        found = self._score(probe_ids, 1.0)
        difference = float(np.max(np.abs(found[1:] - expected[1:])))
        judged = float(np.mean(np.abs(found[1:] - expected[1:]))) if by_mean else difference
        if not judged <= tolerance:
            self._unusable = f"weights {weight_version} from {folder} are not the trainer's; reload good ones"
            raise WeightMismatch(
                f"weights {weight_version} loaded from {folder}: log-probabilities of the probe differ from the "
                f"trainer's by {judged:.3g}{' on average' if by_mean else ''} (tolerance {tolerance:.3g}); check that the folder was exported from "
                "the policy that was scored"
            )
        self._unusable = ""
        self.weight_version = weight_version
        return difference

    def identity(self) -> dict[str, str]:
        """What of the engine determines a score; part of the evaluator epoch. Hardware is not in it."""
        import vllm

        return {
            "engine": "vllm",
            "engine_version": str(vllm.__version__),
            "dtype": str(self._vllm.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": LOGPROBS_MODE,
            "max_model_len": str(self._max_model_len),
        }

    def effective_config(self) -> dict[str, str | int | float | bool | None]:
        """The configuration in force, read back from vLLM's own objects."""
        import torch

        config = self._vllm.vllm_config
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        return {
            "model": str(model.model),
            "weight_version": self.weight_version,
            "device": str(config.device_config.device_type),
            "dtype": str(model.dtype).removeprefix("torch."),
            "seed": model.seed,
            "vocab_size": self._vocab_size,
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
            "enforce_eager": model.enforce_eager,
            "skip_tokenizer_init": model.skip_tokenizer_init,
            "kv_cache_bytes": cache.kv_cache_memory_bytes,
            "kv_block_size": cache.block_size,
            "kv_blocks": cache.num_gpu_blocks,
            "prefix_caching": cache.enable_prefix_caching,
            "chunked_prefill": scheduler.enable_chunked_prefill,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "async_scheduling": scheduler.async_scheduling,
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        """Release the engine; a second call does nothing."""
        if self._unusable != "closed":
            self._unusable = "closed"
            self._vllm.engine_core.shutdown()

    def _submit(self, request: Request, params: Any) -> None:
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        self._vllm.add_request(request.request_id, prompt, params)

    def _score(self, token_ids: Sequence[int], temperature: float) -> npt.NDArray[np.float32]:
        from vllm import SamplingParams

        if not 0 < temperature < float("inf"):
            raise RequestError(f"temperature {temperature} of a score: give a positive number")
        self._check_sequence("the scored sequence", token_ids, self._longest_score)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        self._vllm.collective_rpc("set_score_temperature", args=(temperature,))
        try:
            self._submit(Request("score", tuple(token_ids), 0), params)
            outputs = []
            while self._vllm.has_unfinished_requests():
                outputs += self._vllm.step()
        finally:
            self._vllm.collective_rpc("set_score_temperature", args=(1.0,))
        scores = np.zeros(len(token_ids), dtype=np.float32)
        for position, row in enumerate(outputs[-1].prompt_logprobs):
            if row is not None:
                scores[position] = row[token_ids[position]].logprob
        return scores

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        if not (0 < sampling.temperature < float("inf") and 0 < sampling.top_p <= 1 and sampling.max_tokens >= 1):
            raise RequestError(f"{sampling}: temperature > 0, 0 < top_p <= 1 and max_tokens >= 1 are needed")
        seen: set[str] = set()
        for request in requests:
            if request.request_id in seen or request.request_id in self._running:
                raise RequestError(f"request {request.request_id!r} comes twice in one call, or is being sampled; make the ids unique")
            seen.add(request.request_id)
            if not 0 <= request.seed < 2**63:
                raise RequestError(f"request {request.request_id!r}: seed {request.seed} is outside [0, 2**63)")
            self._check_sequence(f"request {request.request_id!r}", request.prompt_ids, self._max_model_len - 1)
        return [
            min(sampling.max_tokens, self._max_model_len - len(request.prompt_ids), request.max_tokens or sampling.max_tokens)
            for request in requests
        ]

    def _check_sequence(self, what: str, token_ids: Sequence[int], longest: int) -> None:
        if not 1 <= len(token_ids) <= longest:
            raise RequestError(
                f"{what}: {len(token_ids)} tokens, but 1 to {longest} fit (max_model_len={self._max_model_len}); "
                "shorten it, or start the engine with a larger max_model_len"
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise RequestError(
                f"{what}: token id {low if low < 0 else high} is outside the model's vocabulary of {self._vocab_size}; "
                "check that tokenizer and model belong together"
            )

    def _require_open(self) -> None:
        if self._unusable == "closed":
            raise EngineClosed("the engine is closed; start a new one")

    def _require_idle(self, what: str) -> None:
        if self._running:
            raise RequestError(f"{what}: {len(self._running)} requests are being sampled; finish or drop them first")

    def _require_usable(self) -> None:
        self._require_open()
        if self._unusable:
            raise EngineClosed(f"the engine does not sample: {self._unusable}")


def _sampling_params(sampling: Sampling, seed: int, max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: Any, weight_version: int, seconds: float) -> Completion:
    sample = output.outputs[0]
    return Completion(
        request_id=output.request_id,
        token_ids=tuple(sample.token_ids),
        logprobs=np.asarray(sample.logprobs.logprobs, dtype=np.float32),
        stop_reason=sample.finish_reason,
        weight_version=weight_version,
        seconds=seconds,
    )
