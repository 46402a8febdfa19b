"""The one owner of every file and folder name on disk. Nothing else in the package spells one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

VERSION_ID = re.compile(r"^v\d{4,}$")
_JOB = re.compile(r"^(?P<kind>[a-z]+)-(?P<attempt>\d{3,})(-shard-(?P<shard>\d{2,}))?$")
_INCARNATION = re.compile(r"^inc-(?P<number>\d+)$")
_CLAIM = re.compile(r"^claim-(?P<number>\d{6})\.json$")
_SUBMISSION = re.compile(r"^submission-(?P<number>\d{6})\.json$")
_ENDED = re.compile(r"^ended-(?P<number>\d{6})\.json$")
_LAUNCH = re.compile(r"^launch-(?P<number>\d{6})\.json$")
_START = re.compile(r"^start-(?P<number>\d{6})\.json$")
_GENERATION = re.compile(r"^generation-(?P<number>\d{6})\.json$")
_LOOK = re.compile(r"^look-(?P<number>\d{6})\.json$")
_STEP = re.compile(r"^step-(?P<step>\d{6,})$")
_HARNESS = re.compile(r"^h(?P<number>\d{4,})$")
_ROUND = re.compile(r"^round-(?P<number>\d{4,})\.yaml$")
_READ = re.compile(r"^read-(?P<number>\d{6})\.json$")
_READ_RESULT = re.compile(r"^result-(?P<number>\d{6})\.json$")
_BATCH = re.compile(r"^batch-(?P<number>\d{8,})\.json$")
_READ_FOLDER = re.compile(r"^read-(?P<number>\d{6})$")

COMPLETE = "COMPLETE.json"
SHARED_MEMORY = Path("/dev/shm")
EVALUATION_PART = "part-00000.parquet"
CHECKPOINT_EXTRA = "extra.json"
CHECKPOINT_PARTIAL_PREFIX = ".partial-"
TEMP_PREFIX = ".tmp-"
QUARANTINE_SUFFIX = ".quarantined"


def version_id(number: int) -> str:
    """Name of the number-th version: 7 -> v0007."""
    return f"v{number:04d}"


def harness_id(number: int) -> str:
    """Name of the number-th harness: 3 -> h0003."""
    return f"h{number:04d}"


def step_name(step: int) -> str:
    """Name of what belongs to one trainer step: 50 -> step-000050."""
    return f"step-{step:06d}"


def part_name(first_step: int, last_step: int) -> str:
    """One Parquet part of a training run, or of an evaluation."""
    return f"part-{first_step:06d}-{last_step:06d}.parquet"


def event_file(folder: Path, version: str) -> Path:
    """TensorBoard's file of one version's training run: TensorBoard reads what has `tfevents` in its name, and shows the folder's."""
    return folder / version / "events.out.tfevents.0.evo-hpc"


def step_of(path: Path) -> int | None:
    """The step in a name made by step_name, else None."""
    found = _STEP.match(path.name)
    return int(found["step"]) if found else None


def _numbered(folder: Path, pattern: re.Pattern[str], group: str) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    return sorted((int(m[group]), p) for p in folder.iterdir() if (m := pattern.match(p.name)))


@dataclass(frozen=True)
class Workspace:
    """What belongs to a user rather than to a campaign: campaigns, memory, sealed task sets."""

    root: Path

    @property
    def campaigns(self) -> Path:
        return self.root / "campaigns"

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    def sealed(self, task_set_hash: str) -> Path:
        """Folder of one sealed task set, shared by all campaigns that use the same tasks."""
        return self.root / "sealed" / task_set_hash

    def sealed_tasks(self, task_set_hash: str) -> Path:
        return self.sealed(task_set_hash) / "tasks.jsonl"

    def sealed_read(self, task_set_hash: str, number: int) -> Path:
        """Write-once record of the number-th read of a sealed task set: who is read, written before any of it is."""
        return self.sealed(task_set_hash) / "reads" / f"read-{number:06d}.json"

    def sealed_reads(self, task_set_hash: str) -> list[tuple[int, Path]]:
        return _numbered(self.sealed(task_set_hash) / "reads", _READ, "number")

    def sealed_result(self, task_set_hash: str, number: int) -> Path:
        """What came out of the number-th read."""
        return self.sealed(task_set_hash) / "reads" / f"result-{number:06d}.json"

    def sealed_results(self, task_set_hash: str) -> list[tuple[int, Path]]:
        return _numbered(self.sealed(task_set_hash) / "reads", _READ_RESULT, "number")


