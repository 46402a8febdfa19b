"""YAML errors with file and line, suggestions for mistyped keys, comments kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evo_hpc.assets import asset_dir
from evo_hpc.config.campaign import Campaign
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import ConfigError, dump_model, dump_tree, load_model, load_tree


@pytest.mark.parametrize("text, message", [
    ("steps: 10\noptimizer:\n  lrr: 1.0\n", r"recipe\.yaml:3: unknown key `optimizer\.lrr`; did you mean `lr`\?"),
    ("steps: 10\nnothing_like_it: 1\n", r"recipe\.yaml:2: unknown key `nothing_like_it`; known here: .*steps"),
    ("rollout:\n  group_size: 1\n", r"recipe\.yaml:2: `rollout\.group_size`: .*greater than or equal to 2 \(found 1\)"),
    ("optimizer:\n  lr: fast\n", r"recipe\.yaml:2: `optimizer\.lr`: .*number.*'fast'"),
    ("optimizer:\n  lr: .nan\n", r"recipe\.yaml:2: `optimizer\.lr`: .*finite"),
    ("steps: 10\nsteps: 20\n", r"recipe\.yaml:2: found duplicate key"),
    ("steps: [1, 2\n", r"recipe\.yaml:\d: "),
    ("", r"recipe\.yaml:1: expected keys and values, found an empty file"),
    ("- 1\n", r"recipe\.yaml:1: expected keys and values"),
    ("steps: !!python/object:os.system {}\n", r"recipe\.yaml"),
    ("rollout:\n  prompts_per_step: 15\noptimizer:\n  mini_batches: 2\n", r"mini_batches \(2\) must divide rollout\.prompts_per_step \(15\)"),
    ("reward:\n  weights: {correct: 0.0}\n", r"recipe\.yaml:1: `reward`: at least one reward weight must be non-zero"),
])
def test_problems_are_placed(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model(path, Recipe)


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("step: 1\noptimizer:\n  lr: -1\n  betta1: 0.9\n")
    with pytest.raises(ConfigError) as caught:
        load_model(path, Recipe)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["3", "4", "1"]


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent.yaml: missing; write it"):
        load_model(tmp_path / "absent.yaml", Recipe)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary.yaml: cannot be read"):
        load_model(tmp_path / "binary.yaml", Recipe)
    (tmp_path / "control.yaml").write_text("a: \x00b")
    with pytest.raises(ConfigError, match="control.yaml"):
        load_model(tmp_path / "control.yaml", Recipe)


def test_a_dumped_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = Recipe(steps=3, reward={"weights": {"correct": 1.0, "format": 0.1}})  # type: ignore[arg-type]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(dump_model(recipe))
    assert load_model(path, Recipe) == recipe


def test_comments_survive_a_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# why\nsteps: 10  # few\n")
    tree = load_tree(path)
    tree["steps"] = 20
    assert dump_tree(tree).decode() == "# why\nsteps: 20  # few\n"


@pytest.mark.parametrize("name, model", [("campaign.yaml", Campaign), ("recipe.yaml", Recipe), ("cluster.yaml", Cluster)])
def test_the_shipped_demo_is_valid_and_commented(name: str, model: type) -> None:
    path = asset_dir("campaigns") / "demo" / name
    load_model(path, model)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("name, model", [("campaign.yaml", Campaign), ("recipe.yaml", Recipe), ("cluster.yaml", Cluster)])
def test_the_shipped_demo_shows_every_field(name: str, model: type) -> None:
    """Set or commented out, as the README says."""
    text = (asset_dir("campaigns") / "demo" / name).read_text()

    def fields(model: type) -> list[str]:
        found = []
        for field, info in model.model_fields.items():  # type: ignore[attr-defined]
            found.append(field)
            for inner in (info.annotation, *getattr(info.annotation, "__args__", ())):
                if hasattr(inner, "model_fields"):
                    found += fields(inner)
        return found

    assert [f for f in fields(model) if not re.search(rf"^[ #]*{f}:", text, re.M)] == []


def test_every_field_says_what_it_is() -> None:
    def undocumented(model: type, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            if not field.description:
                found.append(f"{model.__name__}.{prefix}{name}")
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                found += undocumented(field.annotation)
        return found

    assert [f for model in (Campaign, Recipe, Cluster) for f in undocumented(model)] == []
