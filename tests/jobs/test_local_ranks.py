"""Several ranks of a role on this machine: told where they are, ended together, never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = """
import json, os, signal, sys, time
from pathlib import Path
folder, what, arguments = Path(sys.argv[1]), sys.argv[2], dict(zip(sys.argv[3::2], sys.argv[4::2]))
rank = int(os.environ["RANK"])
told = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
signal.signal(signal.SIGTERM, lambda *_: ((folder / f"stopped-{rank}").touch(), sys.exit(0)))
(folder / f"rank-{rank}.new").write_text(json.dumps({**told, **arguments, "pid": os.getpid(), "parent": os.getppid()}))
(folder / f"rank-{rank}.new").rename(folder / f"rank-{rank}")
if what == "done":
    sys.exit(0)
if what == "fails" and rank == 1:
    sys.exit(2)
if what == "dies" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def start(folder: Path, what: str, count: int = 3) -> subprocess.Popen[bytes]:
    script = folder / "rank.py"
    script.write_text(RANK)
    own = [sys.executable, str(script), str(folder), what]
    return subprocess.Popen([sys.executable, "-m", "evo_hpc.jobs.ranks", "--count", str(count), "--parent", str(os.getpid()), *own])


def told(folder: Path, count: int = 3) -> list[dict[str, str]]:
    deadline = time.monotonic() + 20
    while not all((folder / f"rank-{rank}").exists() for rank in range(count)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(count)]


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_each_rank_is_told_its_place_and_all_must_end_well(tmp_path):
    process = start(tmp_path, "done")
    assert process.wait(30) == 0
    ranks = told(tmp_path)
    assert [(r["--rank"], r["LOCAL_RANK"], r["WORLD_SIZE"], r["MASTER_ADDR"]) for r in ranks] == [(str(i), str(i), "3", "127.0.0.1") for i in range(3)]
    assert len({r["MASTER_PORT"] for r in ranks}) == 1 and {r["--parent"] for r in ranks} == {str(r["parent"]) for r in ranks} == {str(process.pid)}


@pytest.mark.parametrize(("what", "code"), [("fails", 2), ("dies", -signal.SIGKILL)])
def test_a_rank_that_fails_takes_the_others_with_it(tmp_path, what, code):
    process = start(tmp_path, what)
    ranks = told(tmp_path)
    began = time.monotonic()
    assert process.wait(30) == code
    assert time.monotonic() - began < 20 and all(gone(rank["pid"]) for rank in ranks)


def test_a_stop_is_passed_on_to_every_rank(tmp_path):
    process = start(tmp_path, "waits")
    told(tmp_path)
    process.terminate()
    assert process.wait(30) == 0
    assert all((tmp_path / f"stopped-{rank}").exists() for rank in range(3))
