"""The benchmark scripts of docs/benchmarks.md run and give what they say, at a tiny size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(repository: Path, script: str, *arguments: str) -> object:
    done = subprocess.run([sys.executable, repository / "benchmarks" / script, *arguments, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_coverage(repository: Path) -> None:
    cells = run(repository, "coverage.py", "--tasks", "30", "--suites", "200", "--draws", "1000")
    assert len(cells) == 4 and all(88 <= c["t"] <= 100 for c in cells)  # type: ignore[arg-type, union-attr]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainer_and_rollout(repository: Path) -> None:
    (trainer,) = run(repository, "trainer.py", "--size", "0.45M", "--samples", "8", "--repetitions", "1")  # type: ignore[misc]
    assert trainer["ratio"] > 0 and trainer["tokens"] > 0
    rollout = run(repository, "rollout.py", "--size", "0.45M", "--prompts", "2", "--tokens", "5", "--rounds", "1")
    assert rollout


def test_every_script_is_in_the_docs(repository: Path) -> None:
    text = (repository / "docs" / "benchmarks.md").read_text()
    named = set(re.findall(r"benchmarks/(\w+\.py)", text))
    assert named == {p.name for p in (repository / "benchmarks").glob("*.py")}
