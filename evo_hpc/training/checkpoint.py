"""Checkpoints of model, optimizer, schedule and random states: Megatron's torch_dist, committed by one rename."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from evo_hpc.paths import CHECKPOINT_EXTRA, CHECKPOINT_PARTIAL_PREFIX, step_of
from evo_hpc.store.atomic import StoreError, fsync_folder
from evo_hpc.store.manifest import complete, quarantine, read_complete
from evo_hpc.training import parallel
from evo_hpc.training.checkpoint_state import describe, load_sharded_state, misfit, set_rng, sharded_rng, sharded_state
from evo_hpc.training.checkpoint_writer import InProcessSave, Writing
from evo_hpc.training.errors import CheckpointError, CheckpointMisfit
from evo_hpc.training.mcore import CheckpointingException, dist_checkpointing
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy

class PendingSave:
    """A checkpoint whose state is fixed and whose files are being written. It does not exist before `finalize` returns."""

    def __init__(self, folder: Path, partial: Path, writing: Writing, text: str, meta: dict[str, Any], began: float) -> None:
        self.folder = folder
        self._held = time.monotonic() - began
        self._partial, self._writing, self._text, self._meta = partial, writing, text, meta

    @property
    def done(self) -> bool:
        """Whether this rank's files are written, or have failed: `finalize` would not wait for it. Asks no other rank."""
        return self._writing.done

    @property
    def seconds(self) -> float:
        """What the save takes without training beside it, as far as it has come: planning, copying, writing, making it count."""
        return self._held + self._writing.seconds

    def finalize(self) -> Path:
        """Wait for the files of all ranks and make the checkpoint appear; returns its folder. Every rank must call, once.

        Raises CheckpointError, on every rank, when one of them could not write: what is there stays a partial folder.
        """
        self._writing.wait()
        began = time.monotonic()
        told = parallel.gather_objects((None if self._writing.error is None else repr(self._writing.error), self._writing.hashes))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(told) if error]
        if failed:
            raise CheckpointError(f"{self.folder}: was not written ({'; '.join(failed)}); is there room on the filesystem?") from self._writing.error
        with _quiet():
            self._writing.finish()
        if parallel.is_main():
            (self._partial / CHECKPOINT_EXTRA).write_text(self._text)
            complete(self._partial, self._meta, hashed={name: digest for _, hashes in told for name, digest in hashes.items()})
            fsync_folder(self._partial)
            os.rename(self._partial, self.folder)
            fsync_folder(self.folder.parent)
        parallel.barrier()
        self._held += time.monotonic() - began
        return self.folder


def save(folder: Path, policy: Policy, optimizer: Optimizer, extra: dict[str, Any], *, reference: Policy | None = None) -> None:
    """Write the checkpoint `folder`; when it returns, the whole folder is on disk, and before that it does not exist.

    `reference`: one whose weights change, and so are saved too. `extra` is the caller's own state, plain JSON. Every rank must call.
    A torn `folder` of that name is set aside. Raises CheckpointError when an intact one exists or the disk refuses, TypeError when
    `extra` is not JSON.
    """
    begin(folder, policy, optimizer, extra, background=False, reference=reference).finalize()


def save_async(folder: Path, policy: Policy, optimizer: Optimizer, extra: dict[str, Any], *, reference: Policy | None = None) -> PendingSave:
    """Fix the state of this moment and begin to write it as `save` does, in a thread; training may go on when this returns.

    The checkpoint appears when all ranks have called `finalize` on the result; one at a time. Raises as `save` does.
    """
    return begin(folder, policy, optimizer, extra, background=True, reference=reference)


def begin(
    folder: Path, policy: Policy, optimizer: Optimizer, extra: dict[str, Any], *, background: bool, reference: Policy | None = None
) -> PendingSave:
    """`save_async`, or with `background` false the part of `save` before the end: the files are written when this returns."""
    began = time.monotonic()
    folder = Path(folder)
    text = json.dumps(extra, indent=1)
    if parallel.is_main():
        _make_way(folder)
    partial = parallel.gather_objects(folder.with_name(f"{CHECKPOINT_PARTIAL_PREFIX}{folder.name}.{secrets.token_hex(4)}"))[0]
    if parallel.is_main():
        partial.mkdir(parents=True)
    parallel.barrier()
    state = sharded_state(policy, optimizer, reference)
    state["rng"] = sharded_rng()
    with _quiet():
        strategy = InProcessSave("torch_dist", 1, thread_count=1, copies=background)
        request = dist_checkpointing.save(state, str(partial), sharded_strategy=strategy, async_sharded_save=True)
    return PendingSave(folder, partial, Writing(request, background=background), text, describe(policy, optimizer), began)


def _make_way(folder: Path) -> None:
    if not folder.exists():
        return
    try:
        verify(folder)
    except CheckpointError:
        quarantine(folder)
        return
    raise CheckpointError(
        f"{folder} exists and is intact: a checkpoint is written once; load it, or save under another name"
    )


def load(folder: Path, policy: Policy, optimizer: Optimizer, *, reference: Policy | None = None) -> dict[str, Any]:
    """Restore what `save` wrote into `policy`, `optimizer` and, where it is given, `reference`, and return `extra`. Every rank must call.

    The layout may be another than the writer's, but for expert parallelism; then the random states,
    which cannot be split anew and which training does not draw from, stay as they are. Raises CheckpointError: before
    anything is touched when the folder is torn or altered (hashes are checked) or holds another model; when Megatron
    cannot read an intact one, `policy` must not be used.
    """
    folder = Path(folder)
    meta, own = verify(folder)["meta"], describe(policy, optimizer)
    if (why := misfit(meta, own)) is not None:
        raise CheckpointMisfit(f"{folder}: {why}")
    same_layout = meta.get("layout") == own["layout"]
    wanted = sharded_state(policy, optimizer, reference, meta)
    if same_layout:
        wanted["rng"] = sharded_rng()
    try:
        with _quiet():
            state = dist_checkpointing.load(wanted, str(folder))
        load_sharded_state(policy, optimizer, reference, state, meta)
    except (KeyError, RuntimeError, ValueError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(
            f"{folder}: intact, but Megatron cannot load it ({type(error).__name__}: {error}); "
            "was it written by another version of megatron-core?"
        ) from error
    if same_layout:
        set_rng(state["rng"])
    return json.loads((folder / CHECKPOINT_EXTRA).read_text())


def verify(folder: Path) -> dict[str, Any]:
    """The completion record of `folder`; raises CheckpointError, with the file, unless all sizes and hashes agree."""
    try:
        return read_complete(Path(folder), hashes=True)
    except StoreError as error:
        raise CheckpointError(str(error)) from error


def newest_complete(parent: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest intact `step-N` below `parent`, or None; and the newer ones that were passed over, each with why."""
    parent = Path(parent)
    found = [path for path in parent.iterdir() if step_of(path) is not None] if parent.is_dir() else []
    skipped: list[tuple[Path, str]] = []
    for path in sorted(found, key=lambda path: step_of(path) or 0, reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            skipped.append((path, str(error)))
        else:
            return path, skipped
    return None, skipped


def remove_partial(parent: Path) -> list[Path]:
    """Delete what interrupted saves left below `parent`; only its one writer may call, and not during a save."""
    leftovers = sorted(Path(parent).glob(f"{CHECKPOINT_PARTIAL_PREFIX}*"))
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron calls torch.distributed.checkpoint by deprecated names; no reader of the log could act on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
