"""Every command of docs/slurm.md and of the README's part on Slurm, on a real cluster, in their order."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from evo_hpc.config.control import Control
from evo_hpc.config.yaml_io import load_model
from evo_hpc.controller.launch import controller_name
from tests.slurm.campaigns import Site, until_not
from tests.slurm.jobs import of_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def commands(text: str, campaign: Path, repository: Path) -> list[list[str]]:
    """Every `evo-hpc` line of its bash blocks, about that campaign."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines() if "evo-hpc" in line]
    places = {"CAMPAIGN", "workspace/campaigns/mine"}
    return [[str(repository / ".venv/bin/evo-hpc"), *(str(campaign) if word in places else word for word in words[1:])] for words in lines]


@pytest.mark.parametrize("document", ["README.md", "docs/slurm.md"])
def test_every_command(site: Site, repository: Path, document: str) -> None:
    paths = site.campaign()
    found = commands((repository / document).read_text(encoding="utf-8"), paths.root, repository)
    assert len(found) >= 4
    for words in found:
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        assert done.stdout.strip()
    assert subprocess.run([found[0][0], "stop", str(paths.root), "--now"], capture_output=True).returncode == 0
    assert not until_not(lambda: of_name(site.commands, controller_name(paths, "crash")) or site.live(), 60)


def test_the_example_of_control_yaml(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs/slurm.md").read_text(encoding="utf-8")
    example = next(block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if "control.yaml" in block)
    (tmp_path / "control.yaml").write_text(example)
    control = load_model(tmp_path / "control.yaml", Control)
    assert json.loads(control.model_dump_json())["cancel"] == ["v0004"] and control.state == "pause"
