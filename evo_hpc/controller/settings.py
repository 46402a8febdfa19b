"""The hand-written files of a campaign, checked one by one and together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.layout import check_layout
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.tasks import domain_of
from evo_hpc.domains.base import Domain
from evo_hpc.domains.environment import check_turns
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
    check_domain(paths.recipe_yaml, recipe, domain)
    return Settings(campaign, recipe, cluster)


def check_domain(where: object, recipe: Recipe, domain: Domain) -> None:
    """Raise UserError, naming the file, when a weight is of a component, or a limit of turns, that the domain does not have."""
    try:
        check_weights(recipe.reward, domain.component_names)
        check_turns(domain, recipe.tool_use.max_turns)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def check_compute(where: object, recipe: Recipe, ranks: int, model_config: Mapping[str, Any] | None) -> None:
    """Raise UserError, naming the file, when a recipe's layout does not fit the trainer's `ranks` or the base policy (None: not there yet)."""
    try:
        check_layout(recipe.compute, ranks, model_config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def model_config(paths: CampaignPaths, base_policy: str | None) -> Mapping[str, Any] | None:
    """config.json of the base policy; null while there is none. Every policy of a campaign has the same layers. Raises UserError."""
    if base_policy is None:
        return None
    path = paths.root / base_policy / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); put a whole Hugging Face model folder there") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: is not an object; put a whole Hugging Face model folder there")
    return config
