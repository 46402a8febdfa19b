"""Our side: a training job as a campaign runs it (launcher, trainer role, rollout role, their files), without the controller around it."""

from __future__ import annotations

import json
import shutil
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.controller.tasks import make_tasks
from evo_hpc.dispatch.intent import declare
from evo_hpc.dispatch.local import LocalExecutor, observe
from evo_hpc.jobs.outputs import TrainOutputs
from evo_hpc.jobs.spec import JobKind, JobSpec, Result, job_name, load_spec
from evo_hpc.paths import COMPLETE, CampaignPaths, JobPaths, OwnerPaths
from evo_hpc.store.schemas import STEP
from evo_hpc.store.tables import read_tables

from benchmarks.grpo_setting import CAMPAIGN_SEED, Setting

POLL_SECONDS = 0.02


class Alone:
    """The right to commit, of a script that is alone."""

    generation = 1

    def check(self) -> None:
        """Nobody else writes here."""


@dataclass
class Bench:
    """A campaign folder for jobs."""

    paths: CampaignPaths
    campaign: Campaign
    exchange: Path
    """On memory-backed storage: what the jobs' policies and rollouts pass through."""

    @classmethod
    def make(cls, folder: Path, exchange: Path, train_tasks: int = 4096, supervised: dict[str, Any] | None = None) -> Bench:
        """Tasks are made; models are brought by the settings."""
        folder.mkdir(parents=True)
        campaign = Campaign.model_validate({
            "name": "bench", "seed": CAMPAIGN_SEED, "watch": {"every": 0}, "search": {"proposals": 0}, "base_model": {"supervised": supervised},
            "domain": {"name": "arithmetic", "config": {"seed": CAMPAIGN_SEED, "train": train_tasks, "probe": 2, "dev": 2, "sealed": 2}},
        })
        paths = CampaignPaths(folder)
        paths.campaign_yaml.write_text(json.dumps(campaign.model_dump(mode="json")))
        make_tasks(paths, campaign)
        return cls(paths, campaign, exchange)

    def run(self, owner: OwnerPaths, kind: JobKind, threads: int, params: dict[str, Any]) -> tuple[JobPaths, Result]:
        """One job, to its end. Raises RuntimeError where it fails, with its logs' ends."""
        profile = {"engine": {"threads": threads, "kv_cache_mib": 64}, "trainer": {"threads": threads}, "exchange": str(self.exchange)}
        cluster = Cluster.model_validate(profile)
        job = owner.job(kind, 0)
        spec = JobSpec(
            name=job_name(str(self.paths.root.resolve()), self.campaign.name, owner.root.name, job.root.name), kind=kind,
            campaign=self.campaign.name, owner=owner.root.name, attempt=0, config=self.campaign.model_dump(mode="json"),
            cluster=cluster.model_dump(mode="json"), params=params,
        )
        lease: Any = Alone()
        declare(job, spec, str(params.get("run", kind)), lease, "local")
        executor = LocalExecutor(cluster)
        executor.start([observe(job)], lease)
        while (status := observe(job)).phase == "running":
            time.sleep(0.2)
        if status.result is None or status.result.outcome != "done":
            logs = [p.read_text(errors="replace")[-3000:] for p in (job.launch_log, *job.root.glob("inc-*/logs/*.log")) if p.exists()]
            raise RuntimeError(f"{job.root}: {status.phase}, {status.result}\n" + "\n".join(logs))
        return job, status.result

    def supervise(self, threads: int) -> Path:
        """The base policy that the campaign's settings describe."""
        _, result = self.run(self.paths.base, "supervise", threads, {})
        return self.paths.root / result.outputs["policy"]

    def train(self, setting: Setting, name: str) -> OurRun:
        """One training run."""
        recipe = Recipe.model_validate(setting.recipe()).model_dump(mode="json")
        init = str(Path(setting.model).resolve())
        with PublishWatch(self.exchange) as watch:
            job, result = self.run(self.paths.version(name), "train", setting.threads, {"recipe": recipe, "run": name, "init": init})
        made = TrainOutputs.model_validate(result.outputs)
        files = [self.paths.root / part.path for part in made.parts if part.table == "steps"]
        rows = read_tables(files, STEP).sort_by("step").to_pylist()
        asked = {"recipe": recipe, "cluster": {section: load_spec(job).cluster[section] for section in ("trainer", "engine")}}
        return OurRun(rows, watch.latencies(), asked, {role: self.paths.root / path for role, path in made.effective.items()})


@dataclass(frozen=True)
class OurRun:
    """What a run left behind."""

    rows: list[dict[str, Any]]
    """Of the STEP table."""
    publish_to_seen: dict[int, float]
    """By weight version: seconds from a policy's being there as a whole to the engine's having it, verified."""
    asked: dict[str, Any]
    """Recipe and cluster profile, as effective.yaml has them."""
    effective: dict[str, Path]
    """By role: what it read back."""

    def times(self) -> list[float]:
        """When each step ended, in Unix seconds."""
        return [row["time"].timestamp() for row in self.rows]

    def median(self, name: str, skip: int) -> float:
        """Of a column, the first steps left out."""
        return statistics.median(row[name] for row in self.rows[skip:] if row[name] is not None)

    def neither(self, skip: int) -> float:
        """Share of a step in which the trainer neither waits for rollouts nor computes log-probabilities or updates."""
        total = sum(row["seconds_step"] for row in self.rows[skip:])
        used = sum(row[f"seconds_{name}"] or 0.0 for row in self.rows[skip:] for name in ("generate", "logprobs", "train"))
        return 1 - used / total


@dataclass
class PublishWatch:
    """Looks at the exchange while a job runs: when each policy was there, and when it had been taken."""

    exchange: Path
    published: dict[int, float] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PublishWatch:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def latencies(self) -> dict[int, float]:
        return {version: self.seen[version] - at for version, at in sorted(self.published.items()) if version in self.seen}

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            for path in self.exchange.glob("*/*/policy/*"):
                number = path.name.partition(".")[0]
                if not number.isdecimal():
                    continue
                try:
                    if path.suffix.startswith(".seen"):  # one file a worker
                        self.seen.setdefault(int(number), path.stat().st_mtime)
                    elif not path.suffix:
                        self.published.setdefault(int(number), (path / COMPLETE).stat().st_mtime)
                except OSError:  # removed in between
                    continue


def copy_gb_per_second(source: Path, folder: Path, repetitions: int = 5) -> float:
    """A plain copy of a file from memory-backed storage to memory-backed storage: median of some."""
    first = folder / "source"
    shutil.copyfile(source, first)
    found = []
    for number in range(repetitions):
        begin = time.perf_counter()
        shutil.copyfile(first, folder / f"copy-{number}")
        found.append(first.stat().st_size / (time.perf_counter() - begin) / 1e9)
        (folder / f"copy-{number}").unlink()
    first.unlink()
    return statistics.median(found)


