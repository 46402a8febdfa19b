"""Every problem of a campaign's folders at once: what the controller would stop at, and damage that it has not met yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from evo_hpc.agent.proposal import read_round
from evo_hpc.agent.rules import load_rules
from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.names import check_names
from evo_hpc.controller.preflight import check_model
from evo_hpc.controller.settings import load_settings
from evo_hpc.controller.state import base_policy_of, read_state
from evo_hpc.controller.tasks import check_task_files, read_manifest
from evo_hpc.dispatch.attempt import read_attempt, load_record
from evo_hpc.errors import EvoError
from evo_hpc.evaluation.scores import read_evaluation
from evo_hpc.jobs.spec import load_spec
from evo_hpc.lineage.comparison import read_comparison
from evo_hpc.lineage.looks import read_looks
from evo_hpc.harness.analysis import read_analysis, read_watches
from evo_hpc.harness.harness import current_harness, discover
from evo_hpc.harness.runner import check as check_analyzers
from evo_hpc.lineage.decision import read_decision
from evo_hpc.lineage.sealed import sealed_problems
from evo_hpc.lineage.tree import load_tree_nodes
from evo_hpc.paths import COMPLETE, CampaignPaths
from evo_hpc.store.lease import current_owner
from evo_hpc.store.manifest import read_complete


T = TypeVar("T")


def find_problems(paths: CampaignPaths) -> list[str]:
    """One message a problem, in the order of the folders; empty when the campaign is sound."""
    problems: list[str] = []
    seen: set[str] = set()

    def check(what: Callable[[], T]) -> T | None:
        try:
            return what()
        except OSError as error:
            _add(f"{error.filename}: {error.strerror}. Check the owner and mode of it and of the folders above")
        except EvoError as error:
            for line in str(error).splitlines():
                _add(line)
        return None

    def _add(line: str) -> None:
        where = line.split(": ")[0]  # one message a place: a later check of the same file says the same with other words
        if where not in seen:
            seen.add(where)
            problems.append(line)

    for path, model in ((paths.campaign_yaml, Campaign), (paths.recipe_yaml, Recipe), (paths.cluster_yaml, Cluster)):
        if path.exists():
            check(lambda path=path, model=model: load_model(path, model))
    state = check(lambda: read_state(paths, hashes=True))
    if state is not None:
        check(lambda: check_names(state))
    settings = check(lambda: load_settings(paths))
    if settings is not None:
        tasks = check(lambda: read_manifest(paths, settings.campaign))
        if tasks is not None:
            check(lambda: check_task_files(paths, tasks))
            for line in check(lambda: sealed_problems(paths, tasks.splits["sealed"].task_set)) or []:
                _add(line)
    found = check(lambda: discover(paths))
    if found is not None:
        check(lambda: [load_rules(found.rules), check_analyzers(found.analyzers)])
    check(lambda: current_harness(paths))
    for _, path in paths.rounds():
        check(lambda path=path: read_round(path))
    looks = check(lambda: read_looks(paths))
    check(lambda: current_owner(paths))
    for line in load_tree_nodes(paths)[1]:
        _add(line)
    for version in paths.versions():
        for suite in ("dev", "probe"):
            check(lambda version=version, suite=suite: read_evaluation(version, suite))
        if version.decision_yaml.exists():
            check(lambda version=version: read_decision(version.decision_yaml))
        for _, analysis in version.analyses():
            check(lambda version=version, analysis=analysis: read_analysis(version, analysis.name))
        check(lambda version=version: read_watches(version))
        for comparison in version.comparisons():
            check(lambda comparison=comparison: read_comparison(comparison, looks) if looks is not None else None)
    for owner in (paths.base, paths.final, *paths.versions()):
        for job in owner.jobs():
            check(lambda job=job: (read_attempt(job), load_record(job)))
            check(lambda job=job: load_spec(job) if job.spec.exists() else None)
    if settings is not None:
        base_policy = check(lambda: base_policy_of(paths, settings))
        if base_policy is not None:
            check(lambda: check_model(paths.root / base_policy))
    for folder in _published(paths):
        check(lambda folder=folder: read_complete(folder, hashes=True))
    return problems


def _published(paths: CampaignPaths) -> Iterator[Path]:
    """Folders that must be whole."""
    if (paths.base.policy / COMPLETE).exists():
        yield paths.base.policy
    for version in paths.versions():
        if version.train.exists():
            yield version.train
        evaluations = version.evaluation("dev").parent
        if evaluations.is_dir():
            yield from (p for p in sorted(evaluations.iterdir()) if p.is_dir() and not p.name.startswith(".") and ".quarantined" not in p.name)
