"""What can go wrong with the rollout engine; each message says what, where, and what to do."""

from __future__ import annotations

from evo_hpc.errors import Failure, UserError


class RolloutError(Failure):
    """Base of every error of the engine."""


class EngineUnavailable(UserError, RolloutError):
    """vLLM is not installed, was imported too early, or does not start."""


class EngineClosed(RolloutError):
    """The engine was closed, or a failed reload left weights that nobody vouches for."""


class ModelFolderError(UserError, RolloutError):
    """A model folder is missing, incomplete, torn, or of another architecture. Names the path."""


class RequestError(RolloutError):
    """A request that cannot be served; raised before anything is generated. Names the request."""


class WeightMismatch(RolloutError):
    """After a reload the engine's log-probabilities are not the trainer's."""
