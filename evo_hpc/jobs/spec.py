"""The records of a job: its spec, the intent to run it, its starts, its result, and the controller's final word."""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.config.yaml_io import YAMLError, dump_tree, load_model, parse, plain
from evo_hpc.paths import JobPaths
from evo_hpc.store.processes import ProcessIdentity

JobKind = Literal["supervise", "train", "evaluate", "analyse"]
ExecutorName = Literal["local", "slurm"]
Ending = Literal["preempted", "timeout", "oom", "node_fail", "user_cancelled", "code_error", "infrastructure"]
"""How a start ended that left no final result; `code_error`: its process said so, or left with an exit code of its own."""


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
    executor: ExecutorName = "local"
    """Who runs it; an attempt stays where it was begun, whatever cluster.yaml says later."""


class Start(Config):
    """`start-N.json`, write-once, before the N-th process of an attempt is spawned, or its N-th Slurm job submitted."""

    number: int
    generation: int
    written_at: float
    slurm_name: str | None = None
    """Unique name of the Slurm job; null where this machine runs it. With `written_at` it is how the job is found again:
    Slurm can reuse an id."""
    array_index: int | None = None
    """Which task of that job's array it is; null where there is no array."""
    after: Ending | None = None
    """How the start before it ended; null for the first one, and after one that was stopped or not taken for lack of room."""
    why: str = ""
    """The same in words."""


class Submission(Config):
    """`submission-N.json`, write-once: what Slurm answered when the N-th start was submitted. Absent while that is not known."""

    number: int
    job_id: str | None = None
    """Of the job, or of the array; null when it was refused."""
    refused: str | None = None
    """Slurm's words when it refused."""
    busy: bool = False
    """Whether that passes by itself: too many jobs of this user at present."""
    written_at: float


class Ended(Config):
    """`ended-N.json`, write-once: the controller cancels the Slurm job of the N-th start. What Slurm then calls CANCELLED was nobody's hand."""

    number: int
    ending: Ending | None = None
    """How that start counts; null where it was to stop, which is no failure."""
    why: str
    """In words."""
    written_at: float


class Identity(Config):
    """Who an incarnation is; compared by (generation, start, restart)."""

    job_name: str
    generation: int
    start: int
    restart: int = 0
    """How often Slurm had requeued this start (SLURM_RESTART_COUNT): an old step may live on beside its requeued copy."""
    slurm_job_id: str | None = None
    process: ProcessIdentity
    claimed_at: float

    @property
    def rank(self) -> tuple[int, int, int]:
        """A claim supersedes those of lower rank."""
        return (self.generation, self.start, self.restart)


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
    ending: Ending | None = None
    """How it failed, where the machine's fault is known: killed for memory."""
    stopped_by: Literal["controller", "warning"] | None = None
    """Who stopped it: the controller, or Slurm's warning (a time limit, a preemption)."""
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
    ending: Ending | None = None
    """How the last start ended, where it left no final result."""
    starts: int
    advanced: bool = False
    """Whether it came a step further than the attempts at this work before it: its failure is no repetition of theirs."""
    written_at: float = 0.0
    """Unix time."""
    seconds: float
    """Wall time of all starts in seconds; of a killed one up to its last heartbeat."""


def job_name(campaign_root: str, campaign: str, owner: str, folder: str) -> str:
    """A name that no other campaign's job has: the campaign's folder is hashed in. `folder` is the attempt's: train-000."""
    return f"{name_prefix(campaign_root, campaign)}{owner}-{folder}"


def name_prefix(campaign_root: str, campaign: str) -> str:
    """What the names of all jobs of a campaign begin with, and no other's do."""
    return f"evo-{campaign}-{root_digest(campaign_root)}-"


def root_digest(campaign_root: str) -> str:
    """What tells the jobs of two campaigns of one name apart."""
    return hashlib.sha256(campaign_root.encode()).hexdigest()[:8]


def load_spec(job: JobPaths) -> JobSpec:
    """The spec of a job folder. Raises ConfigError."""
    try:
        fields: dict[str, Any] = {}
        before, *parts = _FIELD.split(job.spec.read_text(encoding="utf-8"))
        if before.strip():
            raise ValueError("something stands before the first field")
        for part in parts:
            name, value = _field(part)
            if name in fields:
                raise ValueError(f"{name} twice")
            fields[name] = value
        return JobSpec.model_validate(fields)
    except (OSError, ValueError, YAMLError):  # whatever it is, the whole file tells it better
        return load_model(job.spec, JobSpec)


def spec_bytes(spec: JobSpec) -> bytes:
    """What spec.yaml holds: the fields one after the other, as dump_model would write them."""
    return b"".join(_field_bytes(name, json.dumps(value)) for name, value in spec.model_dump(mode="json").items())


@lru_cache(maxsize=64)  # all jobs of a campaign share config and cluster, and writing those as YAML takes longer than sbatch does
def _field_bytes(name: str, value: str) -> bytes:
    data = dump_tree({name: json.loads(value)})
    _known(data.decode())[:] = [json.loads(value)]  # what was just written need not be parsed
    return data


_FIELD = re.compile(r"^(?=\w)", re.MULTILINE)
"""Where a field begins: whatever belongs to it is indented."""


@lru_cache(maxsize=256)
def _known(text: str) -> list[Any]:
    """Where the value of a field is kept; empty before it is known."""
    return []


def _field(text: str) -> tuple[str, Any]:
    """The name and value of one field. Raises ValueError or YAMLError."""
    known = _known(text)
    if not known:
        ((_, value),) = plain(parse(text)).items()
        known.append(value)
    return text.partition(":")[0], known[0]
