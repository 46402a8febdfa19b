"""Writes Megatron's torch_dist files from the training process itself.

Megatron's own writer starts a spawned manager and forked workers even for a synchronous save: 5 to 9 s the first time,
and a fork of a process with gloo threads. The files are the same; only who writes them differs.
"""

from __future__ import annotations

import queue
from typing import Any

from evo_hpc.training.mcore import AsyncRequest, TorchDistSaveShardedStrategy, filesystem_async


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist save strategy without helper processes."""

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
            results.put(_write_buckets(transforms, buckets))

        return request._replace(async_fn=write)


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
