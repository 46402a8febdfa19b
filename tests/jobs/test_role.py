"""What a role says of how it ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evo_hpc.jobs.role import outcome_of


def test_memory_that_is_refused_is_told_with_what_to_do() -> None:
    """On the host by torch and by numpy, on a device by torch's own error."""
    raised: list[Exception] = []
    for allocate in (lambda: torch.empty(1 << 55), lambda: np.empty(1 << 55)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        raised.append(caught.value)
    for error in (*raised, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")):
        told = outcome_of(error, Path("logs/trainer.log"))
        assert (told["outcome"], told["blame"], told["ending"]) == ("failed", "infrastructure", "oom")
        assert "token_budget" in told["error"] and "logs/trainer.log" in told["error"]
    assert "ending" not in outcome_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Path("logs/trainer.log"))
