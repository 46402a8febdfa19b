"""One controller a campaign: refusal, takeover from the dead, and no commit by the displaced."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evo_hpc.paths import CampaignPaths
from evo_hpc.store import processes
from evo_hpc.store.atomic import StoreError, dump_json, read_json, write_bytes
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


def test_a_clone_with_the_same_hostname_is_not_taken_for_dead(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    owner = acquire(paths).owner
    clone = owner.process.model_copy(update={"machine": "0" * 32, "boot": "another"})
    assert not clone.here()
    write_bytes(paths.lease, dump_json(owner.model_copy(update={"process": clone}).model_dump()))
    with pytest.raises(LeaseHeld, match=f"stop it on the other machine named {clone.host}, where it is process {clone.pid}"):
        acquire(paths, take_over=True)
    silent = owner.model_copy(update={"process": clone, "heartbeat_at": time.time() - 3600})
    write_bytes(paths.lease, dump_json(silent.model_dump()))
    with pytest.raises(LeaseHeld, match="--take-over"):
        acquire(paths)


def test_a_reboot_of_this_machine_frees_the_lease_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_machine", lambda: "f" * 32)
    paths = CampaignPaths(tmp_path)
    owner = acquire(paths).owner
    assert owner.process.machine == "f" * 32
    before = owner.model_copy(update={"process": owner.process.model_copy(update={"boot": "before"})})
    write_bytes(paths.lease, dump_json(before.model_dump()))
    assert before.process.here() and not before.process.alive()
    assert acquire(paths).generation == 2


def test_without_a_machine_id_only_the_same_boot_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_machine", lambda: "")
    identity = ProcessIdentity.current()
    assert identity.machine == "" and identity.here() and identity.alive()
    assert not identity.model_copy(update={"boot": "another"}).here()


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


@pytest.mark.parametrize("empty_only", [False, True])
def test_a_controller_folder_removed_by_hand_loses_the_lease(tmp_path: Path, empty_only: bool) -> None:
    paths = CampaignPaths(tmp_path)
    lease = acquire(paths)
    shutil.rmtree(paths.controller)
    if empty_only:
        paths.controller.mkdir()
    for action in (lease.check, lease.beat):
        with pytest.raises(LeaseLost, match="generation-000001.json: gone, removed by hand"):
            action()
    lease.release()
    assert not paths.lease.exists()
    assert acquire(paths).generation == 1
    with pytest.raises(LeaseLost):  # the same number again, by the same process: still not the same right
        lease.check()


def test_a_generation_removed_by_hand_and_taken_anew_by_another_loses_the_lease(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    lease = acquire(paths)
    paths.generation(1).unlink()
    process = holder(tmp_path)
    try:
        with pytest.raises(LeaseLost, match=f"written anew by process {process.pid}"):
            lease.check()
        lease.release()
        assert not read_json(paths.lease)["released"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("content, message", [
    (b"", "generation-000001.json:1: not valid JSON"), (b"\xff", "generation-000001.json: not UTF-8"),
    (b"[]", "generation-000001.json: not a record of an owner .content"),
    (b"{}", "generation-000001.json: not a record of an owner .generation: Field required"),
])
def test_a_damaged_generation_is_named_with_what_to_do(tmp_path: Path, content: bytes, message: str) -> None:
    paths = CampaignPaths(tmp_path)
    lease = acquire(paths)
    paths.generation(1).write_bytes(content)
    for action in (lease.check, lambda: current_owner(paths), lambda: acquire(paths)):
        with pytest.raises(StoreError, match=f"{message}.*when no controller runs, remove this one file and run again"):
            action()


def test_a_generation_copied_to_another_name_is_damaged(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    acquire(paths)
    shutil.copy(paths.generation(1), paths.generation(7))
    with pytest.raises(StoreError, match="generation-000007.json: says generation 1 inside"):
        acquire(paths)


def test_a_damaged_heartbeat_is_named_with_what_to_do(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    acquire(paths)
    paths.lease.write_bytes(b"")
    with pytest.raises(StoreError, match="lease.json:1: not valid JSON.*remove this one file"):
        current_owner(paths)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_filesystem_without_hard_links_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    paths = CampaignPaths(tmp_path)
    with pytest.raises(StoreError, match="does not support hard links .*the campaign must lie on one that does"):
        acquire(paths)
    assert list(paths.controller.iterdir()) == []


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
