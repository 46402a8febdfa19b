"""Versions on disk and the tree they form; a hand-edited folder is checked, never guessed at."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
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
    nodes, problems = load_nodes(campaign.versions())
    problems += misnamed(campaign)
    problems += tree_problems(campaign, nodes, broken={p.id for p in campaign.versions()} - nodes.keys())
    return (nodes, problems) if problems else (with_inits(nodes), problems)


def load_nodes(folders: Iterable[VersionPaths]) -> tuple[dict[str, Node], list[str]]:
    """Those that can be read, by id, and one message for each that cannot."""
    nodes: dict[str, Node] = {}
    problems: list[str] = []
    for paths in folders:
        try:
            nodes[paths.id] = load_node(paths)
        except UserError as error:
            problems.append(str(error))
    return nodes, problems


def misnamed(campaign: CampaignPaths, names: Iterable[str] | None = None) -> list[str]:
    """One message for each folder that holds a version and is not named like one; `names`: what there is beside those that are."""
    folder = campaign.versions_folder
    if names is None:
        names = sorted(name for name in os.listdir(folder) if not VERSION_ID.match(name)) if folder.is_dir() else []
    return [
        f"{folder / name}: not a version's name; rename it to v and four digits (and set its id), or move it out of {folder.name}/"
        for name in names
        if not name.startswith(TEMP_PREFIX) and QUARANTINE_SUFFIX not in name and VersionPaths(folder / name).version_yaml.exists()
    ]


def tree_problems(campaign: CampaignPaths, nodes: Mapping[str, Node], broken: Collection[str] = ()) -> list[str]:
    """What keeps versions from forming a tree; parents that are `broken` are told of elsewhere."""
    problems: list[str] = []
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
    return problems + _cycles(nodes)


def with_inits(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """The versions of a tree, each with where it starts."""
    inits: dict[str, str] = {}
    for name in nodes:
        trail = [name]
        while (init := inits.get(trail[-1]) or _own_init(nodes[trail[-1]], nodes)) is None:
            trail.append(_hands_on(nodes[trail[-1]]))
        inits.update(dict.fromkeys(trail, init))
    return {name: node if node.init == inits[name] else replace(node, init=inits[name]) for name, node in nodes.items()}


def _own_init(node: Node, nodes: Mapping[str, Node]) -> str | None:
    """`base` or `vNNNN@STEP` of a version that trains; null where another one hands on where it starts itself."""
    if node.version.init is None:
        return None if node.version.parents else "base"
    if node.version.init == "base":
        return "base"
    return node.version.init if nodes[_hands_on(node)].recipe.steps else None


def _hands_on(node: Node) -> str:
    """The version that one's init is, or is taken from."""
    return _init_source(node) or node.version.parents[0]


def _init_source(node: Node) -> str | None:
    return None if node.version.init in (None, "base") else node.version.init.split("@")[0]


def _cycles(nodes: Mapping[str, Node]) -> list[str]:
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


__all__ = [
    "BadLineage", "ConfigError", "Node", "create_version", "load_node", "load_nodes", "load_tree_nodes", "misnamed", "node_changes", "read_hooks",
    "tree_problems", "with_inits",
]
