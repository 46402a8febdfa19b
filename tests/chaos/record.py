"""Records what a live cluster shows of every scenario: `python -m tests.chaos.record [SCENARIO...]`, SLURM_CONF naming the cluster."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.chaos.scenarios import SCENARIOS, play, real

RECORDED = Path(__file__).resolve().parent / "recorded"


def recorded(name: str) -> dict[str, Any]:
    """What the real cluster showed when it was last recorded."""
    loaded: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return loaded


def main(names: list[str]) -> None:
    """Play them one after the other; each is written when it is done."""
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        for name in names or list(SCENARIOS):
            outcome = play(name, real(Path(folder) / name, dict(os.environ)))
            (RECORDED / f"{name}.json").write_text(json.dumps(outcome, indent=1, sort_keys=True) + "\n")
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
