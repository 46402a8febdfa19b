"""The plain records that cross the engine's boundary: sampling settings, requests, completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Sampling:
    """How every request of one call is sampled."""

    temperature: float
    """> 0; the log-probabilities are reported under this temperature (and `top_p`)."""
    top_p: float
    """Nucleus mass in (0, 1]."""
    max_tokens: int
    """Token budget of one response; less where `max_model_len` leaves less."""
    stop_token_ids: tuple[int, ...]
    """A response ends with, and includes, the first of these. Nothing else stops it: no end of sequence is implied."""


@dataclass(frozen=True)
class Request:
    """One rollout of one prompt; a group is G requests that differ in `request_id` and `seed`."""

    request_id: str
    """Unique within a call."""
    prompt_ids: tuple[int, ...]
    """At least one token id."""
    seed: int
    """Determines the sampled tokens, whatever else is in the batch. In [0, 2**63)."""
    max_tokens: int | None = None
    """Token budget of this response, where it is less than what `Sampling` says."""


@dataclass(frozen=True)
class Completion:
    """What one request gave."""

    request_id: str
    """As in the request."""
    token_ids: tuple[int, ...]
    """Sampled ids, the stop token included."""
    logprobs: npt.NDArray[np.float32]
    """`[len(token_ids)]`, natural log, of the distribution that was sampled from."""
    stop_reason: Literal["stop", "length"]
    """`stop`: a stop token; `length`: the token budget or `max_model_len`."""
    weight_version: int
    """Version of the weights that sampled every token of it."""
    seconds: float
    """Wall clock from when the engine took the request in to the last token."""
