"""A controller meets a file that a person is just saving: as a job of its own it waits for it, in a terminal it says so and ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evo_hpc.controller import loop
from evo_hpc.controller.loop import Controller
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths


def look(monkeypatch: pytest.MonkeyPatch, failures: int, *, before: Any = "the last state") -> tuple[Any, list[str]]:
    """What one look gives where the files cannot be read so many times, and what was said."""
    left, said = [failures], list[str]()

    def read(*_: object, **__: object) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise UserError("campaign.yaml:3: cut short")
        return "the state"

    monkeypatch.setattr(loop, "read_state", read)
    monkeypatch.setattr(loop, "_LOOK_AGAIN_SECONDS", 0.01)
    controller = Controller(CampaignPaths(Path("/campaign")), lambda state, plan, events: said.extend(event["error"] for event in events))
    controller._seen = before
    ownership: Any = SimpleNamespace(stop=None, warned=False, beat=lambda: None)
    return controller._look(None, None, ownership), said  # type: ignore[arg-type]


def test_a_job_of_its_own_waits_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found, said = look(monkeypatch, 3)
    assert found == "the state" and len(said) == 1 and "campaign.yaml:3: cut short" in said[0]


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(loop, "_MEND_SECONDS", 0.1)
    with pytest.raises(UserError, match="cut short"):
        look(monkeypatch, 10_000)


def test_somebody_who_watches_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="cut short"):
        look(monkeypatch, 1)


def test_a_campaign_that_was_never_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(UserError, match="cut short"):
        look(monkeypatch, 1, before=None)
