"""Whatever happens to jobs, to Slurm and to controllers: what must hold does."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from evo_hpc.dispatch.slurm.states import LIVES, life
from tests.chaos.histories import ENDS, LIVELY, Histories


def test_histories() -> None:
    """A few hundred steps of each kind; HISTORIES=n tries n histories."""
    number = int(os.environ.get("HISTORIES", "40"))
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=number, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)),
    )


def test_every_state_word_is_tried() -> None:
    """The words of the histories are all that states.py knows to be an end."""
    assert {word for word, lives in LIVES.items() if lives == "terminal"} == set(ENDS)
    assert all(life(word) != "terminal" for word in LIVELY)
