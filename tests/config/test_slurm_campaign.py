"""The campaign to copy for a cluster of one's own: it is valid, leads to scripts, and its README speaks of commands that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evo_hpc.assets import asset_dir
from evo_hpc.config.cluster import Cluster
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.settings import load_settings
from evo_hpc.paths import CampaignPaths

SHIPPED = asset_dir("campaigns") / "slurm"


def commands() -> list[list[str]]:
    """Every `evo-hpc` line of the README's code blocks, in words, without its comment."""
    blocks = re.findall(r"```sh\n(.*?)```", (SHIPPED / "README.md").read_text(encoding="utf-8"), re.S)
    return [line.split("#")[0].split() for block in blocks for line in block.splitlines() if line.startswith("evo-hpc ")]


def test_its_settings_are_valid_together(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "first")
    settings = load_settings(CampaignPaths(tmp_path / "first"))
    assert settings.cluster.executor == "slurm" and settings.campaign.budget.gpu_hours is not None
    slurm = settings.cluster.slurm
    assert slurm.of("controller").gpus_per_node is None and slurm.of("train").gpus_per_node == "1"
    assert slurm.of("train").cpus_per_task == settings.cluster.trainer.threads + settings.cluster.engine.threads + 2


def test_what_is_to_be_filled_in_can_be(tmp_path: Path) -> None:
    """Each commented line is a field; filled in as its comment says the profile is valid."""
    text = (SHIPPED / "cluster.yaml").read_text(encoding="utf-8")
    assert text.count("<--") >= 8
    filled = re.sub(r"(?m)^( +)# (\w+: )", r"\1\2", text)
    filled = filled.replace("partition: null", "partition: gpu,gpu-long").replace("account: null", "account: me").replace("qos: null", "qos: normal")
    (tmp_path / "cluster.yaml").write_text(filled, encoding="utf-8")
    slurm = load_model(tmp_path / "cluster.yaml", Cluster).slurm
    assert (slurm.of("train").partition, slurm.of("evaluate").partition, slurm.of("train").account) == ("preemptible", "gpu,gpu-long", "me")
    assert slurm.of("controller").container is not None and slurm.of("controller").partition == "cpu"


def test_it_leads_to_scripts(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "campaigns" / "first")
    done = subprocess.run(
        [sys.executable, "-m", "evo_hpc.cli", "launch", tmp_path / "campaigns" / "first", "--dry-run", "--json"], capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    scripts = {script["name"]: script["text"] for script in json.loads(done.stdout)["scripts"]}
    assert len(scripts) == 4
    controller = next(text for name, text in scripts.items() if name.endswith("-controller"))
    evaluation = next(text for name, text in scripts.items() if "evaluate" in name)
    assert "gpus-per-node" not in controller and "#SBATCH --time=1440" in controller
    assert "#SBATCH --gpus-per-node=1" in evaluation and "#SBATCH --array=0-1" in evaluation


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_of_its_readme_exists(words: list[str], tmp_path: Path) -> None:
    from typer.main import get_command

    from evo_hpc.cli import app

    command = get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], words[2:])  # raises where an option or argument is not known
    assert words[2] == "workspace/campaigns/first"


def test_its_readme_names_all_that_a_run_needs(repository: Path) -> None:
    text = (SHIPPED / "README.md").read_text(encoding="utf-8")
    assert [words[1] for words in commands()] == ["doctor", "launch", "launch", "status", "cost", "pause", "stop", "resume", "finalize", "report"]
    targets = re.findall(r"`make ([\w-]+)`", text)
    assert targets and all(re.search(rf"(?m)^{target}:", (repository / "Makefile").read_text()) for target in targets)
    assert len(text.splitlines()) <= 45
