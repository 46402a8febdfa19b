"""Lets megatron-core 0.16 train on CPU tensors over gloo. Inert where CUDA is available.

`install()` gives every `megatron.core` module, imported before or after, an overlay of the torch module in which the
"cuda" device means CPU. torch itself keeps its factories: wrapping `torch.tensor` for everybody silently corrupts the
rotary buffers of transformers' models.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import torch

PREFIX = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like",
    "empty_like", "rand", "randn",
)  # fmt: skip
_installed = False


def install() -> bool:
    """Install the overlay once per process; return whether it is active (False where CUDA is available)."""
    global _installed
    if _installed or torch.cuda.is_available():
        return _installed
    _installed = True
    overlay = _torch_overlay()
    _patch_tensor()
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIX) and module is not None:
            _patch_module(module, overlay)
    sys.meta_path.insert(0, _Finder(overlay))
    return True


def _overlay(base: types.ModuleType, replaced: dict[str, Any]) -> types.ModuleType:
    """A module that answers `replaced` and passes every other attribute on to `base`."""
    cls = type("Overlay", (types.ModuleType,), {"__getattr__": lambda self, name: getattr(base, name)})
    module = cls(base.__name__)
    module.__dict__.update(replaced)
    return module


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).split(":")[0] == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


class _Stream:
    """Stands for torch.cuda.Stream and torch.cuda.Event: everything on a CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, *args: Any) -> _Stream:
        return _Stream()

    def wait_stream(self, *args: Any) -> None: ...

    wait_event = synchronize = record = wait = wait_stream


def _torch_overlay() -> types.ModuleType:
    def nothing(*args: Any, **kwargs: Any) -> None: ...

    stream = _Stream()
    cuda = _overlay(
        torch.cuda,
        {
            "current_device": lambda: _CPU,  # megatron passes it straight on as device=
            "synchronize": nothing,
            "set_device": nothing,
            "device_count": lambda: 1,
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": lambda *a: stream,
            "default_stream": lambda *a: stream,
            "stream": lambda s: contextlib.nullcontext(),
            "get_rng_state": lambda *a, **k: torch.get_rng_state(),
            "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        },
    )
    return _overlay(torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}})


def _patch_tensor() -> None:
    """The two Tensor methods that megatron calls on its own tensors and that a CPU build cannot answer."""
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    plain_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        # megatron asserts that gradients are 'torch.cuda.FloatTensor'; other callers must see the truth
        if isinstance(answer, str) and sys._getframe(1).f_globals.get("__name__", "").startswith(PREFIX):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = tensor_type  # type: ignore[method-assign]


def _patch_module(module: types.ModuleType, overlay: types.ModuleType) -> None:
    if vars(module).get("torch") is torch:
        module.torch = overlay  # type: ignore[attr-defined]
    if module.__name__ == "megatron.core.tensor_parallel.random":
        _patch_rng_tracker(module)
    elif module.__name__ == "megatron.core.dist_checkpointing.mapping":
        module.ShardedTensor.init_data.__defaults__ = (overlay.empty,)  # bound torch.empty before the overlay
    elif module.__name__ == "megatron.core.transformer.moe.token_dispatcher":
        module.maybe_move_tensor_to_cpu = _to_host  # all_to_all wants its split sizes as numbers; it converts CUDA tensors only


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_rng_tracker(module: Any) -> None:
    module._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    default_name = module._MODEL_PARALLEL_RNG_TRACKER_NAME

    class CpuRNGStatesTracker(module.CudaRNGStatesTracker):
        """Named states of the CPU generator; the parent's fork() would warn that the CPU state changed."""

        @contextlib.contextmanager
        def fork(self, name: str = default_name) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    module.CudaRNGStatesTracker = CpuRNGStatesTracker


class _Finder:
    """Import hook that patches each megatron module right after it executes."""

    def __init__(self, overlay: types.ModuleType) -> None:
        self.overlay = overlay
        self.busy: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(PREFIX) or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _patch_module(module, self.overlay)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
