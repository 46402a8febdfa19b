"""The hand-written files of a campaign, checked one by one and together."""

from __future__ import annotations

from dataclasses import dataclass

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.tasks import domain_of
from evo_hpc.errors import UserError
from evo_hpc.lineage.tree import read_hooks
from evo_hpc.paths import CampaignPaths
from evo_hpc.rollout.reward import check_weights


@dataclass(frozen=True)
class Settings:
    """The hand-written files of a campaign."""

    campaign: Campaign
    recipe: Recipe
    cluster: Cluster


def load_settings(paths: CampaignPaths) -> Settings:
    """campaign.yaml, recipe.yaml and cluster.yaml, checked one by one and together. Raises UserError."""
    if paths.root.is_file():
        raise UserError(f"{paths.root}: is a file; give the folder that holds campaign.yaml")
    if not paths.root.is_dir():
        raise UserError(f"{paths.root}: no such campaign folder. `evo-hpc demo` makes one, or copy campaigns/demo and edit it")
    if not paths.campaign_yaml.exists():
        raise UserError(f"{paths.root}: not a campaign folder (no {paths.campaign_yaml.name}); give one that has it, e.g. workspace/campaigns/demo")
    campaign = load_model(paths.campaign_yaml, Campaign)
    recipe = load_model(paths.recipe_yaml, Recipe)
    cluster = load_model(paths.cluster_yaml, Cluster) if paths.cluster_yaml.exists() else Cluster()
    if hooks := read_hooks(paths.hooks):
        raise UserError(f"{paths.hooks}: hooks are not supported yet (they need the sandbox); remove {', '.join(hooks)}")
    domain, _ = domain_of(paths, campaign)
    check_reward(paths.recipe_yaml, recipe, domain.component_names)
    return Settings(campaign, recipe, cluster)


def check_reward(where: object, recipe: Recipe, component_names: tuple[str, ...]) -> None:
    """Raise UserError, naming the file, when a weight is of a component that the domain does not have."""
    try:
        check_weights(recipe.reward, component_names)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
