"""Versions on disk and the tree they form; a hand-edited folder is checked, never guessed at."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import ConfigError, dump_model, load_model
from evo_hpc.errors import UserError
from evo_hpc.lineage.factors import Change, changes, recipe_diff
from evo_hpc.lineage.version import Version
from evo_hpc.paths import QUARANTINE_SUFFIX, TEMP_PREFIX, VERSION_ID, CampaignPaths, VersionPaths
from evo_hpc.store.atomic import StoreError, fsync_folder, temp_path, write_bytes


class BadLineage(UserError):
    """Version folders that do not form a tree."""


@dataclass(frozen=True)
class Node:
    """One version as its folder says."""

    paths: VersionPaths
    version: Version
    recipe: Recipe
    hooks: dict[str, str]
    init: str = "base"
    """Where training starts, defaults resolved: `base` or `v0003@50`."""

    @property
    def id(self) -> str:
        return self.version.id

    @property
    def policy_step(self) -> int:
        """The step whose policy is scored: the last one (0 = the init itself)."""
        return self.recipe.steps


def read_hooks(folder: Path) -> dict[str, str]:
    """File name -> content of a hooks folder; empty when there is none."""
    if not folder.is_dir():
        return {}
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.py"))}


def load_node(paths: VersionPaths) -> Node:
    """One version. Raises ConfigError or BadLineage, with file and line."""
    version = load_model(paths.version_yaml, Version)
    if version.id != paths.id:
        raise BadLineage(f"{paths.version_yaml}: says `id: {version.id}` in a folder named {paths.id}; a copied version "
                         "needs its own id: set it to the folder's name")
    hooks = read_hooks(paths.hooks)
    if hooks:
        raise BadLineage(f"{paths.hooks}: hooks are not supported yet (they need the sandbox); remove {', '.join(hooks)}")
    return Node(paths, version, load_model(paths.recipe_yaml, Recipe), hooks)


def load_tree_nodes(campaign: CampaignPaths) -> tuple[dict[str, Node], list[str]]:
    """All versions that can be read, and one message for each problem (bad files, lost parents, cycles)."""
    nodes: dict[str, Node] = {}
    problems: list[str] = []
    for paths in campaign.versions():
        try:
            nodes[paths.id] = load_node(paths)
        except UserError as error:
            problems.append(str(error))
    for path in sorted(campaign.versions_folder.iterdir()) if campaign.versions_folder.is_dir() else []:
        if path.is_dir() and not VERSION_ID.match(path.name) and (path / campaign.version("v0000").version_yaml.name).exists() \
                and not path.name.startswith(TEMP_PREFIX) and QUARANTINE_SUFFIX not in path.name:
            problems.append(f"{path}: not a version's name; rename it to v and four digits (and set its id), or move it out of {path.parent.name}/")
    broken = {p.id for p in campaign.versions()} - nodes.keys()
    for node in nodes.values():
        for parent in node.version.parents:
            if parent == node.id:
                problems.append(f"{node.paths.version_yaml}: {node.id} is its own parent; set `parents` to the version that it changes")
            elif parent not in nodes and parent not in broken:
                problems.append(f"{node.paths.version_yaml}: parent {parent} does not exist: correct `parents`, or restore "
                                f"{campaign.version(parent).root} if its folder was removed")
        source = _init_source(node)
        if source is not None and source not in nodes and source not in broken:
            problems.append(f"{node.paths.version_yaml}: init {node.version.init} names a version that does not exist")
        if source in nodes and node.version.init != f"{source}@{nodes[source].recipe.steps}":
            problems.append(f"{node.paths.version_yaml}: init {node.version.init}: {source} keeps the policy of its last step only; "
                            f"write {source}@{nodes[source].recipe.steps}")
    problems += _cycles(nodes)
    if not problems:
        nodes = {name: replace(node, init=_resolved_init(node, nodes)) for name, node in nodes.items()}
    return nodes, problems


def _resolved_init(node: Node, nodes: dict[str, Node]) -> str:
    """`base` or `vNNNN@STEP` of a version that trains: a version without RL hands on where it starts itself."""
    if node.version.init is None:
        return _resolved_init(nodes[node.version.parents[0]], nodes) if node.version.parents else "base"
    if node.version.init == "base":
        return "base"
    source = nodes[node.version.init.split("@")[0]]
    return node.version.init if source.recipe.steps else _resolved_init(source, nodes)


def _init_source(node: Node) -> str | None:
    return None if node.version.init in (None, "base") else node.version.init.split("@")[0]


def _cycles(nodes: dict[str, Node]) -> list[str]:
    """One message a cycle over parents and inits."""
    problems: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            cycle = [*trail[trail.index(name) :], name]
            if len(cycle) > 2 or name not in nodes[name].version.parents:  # a version that is its own parent was named before
                problems.append(f"{nodes[name].paths.version_yaml}: {' -> '.join(cycle)} is a cycle")
            return
        if name in done or name not in nodes:
            return
        for before in {*nodes[name].version.parents, *filter(None, [_init_source(nodes[name])])}:
            visit(before, [*trail, name])
        done.add(name)

    for name in nodes:
        visit(name, [])
    return problems


def create_version(campaign: CampaignPaths, version: Version, recipe: Recipe, parent: Node | None) -> None:
    """Make a version's folder appear at once, with its recipe and its diff against the parent.

    Idempotent for the same version. Raises BadLineage when the folder is there with another version.yaml.
    """
    final = campaign.version(version.id)
    temp = VersionPaths(temp_path(final.root))
    write_bytes(temp.version_yaml, dump_model(version))
    write_bytes(temp.recipe_yaml, dump_model(recipe))
    if parent is not None:
        write_bytes(temp.intervention_diff, recipe_diff(parent.recipe, recipe, (parent.id, version.id)).encode())
    try:
        os.rename(temp.root, final.root)
        fsync_folder(final.root.parent)
    except OSError as error:
        shutil.rmtree(temp.root)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise StoreError(f"{final.root}: could not be made ({error.strerror})") from error
        if not final.version_yaml.exists() or load_model(final.version_yaml, Version) != version:
            raise BadLineage(f"{final.root}: exists already with other content") from error


def node_changes(parent: Node, child: Node) -> list[Change]:
    """What a child changes against its parent: recipe, hooks, and where training starts."""
    found = changes(parent.recipe, child.recipe, parent.hooks, child.hooks)
    if parent.init != child.init:
        found.append(Change("init", parent.init, child.init, "init"))
    return found


__all__ = ["BadLineage", "ConfigError", "Node", "create_version", "load_node", "load_tree_nodes", "node_changes", "read_hooks"]
