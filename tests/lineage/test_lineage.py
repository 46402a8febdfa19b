"""Versions on disk, the factor of an intervention, and hand-edited trees."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.factors import FACTOR_OF_FIELD, changes, factors, recipe_diff
from evo_hpc.lineage.identity import run_identity
from evo_hpc.lineage.tree import BadLineage, create_version, load_node, load_tree_nodes, node_changes
from evo_hpc.lineage.version import Version
from evo_hpc.paths import CampaignPaths

BASE = Recipe()


def with_(**sections: dict) -> Recipe:
    """BASE with some sections' fields changed."""
    data = BASE.model_dump()
    for name, value in sections.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    return Recipe.model_validate(data)


@pytest.mark.parametrize("child, expected", [
    (BASE, []),
    (with_(optimizer={"lr": 2e-4}), ["optimizer"]),
    (with_(optimizer={"lr": 2e-4, "kl_coef": 0.0}), ["optimizer"]),
    (with_(reward={"weights": {"correct": 1.0, "format": 0.1}}), ["reward"]),
    (with_(data_filter={"difficulty": {"digits": [3]}}), ["data_filter"]),
    (with_(rollout={"temperature": 0.8}), ["rollout"]),
    (with_(tool_use={"system_prompt": "add"}), ["tool_use"]),
    (with_(seed=1), ["seed"]),
    (with_(steps=7), ["budget"]),
    (with_(checkpoint={"every": 5}), ["system"]),
    (with_(optimizer={"lr": 2e-4}, rollout={"temperature": 0.8}), ["optimizer", "rollout"]),
])
def test_the_factor_is_computed_from_the_difference(child: Recipe, expected: list[str]) -> None:
    found = changes(BASE, child)
    assert factors(found) == expected
    assert (recipe_diff(BASE, child, ("a", "b")) == "") == (not found)
    identities = {run_identity(r, {}, init="i", seed=0, task_set="t") for r in (BASE, child)}
    assert (len(identities) == 1) == (set(factors(found)) <= {"system"}), "saving and packing do not make another run"


def test_every_field_has_a_factor() -> None:
    assert set(FACTOR_OF_FIELD) == set(Recipe.model_fields)


def test_hooks_count_with_their_own_factor() -> None:
    found = changes(BASE, BASE, {"reward.py": "a"}, {"reward.py": "b", "filter.py": "c"})
    assert factors(found) == ["data_filter", "reward"]
    runs = [run_identity(BASE, hooks, init=init, seed=seed, task_set=tasks) for hooks, init, seed, tasks in (
        ({}, "i", 0, "t"), ({"reward.py": "a"}, "i", 0, "t"), ({}, "j", 0, "t"), ({}, "i", 1, "t"), ({}, "i", 0, "u"),
    )]
    assert len(set(runs)) == len(runs)


@given(st.sampled_from(["optimizer", "rollout"]), st.floats(min_value=1e-6, max_value=1.0, exclude_min=True))
def test_changes_are_empty_only_for_equal_recipes(section: str, value: float) -> None:
    child = with_(**{section: {"lr" if section == "optimizer" else "temperature": value}})
    assert (changes(BASE, child) == []) == (child == BASE)
    assert [(c.after, c.before) for c in changes(BASE, child)] == [(c.before, c.after) for c in changes(child, BASE)]


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignPaths:
    paths = CampaignPaths(tmp_path / "campaign")
    create_version(paths, Version(id="v0000"), with_(steps=0), None)
    create_version(paths, Version(id="v0001", parents=["v0000"]), BASE, load_node(paths.version("v0000")))
    return paths


def test_versions_round_trip_and_are_made_once(campaign: CampaignPaths) -> None:
    nodes, problems = load_tree_nodes(campaign)
    assert problems == [] and list(nodes) == ["v0000", "v0001"]
    assert factors(node_changes(nodes["v0000"], nodes["v0001"])) == ["budget"]
    assert "+steps: 100" in campaign.version("v0001").intervention_diff.read_text()
    create_version(campaign, nodes["v0001"].version, BASE, nodes["v0000"])
    with pytest.raises(BadLineage, match="exists already"):
        create_version(campaign, Version(id="v0001", hypothesis="another"), BASE, None)


