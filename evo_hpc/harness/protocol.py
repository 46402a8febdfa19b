"""What the controller and the process that runs analyzers say to each other."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from evo_hpc.harness.manifest import AnalyzerManifest
from evo_hpc.lineage.effective import EffectiveRow


class Request(BaseModel):
    """What to run. Paths are absolute."""

    model_config = ConfigDict(extra="forbid")

    analyzers: list[tuple[str, AnalyzerManifest]]
    """Folder and manifest of each."""
    steps: list[str]
    train: list[str]
    probe: list[str]
    effective: list[EffectiveRow]
    version: str
    up_to_step: int | None
    out: str
    """An existing folder, which gets one folder an analyzer."""
    dry: bool
    """Also render what findings say, with numbers that nobody measured, so that a mistake in one shows."""
    cpu_seconds: int
    memory_bytes: int
    """Address space: a bound on what a template or a query can grow to."""
    file_bytes: int
    """Size of any file that it writes."""
    parent: int
    """Pid of who asks; the process ends with it."""


class Outcome(BaseModel):
    """How it went; `bad_analyzer` and `bad_inputs` are the user's to mend."""

    state: Literal["done", "bad_analyzer", "bad_inputs"]
    message: str = ""
