"""Deaths for memory, as the kernel counts them: both versions of control groups, and machines without."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.dispatch.memory import killed_for_memory


@pytest.mark.parametrize("own, files, expected", [
    ("0::/slurm/job_7/step_batch\n", {"slurm/job_7/step_batch/memory.events": "low 0\noom 2\noom_kill 2\n"}, 2),
    ("9:memory:/slurm/uid_0/job_7/step_batch\n1:name=x:/\n", {
        "memory/slurm/uid_0/job_7/step_batch/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "memory/slurm/uid_0/job_7/memory.oom_control": "under_oom 0\noom_kill 3\n",
        "memory/slurm/memory.oom_control": "oom_kill 100\n",
    }, 4),
    ("0::/a\n", {}, 0), ("0::/a\n", {"a/memory.events": "torn"}, 0), ("", {}, 0),
])
def test_deaths_are_counted(tmp_path: Path, own: str, files: dict[str, str], expected: int) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert killed_for_memory(tmp_path / "own", tmp_path / "groups") == expected


def test_a_machine_that_does_not_tell() -> None:
    assert killed_for_memory(Path("/nowhere"), Path("/nowhere")) == 0
