"""On the real engine too: neither chunks nor shards nor a cut change a token or a log-probability, on a CPU in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_what_is_decoded_together_changes_no_rollout(tmp_path: Path, repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.evaluation.engine_run", tmp_path], cwd=repository, capture_output=True, text=True, timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rollouts"] == 56 and found["different"] > 40, "rollouts that could differ"
    assert (found["chunks"], found["redone"]) == (4, 2)
    assert found["same"] == {"chunked": True, "single": True, "cut": True, "shards": True}
