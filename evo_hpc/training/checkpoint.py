"""Checkpoints of model, optimizer, schedule and random states: Megatron's torch_dist, committed by one rename."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from evo_hpc.paths import CHECKPOINT_EXTRA, CHECKPOINT_PARTIAL_PREFIX, step_of
from evo_hpc.store.atomic import StoreError, fsync_folder
from evo_hpc.store.manifest import complete, quarantine, read_complete
from evo_hpc.training import parallel
from evo_hpc.training.checkpoint_writer import InProcessSave
from evo_hpc.training.errors import CheckpointError
from evo_hpc.training.mcore import (
    CheckpointingException,
    ShardedObject,
    dist_checkpointing,
    parallel_state,
    tensor_parallel,
)
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy

_REFERENCE = "reference."
"""Before the names of the reference's weights, so that they are not those of the policy."""


def save(folder: Path, policy: Policy, optimizer: Optimizer, extra: dict[str, Any], *, reference: Policy | None = None) -> None:
    """Write the checkpoint `folder`; when it returns, the whole folder is on disk, and before that it does not exist.

    `reference`: one whose weights change, and so are saved too. `extra` is the caller's own state, plain JSON. Every rank must call. A torn `folder` of that name is set aside.
    Raises CheckpointError when an intact one exists, TypeError when `extra` is not JSON, OSError or StoreError when the
    disk refuses.
    """
    folder = Path(folder)
    text = json.dumps(extra, indent=1)
    if parallel.is_main():
        _make_way(folder)
    partial = parallel.gather_objects(folder.with_name(f"{CHECKPOINT_PARTIAL_PREFIX}{folder.name}.{secrets.token_hex(4)}"))[0]
    if parallel.is_main():
        partial.mkdir(parents=True)
    parallel.barrier()
    state = _state(policy, optimizer, reference, is_loading=False)
    state["rng"] = _sharded_rng()
    with _quiet():
        dist_checkpointing.save(state, str(partial), sharded_strategy=InProcessSave("torch_dist", 1, thread_count=1))
    parallel.barrier()
    if parallel.is_main():
        (partial / CHECKPOINT_EXTRA).write_text(text)
        complete(partial, {"updates": optimizer.updates, "model": _model(policy), "tensor_parallel_size": _tp_size()})
        fsync_folder(partial)
        os.rename(partial, folder)
        fsync_folder(folder.parent)
    parallel.barrier()


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

    Data- and tensor-parallel sizes may differ from the writer's; with another tensor-parallel size the random states,
    which cannot be split anew and which training does not draw from, stay as they are. Raises CheckpointError: before
    anything is touched when the folder is torn or altered (hashes are checked) or holds another model; when Megatron
    cannot read an intact one, `policy` must not be used.
    """
    folder = Path(folder)
    meta = verify(folder)["meta"]
    if meta.get("model") != _model(policy):
        raise CheckpointError(f"{folder}: holds another model ({meta.get('model')}) than this one ({_model(policy)})")
    same_layout = meta.get("tensor_parallel_size") == _tp_size()
    wanted = _state(policy, optimizer, reference, is_loading=True)
    if same_layout:
        wanted["rng"] = _sharded_rng()
    try:
        with _quiet():
            state = dist_checkpointing.load(wanted, str(folder))
        policy.module.load_state_dict(state["model"])
        if reference is not None:
            reference.module.load_state_dict({name.removeprefix(_REFERENCE): value for name, value in state["reference"].items()})
        optimizer.megatron.load_state_dict(state["optimizer"])
        optimizer.scheduler.num_steps = 0  # its load adds the saved count to its own
        optimizer.scheduler.load_state_dict(state["scheduler"])
    except (KeyError, RuntimeError, ValueError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(
            f"{folder}: intact, but Megatron cannot load it ({type(error).__name__}: {error}); "
            "was it written by another version of megatron-core?"
        ) from error
    if same_layout:
        _set_rng(state["rng"])
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


def _tp_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def _model(policy: Policy) -> dict[str, Any]:
    """The numbers that must agree between a checkpoint and the policy it is loaded into."""
    return {name: value for name, value in vars(policy.shape).items() if name != "raw"}


def _state(policy: Policy, optimizer: Optimizer, reference: Policy | None, *, is_loading: bool) -> dict[str, Any]:
    """Model, optimizer and schedule as Megatron's sharded tensors."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"chained_optim_avoid_prefix": True, "dp_cp_group": group}
    state: dict[str, Any] = {"model": policy.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.megatron.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    state["scheduler"] = optimizer.scheduler.state_dict()
    if reference is not None:  # after the optimizer's, which looks through all of `state` for its parameters
        state["reference"] = reference.module.sharded_state_dict(prefix=_REFERENCE, metadata=metadata)
    return state


def _sharded_rng() -> ShardedObject:
    """torch's generators and Megatron's named states; one copy a tensor-parallel rank."""
    states = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    rank, replica = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    return ShardedObject("rng", states, (_tp_size(),), (rank,), replica_id=replica)


def _set_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
