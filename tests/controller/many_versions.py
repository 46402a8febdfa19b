"""A campaign of any number of versions, made cheaply: one finished version over and over under other ids, its big files linked.

Jobs of Slurm can be added that wait or run, with a queue that shows them; no job runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from evo_hpc.config import yaml_io
from evo_hpc.config.base import Config
from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.cost import write_cost
from evo_hpc.controller.state import read_state
from evo_hpc.dispatch.executor import Dispatch
from evo_hpc.dispatch.slurm.parse import Listing, parse_accounting, parse_queue
from evo_hpc.dispatch.slurm.queue import Queue
from evo_hpc.evaluation.scores import read_evaluation
from evo_hpc.harness.analysis import run_analysis, version_inputs
from evo_hpc.harness.harness import discover, make_harness
from evo_hpc.jobs.spec import Intent, JobSpec, Start, Submission, job_name, spec_bytes
from evo_hpc.lineage.comparison import Comparison, read_comparison
from evo_hpc.lineage.decision import conclude, read_decision
from evo_hpc.lineage.looks import Look, read_looks
from evo_hpc.paths import COMPLETE, CampaignPaths, JobPaths, VersionPaths, version_id
from evo_hpc.stats import alpha_for_look
from evo_hpc.store.atomic import dump_json
from tests.controller.attempts import Owner, who, write_attempt
from tests.report.campaign_folder import STEPS, look_and_decide, new_campaign, publish_evaluation, publish_training

BETTER_EVERY = 50
"""One in so many is kept and promoted, and the parent of those that follow."""
MODEL = "v0001"


def make_versions(folder: Path, count: int) -> CampaignPaths:
    """A campaign of `count` versions (2 or more), all decided and analysed, that read_state takes; a second for each 2,000 or so."""
    paths = new_campaign(folder)
    with paths.campaign_yaml.open("a") as file:
        file.write("search: {proposals: 0}\nwatch: {every: 0}\n")
    publish_training(paths, MODEL)
    for version, right in (("v0000", 0.3), (MODEL, 0.3)):
        for suite in ("dev", "probe"):
            publish_evaluation(paths, version, suite, right)
    harness = make_harness(paths, discover(paths), 1)
    for version in ("v0000", MODEL):
        run_analysis(paths.version(version), harness, version_inputs(paths.version(version)))
        write_attempt(paths.version(version).job("evaluate", 0), executor="local")
    write_attempt(paths.version(MODEL).job("train", 0), executor="local")
    for version in ("v0000", MODEL):
        for job in paths.version(version).jobs():
            write_cost(job, Owner(), None, time.time())  # type: ignore[arg-type]  # else the first tick writes it for each, and the sweep sees that
    look_and_decide(paths)
    extend(paths, count)
    return paths


@contextmanager
def quick_yaml() -> Iterator[None]:
    """Parse files that are JSON as JSON, as all but a few of these campaigns are: the parser of YAML takes milliseconds a file."""
    slow = yaml_io._parse

    def parse(path: Path, text: str) -> Any:
        return CommentedMap(json.loads(text)) if text.startswith("{") else slow(path, text)

    yaml_io._parse = parse
    try:
        yield
    finally:
        yaml_io._parse = slow


def extend(paths: CampaignPaths, count: int) -> None:
    """Up to `count` versions in all."""
    copier, parent = _Copier(paths), read_state(paths).incumbent_before(None)
    for number in range(len(paths.versions()), count):
        better = number % BETTER_EVERY == 0
        copier.copy(version_id(number), parent, better)
        parent = version_id(number) if better else parent


def add_version(paths: CampaignPaths, number: int, parent: str = "v0000") -> VersionPaths:
    """One more, decided, of whatever number."""
    return _Copier(paths).copy(version_id(number), parent, better=False)


class _Copier:
    """Makes versions of MODEL."""

    def __init__(self, paths: CampaignPaths) -> None:
        self.paths, source = paths, paths.version(MODEL)
        looks = read_looks(paths)
        self.looks = len(looks)
        self.comparison: Comparison = read_comparison(source.comparisons()[0], looks)
        self.decision = read_decision(source.decision_yaml)
        own = {*source.comparisons(), source.decision_yaml, source.version_yaml}
        self.linked: list[tuple[str, str]] = []
        self.written: dict[str, bytes] = {}
        self.findings: dict[str, bytes] = {}
        for file in sorted(p for p in source.root.rglob("*") if p.is_file() and p not in own):
            name = file.relative_to(source.root).as_posix()
            content = file.read_bytes() if file.suffix != ".parquet" and "policy" not in file.parts else b""
            if MODEL.encode() not in content and file != source.recipe_yaml:
                self.linked.append((name, str(file)))
            elif source.analysis("h0001") in file.parents and file.name != COMPLETE:
                self.findings[name] = content
            else:
                self.written[name] = content
        self.folders = sorted({os.path.dirname(name) for name in (*(name for name, _ in self.linked), *self.written, *self.findings)})
        analysis = source.analysis("h0001")
        self.analysis = analysis.relative_to(source.root).as_posix()
        self.evaluations = {v: read_evaluation(paths.version(v), "dev") for v in ("v0000", MODEL)}

    def copy(self, name: str, parent: str, better: bool) -> VersionPaths:
        target = self.paths.version(name)
        root = str(target.root)
        for folder in self.folders:
            os.makedirs(f"{root}/{folder}", exist_ok=True)
        for file, source in self.linked:
            os.link(source, f"{root}/{file}")
        written = {file: content.replace(MODEL.encode(), name.encode()) for file, content in (*self.written.items(), *self.findings.items())}
        record = f"{self.analysis}/{COMPLETE}"
        complete = json.loads(written[record])
        for entry in complete["files"]:
            if (content := written.get(f"{self.analysis}/{entry['name']}")) is not None:
                entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        written[record] = dump_json(complete)
        written[target.version_yaml.name] = dump_json({"id": name, "parents": [parent], "author": "person", "hypothesis": "Again."})
        for file, content in written.items():
            Path(root, file).write_bytes(content)
        self._decide(target, parent, better)
        return target

    def _decide(self, target: VersionPaths, parent: str, better: bool) -> None:
        self.looks += 1
        evaluations = tuple(str(self.evaluations["v0000" if v == "v0000" else MODEL].id) for v in (parent, target.id))  # type: ignore[union-attr]
        alpha = alpha_for_look(self.looks, self.comparison.look.total_alpha)
        look = Look(**{
            **self.comparison.look.model_dump(),
            "number": self.looks, "version": target.id, "against": parent, "alpha": alpha, "evaluations": evaluations,
        })
        seen = self.comparison.at_look_alpha.model_copy(update={
            "alpha": alpha, "difference": 0.3, "ci_low": 0.1 if better else -0.1, "ci_high": 0.5, "excludes_zero": better,
        })
        made = self.comparison.model_copy(update={"version": target.id, "against": parent, "look": look, "at_look_alpha": seen}).signed()
        path = target.comparison(parent, "dev", self.looks)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(dump_json(made.record()))
        self.paths.look(self.looks).write_bytes(dump_json(look.model_dump(mode="json")))
        reading = self.decision.gate[0].model_copy(update={
            "against": parent, "role": "parent and incumbent", "look": self.looks, "alpha": alpha, "difference": seen.difference,
            "ci_low": seen.ci_low, "ci_high": seen.ci_high, "n_tasks": seen.n_tasks, "verdict": made.verdict,
        })
        kind, promoted = conclude("completed", [reading])
        decided: dict[str, Any] = {"version": target.id, "decision": kind, "promoted": promoted, "because": "So it came out."}
        # Most by a person, which is a file of a quarter of the size: it is YAML that the first reading of many versions waits for.
        decided |= {"gate": [reading.model_dump(mode="json")]} if better or self.looks % 10 == 0 else {"by": "person"}
        target.decision_yaml.write_bytes(dump_json(decided))


@dataclass
class ShownQueue:
    """squeue and sacct of a cluster that answer from lines kept here."""

    lines: list[str] = field(default_factory=list)
    asked: int = 0

    def queue(self) -> Listing:
        self.asked += 1
        return parse_queue(self.text)

    def accounting(self, since: float) -> Listing:
        self.asked += 1
        return parse_accounting("")

    @property
    def text(self) -> str:
        """As squeue prints it."""
        return "".join(line + "\n" for line in self.lines)


def add_live_jobs(paths: CampaignPaths, count: int) -> ShownQueue:
    """`count` more versions whose training waits in Slurm (every other one) or runs there."""
    cluster = {"executor": "slurm", "max_parallel_jobs": max(1, count), "slurm": {"poll_seconds": 2}}
    paths.cluster_yaml.write_text(json.dumps(cluster))
    state = read_state(paths, dispatch=Dispatch(Cluster()))
    campaign, parent = load_model(paths.campaign_yaml, Campaign), state.incumbent_before(None)
    profile = load_model(paths.cluster_yaml, Cluster)
    recipe, run = state.versions[MODEL].node.recipe, state.versions[MODEL].run
    shown, root, now = ShownQueue(), str(paths.root.resolve()), time.time()
    for number in range(len(state.versions), len(state.versions) + count):
        version = paths.version(version_id(number))
        job, running = version.job("train", 0), number % 2 == 0
        name, slurm_id = job_name(root, campaign.name, version.id, job.root.name), str(1000 + number)
        spec = JobSpec(name=name, kind="train", campaign=campaign.name, owner=version.id, attempt=0, config=campaign.model_dump(mode="json"),
                       cluster=profile.model_dump(mode="json"), params={"recipe": recipe.model_dump(mode="json"), "run": run, "init": "base/policy"})
        intent = Intent(name=name, spec_sha256="", owner=version.id, work=str(run), root=root, generation=1, written_at=now, executor="slurm")
        start = Start(number=0, generation=1, written_at=now, slurm_name=f"{name}-s0")
        version.root.mkdir()
        version.version_yaml.write_bytes(dump_json({"id": version.id, "parents": [parent], "author": "person", "hypothesis": "And again."}))
        version.recipe_yaml.write_bytes(paths.version(MODEL).recipe_yaml.read_bytes())
        job.root.mkdir(parents=True)
        job.spec.write_bytes(spec_bytes(spec))
        _write(job.intent, intent), _write(job.start(0), start)
        job.script(0).write_text("#!/bin/sh\n")
        _write(job.submission(0), Submission(number=0, job_id=slurm_id, written_at=now))
        if running:
            _begin(job, now)
        shown.lines.append("|".join([
            slurm_id, "N/A", f"{name}-s0", "RUNNING" if running else "PENDING", "None" if running else "Priority", f"{now:.0f}",
            f"{now:.0f}" if running else "N/A", "N/A", "n1" if running else "", "1", slurm_id,
        ]))
    return shown


def _begin(job: JobPaths, now: float) -> None:
    _write(job.claim(0), who(0, now))
    incarnation = job.incarnation(0)
    incarnation.root.mkdir()
    incarnation.heartbeat.write_bytes(dump_json({"time": now}))
    incarnation.progress.write_bytes(dump_json({"time": now, "step": 1, "steps": STEPS, "stage": "train"}))


def _write(path: Path, model: Config) -> None:
    path.write_bytes(dump_json(model.model_dump(mode="json")))


def dispatch_of(paths: CampaignPaths, shown: ShownQueue, poll_seconds: float = 2.0) -> Dispatch:
    """A controller's, whose Slurm is that queue."""
    cluster = load_model(paths.cluster_yaml, Cluster) if paths.cluster_yaml.exists() else Cluster()
    return Dispatch(cluster, _queue=Queue(shown, poll_seconds))