@dataclass(frozen=True)
class ExchangePaths:
    """Where a job's trainer and rollout workers speak; ephemeral, on memory-backed storage where there is some."""

    root: Path

    def policy(self, weight_version: int) -> Path:
        return self.root / "policy" / f"{weight_version:06d}"

    def policies(self) -> list[int]:
        """Weight versions that are there, whole or not, in order."""
        return sorted(int(path.name) for path in (self.root / "policy").iterdir() if path.name.isdecimal())

    def seen(self, weight_version: int, worker: str) -> Path:
        """Written by a worker that has taken a policy: how far its log-probabilities were from the trainer's."""
        return self.root / "policy" / f"{weight_version:06d}.seen-{worker}"

    def all_seen(self, weight_version: int) -> list[Path]:
        return sorted((self.root / "policy").glob(f"{weight_version:06d}.seen-*"))

    def request(self, batch: int) -> Path:
        """Batches are numbered from 1 in the order in which they are asked for, over all steps of an incarnation."""
        return self.root / "requests" / f"batch-{batch:08d}.json"

    def requests(self) -> list[int]:
        """Numbers of the batches that are asked for, in order."""
        return [number for number, _ in _numbered(self.root / "requests", _BATCH, "number")]

    def claim(self, batch: int) -> Path:
        return self.root / "claims" / f"batch-{batch:08d}.json"

    def cancelled(self, batch: int) -> Path:
        """Its being there says that nobody wants the batch any more."""
        return self.root / "cancelled" / f"batch-{batch:08d}"

    def rollouts(self, batch: int) -> Path:
        return self.root / "rollouts" / f"batch-{batch:08d}.parquet"

    @property
    def doorbell(self) -> Path:
        """Where the doorbell listens, and its secret; mode 0600."""
        return self.root / "doorbell.json"

    def folders(self) -> list[Path]:
        return [self.root / name for name in ("policy", "requests", "claims", "cancelled", "rollouts")]


@dataclass(frozen=True)
class IncarnationPaths:
    """One actual start of an attempt: all that it writes lies here."""

    root: Path

    @property
    def number(self) -> int:
        found = _INCARNATION.match(self.root.name)
        assert found, self.root
        return int(found["number"])

    @property
    def heartbeat(self) -> Path:
        return self.root / "heartbeat.json"

    @property
    def progress(self) -> Path:
        return self.root / "progress.json"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def exchange(self) -> Path:
        return self.root / "exchange"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def steps(self) -> Path:
        return self.root / "steps"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def parts(self) -> Path:
        """The table parts that make up the run so far; rewritten at each flush, so that a running job can be read."""
        return self.root / "parts.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def policy(self, step: int) -> Path:
        return self.root / "policy" / step_name(step)

    def evaluation(self, version: str, suite: str) -> Path:
        return self.root / "eval" / version / suite

    @property
    def analysis(self) -> Path:
        return self.root / "analysis"

    def effective(self, role: str) -> Path:
        return self.root / f"effective-{role}.yaml"

    def log(self, role: str) -> Path:
        return self.root / "logs" / f"{role}.log"

    def pulse(self, role: str) -> Path:
        """Rewritten by a rollout worker while it has work: its silence is judged by it."""
        return self.root / "logs" / f"{role}.pulse.json"

    def role_outcome(self, role: str, rank: int = 0) -> Path:
        """What a role says of itself at its end; ranks but the first have files of their own."""
        return self.root / "logs" / (f"{role}.rank-{rank}.outcome.json" if rank else f"{role}.outcome.json")

    def role_outcomes(self, role: str) -> list[Path]:
        """Of all its ranks, as far as they have said something; the first rank's first."""
        first = self.role_outcome(role)
        others = sorted((self.root / "logs").glob(f"{role}.rank-*.outcome.json"))
        return [*([first] if first.exists() else []), *others]

    @property
    def stop(self) -> Path:
        """Its being there tells the roles to save and end."""
        return self.root / "stop"


