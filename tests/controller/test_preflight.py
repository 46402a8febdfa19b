"""What is missing is said before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evo_hpc.config.cluster import Cluster
from evo_hpc.controller import preflight
from evo_hpc.controller.preflight import NotReady, check_machine


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
