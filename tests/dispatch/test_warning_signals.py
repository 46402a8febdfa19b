"""Whichever warning a profile may ask Slurm for, nobody dies of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from evo_hpc.config.slurm import Resources

ANNOTATION = Resources.model_fields["warning_signal"].annotation
NAMES = [name for choice in get_args(ANNOTATION) if choice is not type(None) for name in get_args(choice)]

OWNER = """
import os, signal, sys
from pathlib import Path
from evo_hpc.controller.ownership import owned
from evo_hpc.paths import CampaignPaths
with owned(CampaignPaths(Path(sys.argv[1]))) as ownership:
    os.kill(os.getpid(), getattr(signal, "SIG" + sys.argv[2]))
    print(ownership.warned, ownership.stop)
"""


def test_the_names_are_those_of_the_profile() -> None:
    assert NAMES and all(hasattr(signal, f"SIG{name}") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_controller_in_a_job_notes_the_warning(name: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OWNER, str(tmp_path), name], env={**os.environ, "SLURM_JOB_ID": "7"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True None\n"), done
