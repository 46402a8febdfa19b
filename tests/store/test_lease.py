"""One controller a campaign: refusal, takeover from the dead, and no commit by the displaced."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import dump_json, read_json, write_bytes
from evo_hpc.store.lease import LeaseHeld, LeaseLost, acquire, current_owner, owner_may_live
from evo_hpc.store.processes import ProcessIdentity, find_by_argument

HOLD = (
    "import sys, time; from pathlib import Path; from evo_hpc.paths import CampaignPaths; from evo_hpc.store.lease import acquire\n"
    "lease = acquire(CampaignPaths(Path(sys.argv[1]))); print('held', flush=True); time.sleep(60)"
)


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_live_owner_is_named_and_kept(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(LeaseHeld, match=f"process {process.pid} on .*kill {process.pid}"):
            acquire(CampaignPaths(tmp_path), take_over=True)
    finally:
        process.kill()
        process.wait()


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.wait()
    lease = acquire(CampaignPaths(tmp_path))
    assert lease.generation == 2
    lease.check()


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    lease = acquire(paths)
    impostor = lease.owner.model_copy(update={"process": lease.owner.process.model_copy(update={"start_ticks": 1})})
    write_bytes(paths.generation(1), dump_json(impostor.model_dump()))
    write_bytes(paths.lease, dump_json(impostor.model_dump()))
    assert acquire(paths).generation == 2


def test_another_host_needs_to_be_silent_and_named_dead(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    owner = acquire(paths).owner
    away = owner.model_copy(update={"process": owner.process.model_copy(update={"host": "elsewhere"})})
    write_bytes(paths.lease, dump_json(away.model_dump()))
    with pytest.raises(LeaseHeld, match="elsewhere"):
        acquire(paths, take_over=True)
    silent = away.model_copy(update={"heartbeat_at": time.time() - 3600})
    write_bytes(paths.lease, dump_json(silent.model_dump()))
    with pytest.raises(LeaseHeld, match="--take-over"):
        acquire(paths)
    assert acquire(paths, take_over=True).generation == 2


def test_the_displaced_may_not_commit(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    old = acquire(paths)
    old.release()
    new = acquire(paths)
    for action in (old.check, old.beat):
        with pytest.raises(LeaseLost, match="generation 2 has taken over from 1"):
            action()
    old.release()
    assert read_json(paths.lease)["generation"] == 2
    new.check()


def test_release_lets_the_next_in(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    acquire(paths).release()
    owner = current_owner(paths)
    assert owner is not None and owner.released and not owner_may_live(owner, time.time())
    assert acquire(paths).generation == 2


def test_processes_are_found_by_whole_words_and_zombies_are_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--job-name", "evo-test-xyz"])
    try:
        assert child.pid in find_by_argument("--job-name", "evo-test-xyz")
        assert find_by_argument("--job-name", "evo-test-xy") == []
        identity = ProcessIdentity.of(child.pid)
        assert identity.alive()
    finally:
        child.kill()
    while Path("/proc", str(child.pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert not identity.alive()
    assert child.pid not in find_by_argument("--job-name", "evo-test-xyz")
    child.wait()
    assert ProcessIdentity.current().pid == os.getpid()
