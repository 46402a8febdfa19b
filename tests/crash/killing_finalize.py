"""Runs `finalize` and is killed at its n-th durable write, as killing_controller.py does with the controller."""

from __future__ import annotations

import sys
from pathlib import Path

import killing_controller as killing

import evo_hpc.store.atomic as atomic

if __name__ == "__main__":
    import subprocess

    import evo_hpc.store.manifest as manifest
    from evo_hpc.controller.finalize import finalize
    from evo_hpc.paths import CampaignPaths

    atomic.os = manifest.os = killing.CountedOs()  # type: ignore[assignment]
    subprocess.Popen = killing.counted(subprocess.Popen)  # type: ignore[misc, assignment]
    finalize(CampaignPaths(Path(sys.argv[1])), "v0001")
    print(killing.count)