@dataclass(frozen=True)
class JobPaths:
    """One attempt of one job, e.g. versions/v0001/jobs/train-000."""

    root: Path

    @property
    def kind(self) -> str:
        return self._parsed()["kind"]

    @property
    def attempt(self) -> int:
        return int(self._parsed()["attempt"])

    @property
    def shard(self) -> int | None:
        """Which part of a divided piece of work this is; null where it is not divided."""
        found = self._parsed()["shard"]
        return int(found) if found else None

    def _parsed(self) -> re.Match[str]:
        found = _JOB.match(self.root.name)
        assert found, self.root
        return found

    @cached_property
    def owner(self) -> Path:
        """The folder that the job works for: base/ or versions/v0001/."""
        return self.root.parent.parent

    @property
    def spec(self) -> Path:
        return self.root / "spec.yaml"

    @property
    def intent(self) -> Path:
        return self.root / "intent.json"

    @property
    def record(self) -> Path:
        return self.root / "record.json"

    @property
    def cost(self) -> Path:
        """Write-once: what the attempt cost, kept because Slurm's accounting is purged after a while."""
        return self.root / "cost.json"

    @property
    def effective_yaml(self) -> Path:
        """The roles' own accounts merged, before they are published with the training run."""
        return self.root / "effective.yaml"

    @property
    def launch_log(self) -> Path:
        return self.root / "launch.log"

    def start(self, number: int) -> Path:
        return self.root / f"start-{number:06d}.json"

    def starts(self) -> list[tuple[int, Path]]:
        return _numbered(self.root, _START, "number")

    def submission(self, number: int) -> Path:
        return self.root / f"submission-{number:06d}.json"

    def submissions(self) -> list[tuple[int, Path]]:
        return _numbered(self.root, _SUBMISSION, "number")

    def ended(self, start: int) -> Path:
        """Write-once: that the controller itself had a start's Slurm job ended, written before it was."""
        return self.root / f"ended-{start:06d}.json"

    def endeds(self) -> list[tuple[int, Path]]:
        return _numbered(self.root, _ENDED, "number")

    def script(self, start: int) -> Path:
        """The batch script of a start, as it was submitted."""
        return self.root / f"start-{start:06d}.sh"

    @property
    def slurm_log(self) -> Path:
        """What the batch scripts of all starts print; appended."""
        return self.root / "slurm.log"

    def claim(self, number: int) -> Path:
        return self.root / f"claim-{number:06d}.json"

    def claims(self) -> list[tuple[int, Path]]:
        return _numbered(self.root, _CLAIM, "number")

    def incarnation(self, number: int) -> IncarnationPaths:
        return IncarnationPaths(self.root / f"inc-{number}")

    def incarnations(self) -> list[IncarnationPaths]:
        return [IncarnationPaths(p) for _, p in _numbered(self.root, _INCARNATION, "number")]


@dataclass(frozen=True)
class OwnerPaths:
    """A folder that owns jobs: the base policy or a version."""

    root: Path

    def job(self, kind: str, attempt: int, shard: int | None = None) -> JobPaths:
        return JobPaths(self.root / "jobs" / (f"{kind}-{attempt:03d}" + ("" if shard is None else f"-shard-{shard:02d}")))

    def jobs(self) -> list[JobPaths]:
        folder = self.root / "jobs"
        if not folder.is_dir():
            return []
        jobs = [JobPaths(p) for p in folder.iterdir() if _JOB.match(p.name) and p.is_dir()]
        return sorted(jobs, key=lambda job: (job.kind, job.attempt, -1 if job.shard is None else job.shard))


@dataclass(frozen=True)
class BasePaths(OwnerPaths):
    """The base policy's folder: how it was made (jobs) and what came out (policy, a Hugging Face folder)."""

    @property
    def policy(self) -> Path:
        return self.root / "policy"


@dataclass(frozen=True)
class FinalPaths(OwnerPaths):
    """The final claim: the job that scores the candidates on sealed, and its evaluations, without a word of the tasks."""

    def evaluation(self, read: int, version: str) -> Path:
        """Scores of one version under the read of that number."""
        return self.root / "eval" / f"read-{read:06d}" / version

    def reads(self) -> list[tuple[int, Path]]:
        """Folders of the reads that have scores here."""
        return _numbered(self.root / "eval", _READ_FOLDER, "number")


