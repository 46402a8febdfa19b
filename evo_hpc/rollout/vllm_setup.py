"""How vLLM is imported and configured here: environment, import, engine arguments. Nothing here runs at import."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evo_hpc.rollout.errors import EngineUnavailable

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities after temperature and top-p: those of the distribution that was sampled from."""
MAX_SEQUENCES_CPU = 256
"""Sequences decoded together on CPU; on a GPU vLLM's own default applies."""
KV_BLOCK_CPU = 128
"""Tokens of a KV block on CPU (vLLM's choice); only full blocks are shared between requests."""
MIN_BATCHED_TOKENS = 8192
"""Prefill tokens of one engine step, at least; chunked prefill is off, so the longest prompt must fit as well."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the caller already is a process of its own
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Slurm binds; vLLM's own guess takes cores of other jobs
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # models are folders; a typo must not become a download
}
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def require_vllm() -> None:
    """Raise `EngineUnavailable` if vLLM is not installed, or was imported by someone else first. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnavailable(
            "vLLM is not installed in this Python: run `make setup` (CPU), or install the `gpu` extra on a GPU node"
        )
    if "vllm" in sys.modules and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise EngineUnavailable(
            "vLLM was imported before the rollout engine could set its environment; let `Engine` import it"
        )


def import_vllm(threads: int) -> None:
    """Import torch and vLLM under our settings; 6-7 s when nothing is loaded yet."""
    os.environ.update(_ENVIRONMENT)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with quick_and_quiet():
        import torch

        if not torch.cuda.is_available():
            torch.set_num_threads(threads)  # before vLLM replaces this function by a no-op
            # Eager mode compiles one helper only, for 1 s at the first request, 14 s with a cold cache.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        import vllm.engine.arg_utils
        import vllm.v1.engine.llm_engine  # noqa: F401


@contextmanager
def quick_and_quiet() -> Iterator[None]:
    """Import and build without garbage collection and without warnings that no user can act on.

    What an import creates lives for ever: collections during it find nothing, and each one later (vLLM asks for
    several) walks it all again, unless it is frozen. Together about 3 s of CPU time at each start.
    """
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def register_architecture(model: Path) -> None:
    """Look at the model's class in this process; vLLM would start another Python for it, 13 s the first time.

    It does so because its engines usually fork and must not have touched a GPU before; ours does not fork. An
    architecture that vLLM does not know is left for vLLM to refuse.
    """
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures") or []:
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def engine_arguments(
    model: Path, *, cuda: bool, max_model_len: int, kv_cache_bytes: int, dtype: str, seed: int, tensor_parallel: int = 1
) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`. CPU and GPU differ only in compilation and in sequences per step.

    Raises `EngineUnavailable` where there is no GPU and the model is to be divided.
    """
    if tensor_parallel > 1 and not cuda:
        raise EngineUnavailable(f"engine.tensor_parallel is {tensor_parallel}, and there is no GPU here: only CUDA engines can be divided; set it to 1")
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the folder's: sampling is stated by the caller, in full
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, max_model_len),
        "enable_chunked_prefill": False,  # on CPU, chunks and per-request seeds together kill vLLM 0.32
        # Where no prompt fills a block, hashing blocks finds nothing and costs a tenth of the throughput.
        "enable_prefix_caching": cuda or max_model_len > KV_BLOCK_CPU + 1,
        "logprobs_mode": LOGPROBS_MODE,
        "enforce_eager": not cuda,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "evo_hpc.rollout.weight_transfer.PolicyWorker",
        "tensor_parallel_size": tensor_parallel,
    }
    if cuda:
        # The cache has the size that was asked for; vLLM would all the same refuse to start unless nine tenths of the device were free.
        arguments["gpu_memory_utilization"] = 0.05
    else:
        arguments["max_num_seqs"] = MAX_SEQUENCES_CPU
    return arguments
