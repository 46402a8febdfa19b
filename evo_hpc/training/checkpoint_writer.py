"""Writes Megatron's torch_dist files from the training process itself, at once or in a thread beside it.

Megatron's own writer starts a spawned manager and forked workers even for a synchronous save: 5 to 9 s the first time,
and a fork of a process with gloo threads. The files are the same; only who writes them differs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evo_hpc.store.manifest import sha256
from evo_hpc.training.mcore import AsyncRequest, TorchDistSaveShardedStrategy, filesystem_async


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist save strategy without helper processes. `copies`: the tensors are copied before they are written."""

    def __init__(self, *args: Any, copies: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies = copies

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Plan the save with an ordinary results queue, where Megatron would start a manager process for one."""
        outer = filesystem_async._results_queue
        filesystem_async._results_queue = queue.Queue()
        try:
            return super().async_save(sharded_state_dict, checkpoint_dir)
        finally:
            filesystem_async._results_queue = outer

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []

        def write(rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
            outcome = _write_buckets(transforms, buckets)
            results.put(outcome)
            if isinstance(outcome, Exception):
                raise outcome

        staged = request.preload_fn
        return request._replace(async_fn=write, preload_fn=(lambda: _copied(staged(), writer.write_buckets)) if self.copies else staged)


def _copied(staged: list[Any], live: list[Any]) -> list[Any]:
    """`staged` with copies of the tensors that are the live ones themselves: on a CPU, moving a tensor there copies nothing."""
    return [
        (path, key, (data, [(item, t.clone() if t is own else t) for (item, t), (_, own) in zip(tensors, of_live, strict=True)]))
        for (path, key, (data, tensors)), (_, _, (_, of_live)) in zip(staged, live, strict=True)
    ]


def _write_buckets(transforms: list[Any], buckets: list[Any]) -> dict[int, list[Any]] | Exception:
    """Write and fsync each bucket's file; answer as Megatron's workers do: results by bucket, or an exception."""
    written: dict[int, list[Any]] = {}
    for index, bucket in enumerate(buckets):
        results: queue.Queue[tuple[int, Any]] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, results, pending, use_fsync=True
        )
        _, outcome = results.get_nowait()
        if isinstance(outcome, Exception):
            return outcome
        written[index] = outcome
    return written


class Writing:
    """This rank's files of one save: written, synced and hashed, in a thread or before the constructor returns.

    `hashes`: sha256 by file name, once `done`. `error`: why not all are there. `seconds`: spent in the thread.
    """

    def __init__(self, request: AsyncRequest, *, background: bool) -> None:
        self._finish: list[Callable[[], None]] = request.finalize_fns
        self.hashes: dict[str, str] = {}
        self.error: Exception | None = None
        self.seconds, self._background = 0.0, background
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:  # what follows may change the weights
            arguments[1] = request.preload_fn()
        self._thread = threading.Thread(target=self._run, args=(request.async_fn, arguments), name="checkpoint", daemon=True) if background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run(request.async_fn, arguments)

    def _run(self, write: Callable[..., None] | None, arguments: list[Any]) -> None:
        began = time.monotonic()
        try:
            if write is not None:
                write(*arguments)
                self.hashes = {Path(path).name: sha256(Path(path)) for path, *_ in arguments[1]}
        except Exception as error:  # the boundary of the thread: `finish` tells all ranks
            self.error = error
        finally:
            arguments.clear()  # the copy of the state
            self.seconds = time.monotonic() - began if self._background else 0.0  # else whoever waited has counted them

    @property
    def done(self) -> bool:
        """Whether this rank's files are written, or have failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until `done`."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Megatron's own end of a save, after every rank's files are there. Every rank must call."""
        for each in self._finish:
            each()