@dataclass(frozen=True)
class AnalyzerPaths:
    """An analyzer: a folder with a manifest and templates."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def manifest(self) -> Path:
        return self.root / "analyzer.yaml"

    @property
    def query(self) -> Path:
        return self.root / "query.sql.j2"

    @property
    def measures(self) -> Path:
        return self.root / "measures.sql.j2"

    @property
    def report(self) -> Path:
        return self.root / "report.md.j2"

    @property
    def code(self) -> Path:
        return self.root / "analyze.py"


@dataclass(frozen=True)
class AnalysisPaths:
    """What one analyzer said of one version."""

    root: Path

    @property
    def table(self) -> Path:
        return self.root / "table.parquet"

    @property
    def findings(self) -> Path:
        return self.root / "findings.json"

    @property
    def report(self) -> Path:
        return self.root / "report.md"


@dataclass(frozen=True)
class HarnessPaths:
    """One numbered harness of a campaign: copies of all its analyzers and of the rules, and their hashes."""

    root: Path

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def manifest(self) -> Path:
        return self.root / "harness.yaml"

    @property
    def analyzers_folder(self) -> Path:
        return self.root / "analyzers"

    def analyzer(self, name: str) -> AnalyzerPaths:
        return AnalyzerPaths(self.analyzers_folder / name)

    @property
    def rules(self) -> Path:
        return self.root / "rules.yaml"


@dataclass(frozen=True)
class VersionPaths(OwnerPaths):
    """A node of the tree."""

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def version_yaml(self) -> Path:
        return self.root / "version.yaml"

    @property
    def recipe_yaml(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def hooks(self) -> Path:
        return self.root / "hooks"

    @property
    def intervention_diff(self) -> Path:
        return self.root / "intervention.diff"

    @property
    def decision_yaml(self) -> Path:
        return self.root / "decision.yaml"

    @property
    def train(self) -> Path:
        return self.root / "train"

    @property
    def train_complete(self) -> Path:
        return self.train / COMPLETE

    @property
    def effective_yaml(self) -> Path:
        return self.train / "effective.yaml"

    @property
    def metrics(self) -> Path:
        return self.train / "metrics"

    @property
    def steps(self) -> Path:
        return self.train / "steps"

    @property
    def rollouts(self) -> Path:
        return self.train / "rollouts"

    def checkpoint(self, step: int) -> Path:
        return self.train / "checkpoints" / step_name(step)

    def policy(self, step: int) -> Path:
        return self.train / "policy" / step_name(step)

    def evaluation(self, suite: str) -> Path:
        return self.root / "eval" / suite

    def evaluation_complete(self, suite: str) -> Path:
        return self.evaluation(suite) / COMPLETE

    def analysis(self, harness: str) -> Path:
        """Folder of all that a harness found in this version; appears at once, with a completion record."""
        return self.root / "analysis" / harness

    def analyses(self) -> list[tuple[int, Path]]:
        """Newest harness last."""
        return _numbered(self.root / "analysis", _HARNESS, "number")

    def watch(self, step: int) -> Path:
        """Folder of what the live analyzers said of the training run up to `step`."""
        return self.root / "watch" / step_name(step)

    def watches(self) -> list[tuple[int, Path]]:
        """Earliest step first."""
        return _numbered(self.root / "watch", _STEP, "step")

    def comparison(self, other: str, suite: str, look: int) -> Path:
        return self.root / "comparisons" / f"{other}-{suite}-look-{look:06d}.json"

    def comparisons(self) -> list[Path]:
        """Oldest look first."""
        return sorted((self.root / "comparisons").glob("*-look-*.json"), key=lambda p: p.name.split("-look-")[1])


@dataclass(frozen=True)
class CampaignPaths:
    """A campaign: a folder that a person can read and edit."""

    root: Path

    @property
    def workspace(self) -> Workspace:
        """The folder above `campaigns/`; a campaign that lies elsewhere is its own workspace's only one."""
        parent = self.root.parent
        return Workspace(parent.parent if parent.name == "campaigns" else parent)

    @property
    def campaign_yaml(self) -> Path:
        return self.root / "campaign.yaml"

    @property
    def recipe_yaml(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def cluster_yaml(self) -> Path:
        return self.root / "cluster.yaml"

    @property
    def hooks(self) -> Path:
        return self.root / "hooks"

    @property
    def controller(self) -> Path:
        return self.root / "controller"

    @property
    def lease(self) -> Path:
        return self.controller / "lease.json"

    def generation(self, number: int) -> Path:
        """Write-once record of the number-th controller to own the campaign."""
        return self.controller / f"generation-{number:06d}.json"

    def generations(self) -> list[tuple[int, Path]]:
        return _numbered(self.controller, _GENERATION, "number")

    def launch(self, number: int) -> Path:
        """Write-once: the number-th submission of a controller as a Slurm job, written before it."""
        return self.controller / f"launch-{number:06d}.json"

    def launches(self) -> list[tuple[int, Path]]:
        return _numbered(self.controller, _LAUNCH, "number")

    @property
    def controller_script(self) -> Path:
        return self.controller / "controller.sh"

    @property
    def controller_log(self) -> Path:
        """What the controller prints as a Slurm job; appended over requeues."""
        return self.controller / "log"

    @property
    def control_yaml(self) -> Path:
        """What a person wishes of a running controller: pause, drain, stop, cancel; absent = go on."""
        return self.root / "control.yaml"

    @property
    def analyzers_folder(self) -> Path:
        """The campaign's own analyzers, beside the built-in ones; a folder here is all it takes to add one."""
        return self.root / "analyzers"

    @property
    def rules_yaml(self) -> Path:
        """The campaign's own rules, in place of the built-in ones."""
        return self.root / "rules.yaml"

    def harness(self, number: int) -> HarnessPaths:
        return HarnessPaths(self.root / "harness" / harness_id(number))

    def harnesses(self) -> list[tuple[int, HarnessPaths]]:
        """Oldest first."""
        return [(number, HarnessPaths(path)) for number, path in _numbered(self.root / "harness", _HARNESS, "number")]

    def round(self, number: int) -> Path:
        """Write-once: what the agent proposed, from which evidence, the number-th time."""
        return self.root / "rounds" / f"round-{number:04d}.yaml"

    def rounds(self) -> list[tuple[int, Path]]:
        return _numbered(self.root / "rounds", _ROUND, "number")

    @property
    def final(self) -> FinalPaths:
        return FinalPaths(self.root / "final")

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def report_html(self) -> Path:
        return self.reports / "report.html"

    @property
    def report_markdown(self) -> Path:
        return self.reports / "report.md"

    def export(self, tracker: str) -> Path:
        """What is written for a tracker that reads files; can be made again at any time."""
        return self.root / "exports" / tracker

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    def look(self, number: int) -> Path:
        """Write-once record of the number-th look at dev."""
        return self.root / "looks" / f"look-{number:06d}.json"

    def looks(self) -> list[tuple[int, Path]]:
        return _numbered(self.root / "looks", _LOOK, "number")

    @property
    def base(self) -> BasePaths:
        return BasePaths(self.root / "base")

    @property
    def tasks_folder(self) -> Path:
        return self.root / "tasks"

    def tasks(self, split: str) -> Path:
        return self.tasks_folder / f"{split}.jsonl"

    @property
    def tasks_manifest(self) -> Path:
        return self.tasks_folder / "manifest.json"

    @property
    def versions_folder(self) -> Path:
        return self.root / "versions"

    def version(self, version: str) -> VersionPaths:
        return VersionPaths(self.versions_folder / version)

    def versions(self) -> list[VersionPaths]:
        """Folders named like a version, in order; whether they are whole, and links lead anywhere, is not judged here."""
        if not self.versions_folder.is_dir():
            return []
        found = [VersionPaths(p) for p in self.versions_folder.iterdir() if VERSION_ID.match(p.name) and (p.is_dir() or p.is_symlink())]
        return sorted(found, key=lambda version: int(version.id[1:]))

    @classmethod
    def of_job(cls, job: JobPaths) -> CampaignPaths:
        """The campaign that a job folder lies in (…/base/jobs/x or …/versions/v0001/jobs/x)."""
        owner = job.owner
        return cls(owner.parent.parent if owner.parent.name == "versions" else owner.parent)