def test_a_version_copied_by_hand_needs_its_own_id_and_then_works(campaign: CampaignPaths) -> None:
    shutil.copytree(campaign.version("v0001").root, campaign.version("v0002").root)
    _, problems = load_tree_nodes(campaign)
    assert len(problems) == 1 and "says `id: v0001` in a folder named v0002" in problems[0]
    path = campaign.version("v0002").version_yaml
    path.write_text("# mine\n" + path.read_text().replace("id: v0001", "id: v0002"))
    nodes, problems = load_tree_nodes(campaign)
    assert problems == [] and "v0002" in nodes


def test_a_removed_parent_is_named(campaign: CampaignPaths) -> None:
    shutil.rmtree(campaign.version("v0000").root)
    _, problems = load_tree_nodes(campaign)
    assert len(problems) == 1 and "parent v0000 does not exist" in problems[0] and "version.yaml" in problems[0]


def test_cycles_are_named(campaign: CampaignPaths) -> None:
    path = campaign.version("v0000").version_yaml
    path.write_text("id: v0000\nparents: [v0001]\n")
    _, problems = load_tree_nodes(campaign)
    assert [p for p in problems if "is a cycle" in p] and "v0000 -> v0001 -> v0000" in " ".join(problems).replace("v0001 -> v0000 -> v0001", "v0000 -> v0001 -> v0000")
    path.write_text("id: v0000\nparents: [v0000]\n")
    assert "is its own parent" in " ".join(load_tree_nodes(campaign)[1])


@pytest.mark.parametrize("text, message", [
    ("id: v0001\nparent: [v0000]\n", r"version\.yaml:2: unknown key `parent`; did you mean `parents`\?"),
    ("id: seven\n", r"version\.yaml:1: `id`"),
    ("id: v0001\ninit: v0000\n", r"version\.yaml:2: `init`: must be `base` or `vNNNN@STEP`"),
    ("id: v0001\ninit: v0009@3\n", "init v0009@3 names a version that does not exist"),
    ("id: v0001\nparents: [v0000]\ninit: v0000@7\n", "v0000 keeps the policy of its last step only; write v0000@0"),
    ("id: v0001\nparents: [v0000]\ninit: v0001@100\n", "v0001 -> v0001 is a cycle"),
])
def test_bad_version_files_are_placed(campaign: CampaignPaths, text: str, message: str) -> None:
    import re

    campaign.version("v0001").version_yaml.write_text(text)
    assert re.search(message, "\n".join(load_tree_nodes(campaign)[1]))


def test_init_defaults_to_the_parents_own_and_its_change_is_a_change(campaign: CampaignPaths) -> None:
    nodes, _ = load_tree_nodes(campaign)
    create_version(campaign, Version(id="v0002", parents=["v0001"], init="v0001@100"), BASE, nodes["v0001"])
    create_version(campaign, Version(id="v0003", parents=["v0002"]), BASE, nodes["v0001"])
    create_version(campaign, Version(id="v0004", parents=["v0000"], init="v0000@0"), BASE, nodes["v0000"])
    nodes, problems = load_tree_nodes(campaign)
    assert problems == []
    assert {name: node.init for name, node in nodes.items()} == {
        "v0000": "base", "v0001": "base", "v0002": "v0001@100", "v0003": "v0001@100", "v0004": "base",
    }
    assert [(c.field, c.before, c.after) for c in node_changes(nodes["v0001"], nodes["v0002"])] == [("init", "base", "v0001@100")]
    assert node_changes(nodes["v0002"], nodes["v0003"]) == []


def test_versions_are_in_order_of_number(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    for name in ("v10000", "v9999", "v0002"):
        create_version(paths, Version(id=name), BASE, None)
    assert [v.id for v in paths.versions()] == ["v0002", "v9999", "v10000"]
