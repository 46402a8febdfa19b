"""How trainer and rollout workers speak: batches asked for, claims, rollout files, published policies; all by file, at known names."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.paths import COMPLETE, ExchangePaths
from evo_hpc.rollout.doorbell import SILENT, Doorbell
from evo_hpc.store.atomic import AlreadyWritten, StoreError, read_json, write_bytes, write_json, write_json_once
from evo_hpc.store.manifest import read_complete

POLL_SECONDS = 0.003
"""Between looks at a known name in shared memory: a look costs microseconds, a step seconds."""
_BELL_SECONDS = 0.2
"""Between looks at whether to stop, while the doorbell is listened to."""
_LIST_SECONDS = 1.0
"""Between listings of the folder of requests, by which a worker finds batches after a gap in their numbers."""
_LIST_ANYWAY_SECONDS = 30.0
"""The same while the doorbell is listened to, which tells of them all."""


class GroupRequest(Config):
    """One group that the trainer wants."""

    group_id: str
    task_id: str
    seeds: list[int]


class BatchRequest(Config):
    """Some groups of one step: what one worker claims, samples and answers as a whole."""

    number: int
    """From 1, in the order of asking."""
    step: int
    """Whose groups they are."""
    weight_version: int
    """Sample with these weights."""
    newest: bool = False
    """Rather with the newest that are published when the batch is begun, if those are newer."""
    groups: list[GroupRequest] = Field(min_length=1)


class Probe(Config):
    """A token sequence and the trainer's log-probabilities of it (temperature 1), by which a reload is verified."""

    token_ids: list[int]
    logprobs: list[float]
    tolerance: float = 1e-3
    """How far the engine's may be from them, in nats, by the precision that the trainer computes in: on the worst token,"""
    by_mean: bool = False
    """or by the mean over all."""

    @classmethod
    def of(cls, token_ids: list[int], logprobs: np.ndarray, tolerance: float = 1e-3, by_mean: bool = False) -> Probe:
        return cls(token_ids=token_ids, logprobs=[float(v) for v in logprobs], tolerance=tolerance, by_mean=by_mean)

    def array(self) -> np.ndarray:
        return np.asarray(self.logprobs, dtype=np.float32)


def policy_meta(weight_version: int, probe: Probe) -> dict[str, Any]:
    """The writer's part of a published policy's completion record."""
    return {"weight_version": weight_version, "probe": probe.model_dump()}


def read_probe(folder: Path) -> Probe | None:
    """The probe of a published policy folder, if its record has one. Raises Torn on an incomplete folder."""
    meta = read_complete(folder)["meta"]
    return Probe.model_validate(meta["probe"]) if "probe" in meta else None


def wait_for(ready: Callable[[], bool], alive: Callable[[], None], bell: Doorbell = SILENT) -> None:
    """Return when `ready`; `alive` is called now and then and raises to end the wait.

    Looks again when the doorbell rings; where there is none, or it has broken, every few milliseconds.
    """
    looks = 0
    while True:
        heard = bell.count
        if ready():
            return
        looks += 1
        if bell.listening:
            alive()
            bell.wait(heard, _BELL_SECONDS)
        else:
            if looks % 64 == 0:
                alive()
            time.sleep(POLL_SECONDS if looks < 4000 else 10 * POLL_SECONDS)


def wait_any(paths: Sequence[Path], alive: Callable[[], None], bell: Doorbell = SILENT) -> list[Path]:
    """Those of `paths` that are there, once one is. A name that the doorbell has not told of is not looked up: network filesystems
    remember for half a minute that a name was not there."""
    found: list[Path] = []

    def look() -> bool:
        found[:] = [path for path in paths if there(path, bell)]
        return bool(found)

    wait_for(look, alive, bell)
    return found


def there(path: Path, bell: Doorbell = SILENT) -> bool:
    """Whether a name is ready, as far as can be known without looking it up too early."""
    return bell.may_look(path) and path.exists()


def post_request(exchange: ExchangePaths, request: BatchRequest, bell: Doorbell = SILENT) -> None:
    """Trainer: ask for a batch."""
    write_json(exchange.request(request.number), request.model_dump(), durable=False)
    bell.ring(exchange.request(request.number))


