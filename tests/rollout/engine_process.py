"""An engine in a process of its own, called by name: vLLM would take over the settings of the test process."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from evo_hpc.rollout.engine import Completion, Engine, Request, Sampling
from evo_hpc.rollout.errors import RolloutError


def _serve(pipe: Connection, model: Path, settings: dict[str, Any]) -> None:
    engine = Engine(model, **settings)
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        name, args, kwargs = call
        finished: list[Completion] = []
        if name == "generate":
            kwargs["on_finish"] = finished.append
        if name == "generate_broken":
            name, kwargs["on_finish"] = "generate", _raise_at_once
        try:
            found = getattr(engine, name)
            result = found(*args, **kwargs) if callable(found) else found
        except (RolloutError, KeyboardInterrupt) as error:
            result = error
        pipe.send((result, finished))
    engine.close()
    pipe.send(None)


def _raise_at_once(completion: Completion) -> None:
    raise KeyboardInterrupt(completion.request_id)


class EngineProcess:
    """Forwards calls to an `Engine` in a spawned process; its errors are raised here."""

    def __init__(self, model: Path, **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, model, settings), daemon=True)
        self._process.start()
        child.close()
        self._pipe.recv()
        self.finished: list[Completion] = []

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What `Engine.<name>` returns; `finished` then holds what `on_finish` saw."""
        self._pipe.send((name, args, kwargs))
        result, self.finished = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """`Engine.generate`."""
        return self.call("generate", requests, sampling)

    def close(self) -> int | None:
        """Close the engine and return the exit code of its process."""
        self._pipe.send(None)
        self._pipe.recv()
        self._process.join(30)
        return self._process.exitcode
