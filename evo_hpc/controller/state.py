"""What the folders say: the campaign's whole state, read anew each time. Nothing is remembered between reads."""

from __future__ import annotations

from dataclasses import dataclass

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.tasks import check_tasks, domain_of
from evo_hpc.dispatch.local import JobStatus, observe
from evo_hpc.errors import UserError
from evo_hpc.evaluation.scores import EvaluationRecord, read_evaluation
from evo_hpc.jobs.spec import JobKind
from evo_hpc.lineage.tree import BadLineage, Node, load_tree_nodes
from evo_hpc.paths import CampaignPaths, OwnerPaths
from evo_hpc.rollout.reward import check_weights
from evo_hpc.store.manifest import Torn, read_complete


@dataclass(frozen=True)
class Settings:
    """The hand-written files of a campaign."""

    campaign: Campaign
    recipe: Recipe
    cluster: Cluster


@dataclass(frozen=True)
class VersionState:
    """One version and how far it is."""

    node: Node
    trained: bool
    """Its training run is committed (or it needs none)."""
    policy: str | None
    """Folder of the policy that is scored, relative to the campaign; null while there is none."""
    init: str | None
    """Folder that its training starts from; null while there is none."""
    evaluations: dict[str, EvaluationRecord | None]
    jobs: dict[JobKind, list[JobStatus]]
    compared: tuple[str, ...]
    """Versions that it has been compared with on dev."""

    @property
    def id(self) -> str:
        return self.node.id


@dataclass(frozen=True)
class CampaignState:
    """Everything the planner needs."""

    paths: CampaignPaths
    settings: Settings
    tasks_ready: bool
    base_policy: str | None
    """Folder of the base policy, relative to the campaign; null while there is none."""
    base_jobs: dict[JobKind, list[JobStatus]]
    versions: dict[str, VersionState]

    def all_jobs(self) -> list[JobStatus]:
        """Every attempt of every owner."""
        owners = [self.base_jobs, *(v.jobs for v in self.versions.values())]
        return [status for jobs in owners for attempts in jobs.values() for status in attempts]


def load_settings(paths: CampaignPaths) -> Settings:
    """campaign.yaml, recipe.yaml and cluster.yaml, checked one by one and together. Raises UserError."""
    if not paths.root.is_dir():
        raise UserError(f"{paths.root}: no such campaign folder. `evo-hpc demo` makes one, or copy campaigns/demo and edit it")
    if not paths.campaign_yaml.exists():
        raise UserError(f"{paths.root}: not a campaign folder (no {paths.campaign_yaml.name})")
    campaign = load_model(paths.campaign_yaml, Campaign)
    recipe = load_model(paths.recipe_yaml, Recipe)
    cluster = load_model(paths.cluster_yaml, Cluster) if paths.cluster_yaml.exists() else Cluster()
    domain, _ = domain_of(paths, campaign)
    _check_reward(paths.recipe_yaml, recipe, domain.component_names)
    return Settings(campaign, recipe, cluster)


def _check_reward(where: object, recipe: Recipe, component_names: tuple[str, ...]) -> None:
    try:
        check_weights(recipe.reward, component_names)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def read_state(paths: CampaignPaths, *, hashes: bool = False) -> CampaignState:
    """The state of a campaign. Raises UserError or StoreError when a folder is damaged: the controller refuses to guess."""
    settings = load_settings(paths)
    nodes, problems = load_tree_nodes(paths)
    if problems:
        raise BadLineage("\n".join(problems))
    domain, _ = domain_of(paths, settings.campaign)
    for node in nodes.values():
        _check_reward(node.paths.recipe_yaml, node.recipe, domain.component_names)
    base_policy = base_policy_of(paths, settings)
    versions: dict[str, VersionState] = {}
    for node in sorted(nodes.values(), key=lambda n: n.id):
        versions[node.id] = _version_state(paths, settings, node, nodes, base_policy)
    return CampaignState(
        paths=paths, settings=settings, tasks_ready=check_tasks(paths, settings.campaign, hashes=hashes),
        base_policy=base_policy, base_jobs=_jobs(paths.base), versions=versions,
    )


def _jobs(owner: OwnerPaths) -> dict[JobKind, list[JobStatus]]:
    jobs: dict[JobKind, list[JobStatus]] = {}
    for job in owner.jobs():
        jobs.setdefault(job.kind, []).append(observe(job))  # type: ignore[arg-type]
    return jobs


def base_policy_of(paths: CampaignPaths, settings: Settings) -> str | None:
    """Folder of the base policy, relative to the campaign; None while it is still to be made. Raises UserError."""
    choice = settings.campaign.base_model
    folder = paths.root / choice.path
    if folder.exists():
        if choice.supervised is not None:
            _whole(folder)
        elif not (folder / "config.json").exists():
            raise UserError(f"{folder}: not a model folder (no config.json); set base_model.path in {paths.campaign_yaml}")
        return choice.path
    if choice.supervised is None:
        raise UserError(f"{paths.campaign_yaml}: base_model.path {choice.path} does not exist ({folder}). Put a Hugging Face model folder "
                        "there, or give base_model.supervised so that one is made")
    return None


def _whole(folder: object) -> None:
    try:
        read_complete(folder)  # type: ignore[arg-type]
    except Torn as error:
        raise UserError(f"{error}. Remove {folder}: it is published again from the job that made it") from error


def _version_state(
    paths: CampaignPaths, settings: Settings, node: Node, nodes: dict[str, Node], base_policy: str | None
) -> VersionState:
    trained = node.recipe.steps == 0 or node.paths.train.exists()
    if node.paths.train.exists():
        _whole(node.paths.train)
    init = _init(paths, node, nodes, base_policy)
    if node.recipe.steps == 0:
        policy = init
    else:
        policy = node.paths.policy(node.policy_step).relative_to(paths.root).as_posix() if trained else None
        if trained and not node.paths.policy(node.policy_step).exists():
            raise BadLineage(f"{node.paths.recipe_yaml}: steps is {node.recipe.steps}, but the committed training has no policy of that "
                             "step: the recipe was edited after training. Restore it, or copy the version under a new id")
    suites = settings.campaign.evaluation.suites
    return VersionState(
        node=node, trained=trained, policy=policy, init=init, jobs=_jobs(node.paths),
        evaluations={suite: read_evaluation(node.paths, suite) for suite in suites},
        compared=tuple(p for p in node.version.parents if node.paths.comparison(p, "dev").exists()),
    )


def _init(paths: CampaignPaths, node: Node, nodes: dict[str, Node], base_policy: str | None) -> str | None:
    if node.version.init == "base":
        return base_policy
    source, _, step = node.version.init.partition("@")
    folder = nodes[source].paths.policy(int(step))
    if nodes[source].paths.train.exists() and not folder.exists():
        raise BadLineage(f"{node.paths.version_yaml}: init {node.version.init}: {source} kept no policy of step {step}")
    return folder.relative_to(paths.root).as_posix() if folder.exists() else None