def read_request(exchange: ExchangePaths, batch: int) -> BatchRequest | None:
    """Worker: what is asked for; None when that is over already."""
    path = exchange.request(batch)
    try:
        return BatchRequest.model_validate(read_json(path))
    except StoreError:
        if path.exists():
            raise
        return None


def claim_batch(exchange: ExchangePaths, batch: int, worker: str) -> bool:
    """Worker: take a batch; False when anybody has it, this worker included."""
    who = {"worker": worker, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        # The nonce makes every claim unlike any other: a write-once record with the very same bytes counts as one's own.
        write_json_once(exchange.claim(batch), {**who, "batch": batch, "nonce": secrets.token_hex(8)})
    except AlreadyWritten:
        return False
    except StoreError:
        if exchange.request(batch).exists():
            raise
        return False  # another's claim was just removed with all else of the batch
    return True


def unanswered(exchange: ExchangePaths, worker: str) -> list[int]:
    """Worker: the batches that an earlier process of its name claimed and did not answer; it alone may redo them."""
    return [number for number in exchange.requests() if _claimant(exchange, number) == worker and not exchange.rollouts(number).exists()]


def _claimant(exchange: ExchangePaths, batch: int) -> str | None:
    try:
        return str(read_json(exchange.claim(batch))["worker"])
    except StoreError:
        if exchange.claim(batch).exists():
            raise
        return None  # nobody's, or over


def cancel(exchange: ExchangePaths, batch: int, bell: Doorbell = SILENT) -> None:
    """Trainer: nobody wants a batch any more. Its other files are removed later: a worker may still look at them."""
    write_bytes(exchange.cancelled(batch), b"", durable=False)
    bell.ring(exchange.cancelled(batch))


def unwanted(exchange: ExchangePaths, batch: int, bell: Doorbell = SILENT) -> bool:
    """Worker: whether a batch was cancelled, or is over."""
    return there(exchange.cancelled(batch), bell) or not exchange.request(batch).exists()


def retire(exchange: ExchangePaths, batch: int, bell: Doorbell = SILENT) -> None:
    """Trainer: remove all files of a batch. The request goes first: whoever claims the batch after its claim has gone finds none."""
    for path in (exchange.request(batch), exchange.rollouts(batch), exchange.cancelled(batch), exchange.claim(batch)):
        path.unlink(missing_ok=True)
        bell.forget(path)


class Requests:
    """Worker: the batches that are asked for, each seen once, in the order of their numbers; those that are over are skipped."""

    def __init__(self, exchange: ExchangePaths, bell: Doorbell = SILENT) -> None:
        self._exchange, self._bell = exchange, bell
        self._cursor = 1
        self._listed = float("-inf")

    def next(self) -> int | None:
        """Number of the next batch, or None while there is none; the same again until `passed`."""
        listening = self._bell.listening
        if listening:
            heard = [n for path in self._bell.names(self._exchange.request(0).parent) if (n := int(path.stem.split("-")[1])) >= self._cursor]
            if heard:
                return min(heard)
        elif self._exchange.request(self._cursor).exists():
            return self._cursor
        if time.monotonic() - self._listed < (_LIST_ANYWAY_SECONDS if listening else _LIST_SECONDS):
            return None
        self._listed = time.monotonic()  # others may have answered what comes next while this worker was busy, and its name be gone
        found = min((n for n in self._exchange.requests() if n >= self._cursor), default=None)
        self._cursor = self._cursor if found is None else found  # so that the next call finds it, too
        return found

    def passed(self, batch: int) -> None:
        """Do not show a batch again."""
        self._cursor = batch + 1


def published(exchange: ExchangePaths, weight_version: int, bell: Doorbell = SILENT) -> bool:
    """Whether a policy is there as a whole."""
    return bell.may_look(exchange.policy(weight_version)) and (exchange.policy(weight_version) / COMPLETE).exists()


def newest_published(exchange: ExchangePaths, bell: Doorbell = SILENT) -> int | None:
    """The newest policy that is there as a whole."""
    known = [int(path.name) for path in bell.names(exchange.policy(0).parent) if path.name.isdecimal()] if bell.listening else exchange.policies()
    return next((version for version in sorted(known, reverse=True) if (exchange.policy(version) / COMPLETE).exists()), None)
