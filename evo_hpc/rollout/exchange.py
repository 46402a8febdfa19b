"""How trainer and rollout workers speak: requests, claims, rollout files, published policies; all by file, at known names."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.paths import COMPLETE, ExchangePaths
from evo_hpc.store.atomic import AlreadyWritten, read_json, write_json, write_json_once
from evo_hpc.store.manifest import read_complete

POLL_SECONDS = 0.003
"""Between looks at a known name in shared memory: a look costs microseconds, a step seconds."""


class GroupRequest(Config):
    """One group that the trainer wants."""

    group_id: str
    task_id: str
    seeds: list[int]


class StepRequest(Config):
    """What the trainer wants for one step; batches are claimed and answered one by one."""

    step: int
    weight_version: int
    """Sample with exactly these weights."""
    batches: list[list[GroupRequest]] = Field(min_length=1)


class Probe(Config):
    """A token sequence and the trainer's log-probabilities of it (temperature 1), by which a reload is verified."""

    token_ids: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, token_ids: list[int], logprobs: np.ndarray) -> Probe:
        return cls(token_ids=token_ids, logprobs=[float(v) for v in logprobs])

    def array(self) -> np.ndarray:
        return np.asarray(self.logprobs, dtype=np.float32)


def policy_meta(weight_version: int, probe: Probe) -> dict[str, Any]:
    """The writer's part of a published policy's completion record."""
    return {"weight_version": weight_version, "probe": probe.model_dump()}


def read_probe(folder: Path) -> Probe | None:
    """The probe of a published policy folder, if its record has one. Raises Torn on an incomplete folder."""
    meta = read_complete(folder)["meta"]
    return Probe.model_validate(meta["probe"]) if "probe" in meta else None


def wait_for(ready: Callable[[], bool], alive: Callable[[], None]) -> None:
    """Poll until `ready`; `alive` is called now and then and raises to end the wait."""
    looks = 0
    while not ready():
        looks += 1
        if looks % 64 == 0:
            alive()
        time.sleep(POLL_SECONDS if looks < 4000 else 10 * POLL_SECONDS)


def post_request(exchange: ExchangePaths, request: StepRequest) -> None:
    """Trainer: ask for a step's groups."""
    write_json(exchange.request(request.step), request.model_dump(), durable=False)


def read_request(exchange: ExchangePaths, step: int) -> StepRequest:
    """Worker: a step's request, which must be there."""
    return StepRequest.model_validate(read_json(exchange.request(step)))


def claim_batch(exchange: ExchangePaths, step: int, batch: int, worker: str) -> bool:
    """Worker: take a batch; False when anybody has it, this worker included."""
    who = {"worker": worker, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        # The nonce makes every claim unlike any other: a write-once record with the very same bytes counts as one's own.
        write_json_once(exchange.claim(step, batch), {**who, "step": step, "batch": batch, "nonce": secrets.token_hex(8)})
    except AlreadyWritten:
        return False
    return True


def published(exchange: ExchangePaths, weight_version: int) -> bool:
    """Whether a policy is there as a whole."""
    return (exchange.policy(weight_version) / COMPLETE).exists()
