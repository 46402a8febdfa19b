"""The errors of the training part, one type a subject."""

from __future__ import annotations

from evo_hpc.errors import Failure, UserError


class TrainingError(Failure):
    """Base of the failures of a training step or its files."""


class UnsupportedModelError(UserError):
    """The model folder's config.json describes something that cannot be built; names file, field and value."""


class WeightsError(UserError):
    """A Hugging Face weight file is missing, truncated, or does not hold the tensors that the config asks for."""


class ParallelError(UserError):
    """This process's place is impossible: its rank, a launcher that gave no address, or a second, different initialisation."""


class SampleError(TrainingError):
    """A training sample lacks what the step needs, or its parts differ in length."""


class NonFiniteError(TrainingError):
    """Loss or gradient norm is NaN or infinite; raised before the weights are touched."""


class DivergedError(UserError):
    """Updates in a row had to be left out because loss or gradients were not finite: this recipe does not train."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, torn, truncated, or was altered after it was written."""


class CheckpointMisfit(CheckpointError):
    """An intact checkpoint is of another model, precision or kind of layout than the run: only its user can say which is meant."""

    exit_code = 2
