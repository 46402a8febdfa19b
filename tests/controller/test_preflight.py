"""What is missing is said before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.controller import preflight
from evo_hpc.controller.preflight import NotReady, check_machine, check_model
from evo_hpc.controller.validate import find_problems
from evo_hpc.domains.arithmetic.policy import write_policy_files
from evo_hpc.domains.tokenizer import VocabularyError
from evo_hpc.training.errors import UnsupportedModelError
from tests.crash.campaign import make_campaign


def test_this_machine_is_ready(tmp_path: Path) -> None:
    check_machine(Cluster(), tmp_path)


def test_a_missing_engine_is_named_with_the_remedy(tmp_path: Path, repository: Path) -> None:
    """In an interpreter that really has no vllm, torch or megatron: the campaign stops at once, exit code 2, nothing written."""
    campaign = tmp_path / "campaign"
    campaign.mkdir()
    for name in ("campaign.yaml", "recipe.yaml", "cluster.yaml"):
        (campaign / name).write_text((repository / "campaigns" / "demo" / name).read_text())
    hide = (
        "import importlib.util, runpy, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name.split('.')[0] in ('vllm', 'torch', 'megatron') else real(name, *a)\n"
        "sys.argv = ['evo-hpc', 'run', sys.argv[1]]\n"
        "runpy.run_module('evo_hpc.cli', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", hide, str(campaign)], capture_output=True, text=True)
    assert done.returncode == 2
    for name in ("vllm is not installed (sampling needs it)", "torch is not installed", "megatron.core is not installed", "make setup"):
        assert name in done.stderr
    assert sorted(p.name for p in campaign.iterdir()) == ["campaign.yaml", "cluster.yaml", "recipe.yaml"]


def test_no_room_and_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(NotReady, match="MiB free on this filesystem"):
        check_machine(Cluster(), tmp_path)
    with pytest.raises(NotReady, match="/no/such/python is not an executable"):
        check_machine(Cluster(python="/no/such/python"), tmp_path)


def edit(folder: Path, **fields: object) -> None:
    write_policy_files(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_model_that_no_job_could_train_is_refused(tmp_path: Path) -> None:
    edit(tmp_path)
    check_model(tmp_path)
    edit(tmp_path, vocab_size=16)
    with pytest.raises(VocabularyError, match="ids below 16 only"):
        check_model(tmp_path)
    edit(tmp_path, attention_bias=True)
    with pytest.raises(UnsupportedModelError, match=r"config\.json: attention_bias is True"):
        check_model(tmp_path)


def test_the_campaigns_own_model_is_looked_at_by_validate_and_before_a_run(tmp_path: Path) -> None:
    paths, mine = make_campaign(tmp_path / "campaign"), tmp_path / "mine"
    paths.campaign_yaml.write_text(paths.campaign_yaml.read_text().replace("supervised: {steps: 1}", f"path: {json.dumps(str(mine))}"))
    edit(mine, vocab_size=16)
    assert any("ids below 16 only" in line for line in find_problems(paths))
    done = subprocess.run([sys.executable, "-m", "evo_hpc.cli", "run", str(paths.root)], capture_output=True, text=True)
    assert done.returncode == 2 and "ids below 16 only" in done.stderr
    assert not list(paths.root.glob("versions/*/jobs"))


def test_looking_at_a_model_imports_nothing_large() -> None:
    code = "import sys, evo_hpc.controller.preflight; print(sorted({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
