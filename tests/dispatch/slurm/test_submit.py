"""Submission: the script and nothing else on disk, no more environment than allowed, every end of sbatch told apart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evo_hpc.dispatch.slurm.errors import SlurmBusy, SlurmMissing, SlurmRefused, SlurmUnavailable
from evo_hpc.dispatch.slurm.submit import submit

TEXT = "#!/bin/bash\necho 'ünïcode'\n"


def fake_sbatch(folder: Path, code: str) -> dict[str, str]:
    """An environment whose PATH leads to an sbatch of ours."""
    programs = folder / "programs"
    programs.mkdir()
    sbatch = programs / "sbatch"
    sbatch.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{code}\n")
    sbatch.chmod(0o755)
    return {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder)}


def test_a_script_is_handed_over_and_nothing_else_is_left(
    hostile_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "of-another-world")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    seen = tmp_path / "seen.json"
    environment = fake_sbatch(
        tmp_path, f"json.dump([sys.argv[1:], dict(os.environ), open(sys.argv[-1]).read()], open({str(seen)!r}, 'w'))\n"
        "print('Submitted batch job 123')"
    )
    script = hostile_path / "start-000000.sh"
    assert submit(environment, TEXT, script, seconds=20) == "123"
    arguments, found, text = json.loads(seen.read_text())
    assert (arguments, text) == ([str(script)], TEXT)
    assert {name: value for name, value in found.items() if name != "LC_CTYPE"} == environment
    assert [path.name for path in hostile_path.iterdir()] == ["start-000000.sh"] and not script.is_symlink()
    assert capfd.readouterr() == ("", "")


def test_what_a_site_prints_is_not_taken_for_the_answer(tmp_path: Path) -> None:
    environment = fake_sbatch(tmp_path, "print('Note: job 7 of yours is old\\nSubmitted batch job 88 on cluster east\\nbye')")
    assert submit(environment, TEXT, tmp_path / "x.sh", seconds=20) == "88"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("sbatch: error: invalid partition specified: none", 1, SlurmRefused),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy", 1, SlurmBusy),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1, SlurmUnavailable),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1, SlurmUnavailable),
        ("", 0, SlurmUnavailable),
    ],
)
def test_every_end_of_sbatch_is_told_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, code: int, error: type[Exception]) -> None:
    environment = fake_sbatch(tmp_path, f"sys.stderr.write('{words}')\nsys.exit({code})")
    with pytest.raises(error) as caught:
        submit(environment, TEXT, tmp_path / "x.sh", seconds=20)
    assert type(caught.value) is error, "a busy cluster is no refusal for good"
    assert capfd.readouterr() == ("", "")


def test_an_sbatch_that_does_not_answer_is_given_up_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    environment = fake_sbatch(
        tmp_path, f"import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nopen({str(pid)!r}, 'w').write(str(child.pid))\nchild.wait()"
    )
    began = time.monotonic()
    with pytest.raises(SlurmUnavailable):
        submit(environment, TEXT, tmp_path / "x.sh", seconds=1)
    assert time.monotonic() - began < 10
    state = Path("/proc", pid.read_text(), "stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "what sbatch started lives on"
        time.sleep(0.05)


def test_a_machine_without_slurm_is_said(tmp_path: Path) -> None:
    with pytest.raises(SlurmMissing, match="sbatch"):
        submit({"PATH": str(tmp_path)}, TEXT, tmp_path / "x.sh", seconds=5)


def test_submitit_is_loaded_when_something_is_submitted() -> None:
    program = "import sys, evo_hpc.dispatch.slurm.submit, evo_hpc.controller.launch; sys.exit('submitit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
