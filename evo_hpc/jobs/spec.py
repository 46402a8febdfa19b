"""The records of a job: its spec, the intent to run it, its starts, its result, and the controller's final word."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.config.yaml_io import dump_model, load_model
from evo_hpc.paths import JobPaths
from evo_hpc.store.processes import ProcessIdentity

JobKind = Literal["supervise", "train", "evaluate"]


class JobSpec(Config):
    """`spec.yaml`: all that a job needs to know; paths in it are relative to the campaign."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    name: str
    """Unique and deterministic: what the job is found by after a crash."""
    kind: JobKind
    """What runs."""
    campaign: str
    """Campaign name."""
    owner: str
    """`base` or a version id."""
    attempt: int
    """0 for the first."""
    config: dict[str, Any]
    """The campaign's configuration as it was when the job was planned."""
    cluster: dict[str, Any]
    """The cluster profile as it was when the job was planned."""
    params: dict[str, Any] = Field(default_factory=dict)
    """What this kind of job takes."""


class Intent(Config):
    """`intent.json`, write-once, before anything starts."""

    name: str
    spec_sha256: str
    owner: str
    """`base` or a version id: a folder copied to another version brings attempts that are not its own."""
    work: str
    """Identity of what the attempt is for; when that changes, the attempt is stale."""
    root: str
    """Absolute folder of the campaign: a copied campaign brings attempts whose processes are not its own."""
    generation: int
    written_at: float


class Start(Config):
    """`start-N.json`, write-once, before the N-th process of an attempt is spawned."""

    number: int
    generation: int
    written_at: float


class Identity(Config):
    """Who an incarnation is; compared by (generation, start)."""

    job_name: str
    generation: int
    start: int
    process: ProcessIdentity
    claimed_at: float

    @property
    def rank(self) -> tuple[int, int]:
        """A claim supersedes those of lower rank."""
        return (self.generation, self.start)


Outcome = Literal["done", "stopped", "failed"]
Blame = Literal["user", "infrastructure"]


class Result(Config):
    """`result.json` of an incarnation: its last word. A job's own result outranks what the executor says."""

    outcome: Outcome
    """`done`; `stopped` by a signal with its state saved; `failed`."""
    blame: Blame | None = None
    """Whose failure: the user's (config, input; exit code 2, not retried) or the machine's (retried)."""
    error: str | None = None
    """What went wrong and what to do."""
    outputs: dict[str, Any] = Field(default_factory=dict)
    """What the job made; paths are relative to the campaign."""
    seconds: float = 0.0
    """Wall time of this incarnation."""
    finished_at: float = 0.0
    """Unix time."""


class Record(Config):
    """`record.json`: the controller's final word on an attempt, write-once."""

    state: Literal["done", "failed", "stopped_early"]
    """`stopped_early`: ended by the futility rule; what it left behind is published, without a policy."""
    incarnation: int | None
    """The one whose outputs count; null when none did."""
    blame: Blame | None = None
    error: str | None = None
    generation: int
    """Of the controller that wrote this."""
    started_by: int
    """Generation that made the last start."""
    starts: int
    seconds: float
    """Wall time of all starts in seconds; of a killed one up to its last heartbeat."""


def job_name(campaign_root: str, campaign: str, owner: str, kind: str, attempt: int) -> str:
    """A name that no other campaign's job has: the campaign's folder is hashed in."""
    digest = hashlib.sha256(campaign_root.encode()).hexdigest()[:8]
    return f"evo-{campaign}-{digest}-{owner}-{kind}-{attempt:03d}"


def load_spec(job: JobPaths) -> JobSpec:
    """The spec of a job folder. Raises ConfigError."""
    return load_model(job.spec, JobSpec)


def spec_bytes(spec: JobSpec) -> bytes:
    """What spec.yaml holds."""
    return dump_model(spec)
