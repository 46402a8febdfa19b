"""The test cluster itself: it is a real Slurm, breaks in the ways that its verbs say, recovers, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evo_hpc.errors import EvoError, UserError
from tests.cluster import Cluster
from tests.cluster.fixture import private_cluster, sweep
from tests.cluster.hosts import MARK, without
from tests.cluster.processes import environment, executable, is_gone, pids, wait_until
from tests.cluster.settings import NODES
from tests.cluster.teardown import mounts_under

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A short path: a Unix socket's whole path ends at 107 bytes."""
    short = Path(f"/tmp/evo-t{os.getpid()}")
    short.mkdir()
    yield short
    for owner in short.glob("*.owner"):
        Cluster(owner.with_suffix("")).down(wipe=True)
    subprocess.run(["rm", "-rf", "--one-file-system", short], check=True)


def submit(cluster: Cluster, script: str, *options: str) -> str:
    """The id of a batch job that runs `script`, whose output goes nowhere."""
    done = cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(cluster: Cluster, job: str) -> str:
    return cluster.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()


def eventually(holds: Callable[[], bool], seconds: float = 20) -> None:
    assert wait_until(holds, seconds, pause=0.1), f"not within {seconds} s"


def pid_in(file: Path) -> int:
    eventually(lambda: file.exists() and bool(file.read_text().strip()))
    return int(file.read_text())


def left_behind(prefix: Path) -> dict[int, str]:
    """Processes with the cluster's configuration in their environment, or its folder in their command line."""
    own = str(prefix).encode()
    found = {}
    for pid in pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if executable(pid) and pid != os.getpid() and (own in command or environment(pid).get("SLURM_CONF", "").startswith(f"{prefix}/")):
            found[pid] = command.decode(errors="replace")
    return found


def test_up_again_changes_nothing(cluster: Cluster) -> None:
    before = cluster.running()
    cluster.up()
    assert cluster.running() == before and all(before.values()) and len(before) == 8
    with pytest.raises(UserError, match="other settings"):
        Cluster(cluster.prefix, accounting=False).up()


def test_batch_jobs_are_queued_run_and_accounted(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("sbatch", "--parsable", f"--output={tmp_path}/out", "--comment=attempt 7", "--wrap=echo ran on $SLURMD_NODENAME; exit 3")
    job = done.stdout.strip()
    eventually(lambda: state(cluster, job) == "FAILED")
    assert (tmp_path / "out").read_text().strip() in {f"ran on {node}" for node in NODES}
    sacct = ("sacct", "-nXP", "-j", job, "-o", "State,ExitCode,Comment")
    eventually(lambda: cluster.run(*sacct).stdout.strip() == "FAILED|3:0|attempt 7")


def test_gpus_are_handed_out(cluster: Cluster) -> None:
    two = cluster.run("srun", "-p", "train", "-N2", "--gpus-per-node=fake:3", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES")
    assert sorted(two.stdout.splitlines()) == ["n1 0,1,2", "n2 0,1,2"]
    assert cluster.run("srun", "-p", "eval", "--gres=gpu:1", "true").returncode != 0, "n3 and n4 have none"


def test_four_nodes_run_one_step(cluster: Cluster) -> None:
    """Each task knows its rank; as root it also knows its node by hostname, and finds the others by name."""
    done = cluster.run("srun", "-N4", "--ntasks-per-node=2", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME")
    assert sorted(done.stdout.split("\n")[:-1]) == [f"{rank} n{1 + rank // 2}" for rank in range(8)]
    if os.getuid() == 0:
        names = cluster.run("srun", "-N2", "-w", "n2,n3", "sh", "-c", "hostname; getent hosts n2 >/dev/null || echo n2 is unknown")
        assert sorted(names.stdout.splitlines()) == ["n2", "n3"]


def test_srun_works_inside_a_batch_job(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, f"srun -N2 sh -c 'touch {tmp_path}/$SLURMD_NODENAME'", "-N2", "-w", "n1,n4")
    eventually(lambda: state(cluster, job) == "COMPLETED")
    assert {path.name for path in tmp_path.iterdir()} == {"n1", "n4"}


def test_a_preempted_job_runs_again(cluster: Cluster, tmp_path: Path) -> None:
    """The step is warned at once, killed once GraceTime and KillWait have passed, and the job starts anew."""
    step = tmp_path / "step.sh"
    step.write_text(f"trap '' TERM; trap 'touch {tmp_path}/warned' USR2; touch {tmp_path}/ready\nwhile :; do sleep 1; done\n")
    body = f'echo "restarts: $SLURM_RESTART_COUNT" >> {tmp_path}/starts; [ "$SLURM_RESTART_COUNT" = 1 ] || srun sh {step}'
    job = submit(cluster, body, "-p", "scavenge", "-w", "n4", "--exclusive", "--requeue", "--signal=USR2@1")
    eventually(lambda: (tmp_path / "ready").exists())
    urgent = submit(cluster, "sleep 1", "-p", "urgent", "-w", "n4", "--exclusive")
    eventually(lambda: (tmp_path / "warned").exists(), 10)
    assert state(cluster, urgent) == "PENDING", "the job has its grace"
    eventually(lambda: state(cluster, job) == "COMPLETED", 60)
    assert (tmp_path / "starts").read_text().splitlines() == ["restarts: ", "restarts: 1"]
    assert state(cluster, urgent) == "COMPLETED"


def test_slurmctld_dies_and_comes_back(cluster: Cluster) -> None:
    job = submit(cluster, "sleep 300", "-w", "n3")
    eventually(lambda: state(cluster, job) == "RUNNING")
    running_since = time.time()
    saved = cluster.layout.state / "job_state"
    eventually(lambda: saved.exists() and saved.stat().st_mtime > running_since)  # what it has not saved yet, it forgets
    pid = cluster.running()["slurmctld"]
    cluster.kill_ctld()
    assert pid and is_gone(pid) and cluster.running()["slurmctld"] is None
    cluster.start_ctld()
    assert state(cluster, job) == "RUNNING", "jobs survive it"
    cluster.run("scancel", job)
    cluster.wait_idle()


def test_a_killed_node_takes_everything_with_it(cluster: Cluster, tmp_path: Path) -> None:
    """Also what a job hid from its step: its own session, an empty environment."""
    hide = f"setsid env -i sh -c 'echo $$ > {tmp_path}/hidden; exec sleep 300' & echo $$ > {tmp_path}/shell; sleep 300"
    job = submit(cluster, hide, "-w", "n2", "--no-requeue")
    found = [pid_in(tmp_path / "hidden"), pid_in(tmp_path / "shell")]
    other = submit(cluster, "sleep 300", "-w", "n1")
    eventually(lambda: state(cluster, other) == "RUNNING")
    cluster.kill_node("n2")
    assert all(is_gone(pid) for pid in found) and cluster.running()["slurmd.n2"] is None
    assert state(cluster, other) == "RUNNING" and cluster.running()["slurmd.n1"], "other nodes live on"
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=power")  # or slurmctld takes 25 s to notice
    eventually(lambda: state(cluster, job) == "NODE_FAIL")
    cluster.start_node("n2")
    cluster.run("scancel", other)
    cluster.wait_idle()


def test_a_killed_slurmd_leaves_its_job_alive(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, f"echo $$ > {tmp_path}/shell; sleep 300", "-w", "n4")
    pid = pid_in(tmp_path / "shell")
    cluster.kill_slurmd("n4")
    assert cluster.running()["slurmd.n4"] is None and not is_gone(pid)
    cluster.start_node("n4")
    assert not is_gone(pid) and state(cluster, job) == "RUNNING"
    cluster.run("scancel", job)
    cluster.wait_idle()
    assert is_gone(pid)


def test_accounting_goes_and_catches_up(cluster: Cluster) -> None:
    cluster.stop_dbd()
    job = submit(cluster, "true")
    assert cluster.run("sacct", "-j", job).returncode != 0
    eventually(lambda: state(cluster, job) == "COMPLETED")
    cluster.start_dbd()
    eventually(lambda: cluster.run("sacct", "-nXP", "-j", job, "-o", "State").stdout.strip() == "COMPLETED", 30)


def test_unknown_names_are_refused(cluster: Cluster) -> None:
    with pytest.raises(UserError, match="n1, n2, n3, n4"):
        cluster.kill_node("n5")


def test_two_clusters_at_once_and_down_leaves_nothing(cluster: Cluster, folder: Path) -> None:
    """Without accounting here, which is quicker and the other way of bringing it up; a job that ignores signals, and a mount."""
    other = Cluster(folder / "b", accounting=False)
    other.up()
    assert other.settings.base_port != cluster.settings.base_port
    submit(other, "trap '' TERM; setsid sleep 300 & sleep 300", "-w", "n1")
    eventually(lambda: "RUNNING" in other.run("squeue", "-h", "-o", "%T").stdout)
    assert other.run("sacct").returncode == 1
    busy = set(left_behind(other.prefix))
    assert len(busy) >= 6, "the test would see them"
    if os.getuid() == 0:
        (folder / "b/disk").mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder / "b/disk"], capture_output=True).returncode == 0:
            assert mounts_under(other.prefix)
    other.down()
    assert not left_behind(other.prefix) and not mounts_under(other.prefix)
    assert str(other.prefix) not in Path("/etc/hosts").read_text()
    other.up()
    other.down(wipe=True)
    assert not left_behind(folder) and not other.prefix.exists()
    other.down(wipe=True)
    assert all(cluster.running().values())


def test_a_dead_owner_is_swept_and_a_live_one_is_not(folder: Path) -> None:
    """The owner of one cluster is killed while it is up; that of another lives."""
    dying = "import sys, time; from pathlib import Path; from tests.cluster.fixture import private_cluster\n" \
            "with private_cluster(Path(sys.argv[1])) as c:\n" \
              "    c.__class__(c.prefix, accounting=False).up(); print(c.prefix, flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", dying, folder], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as owner:
        assert owner.stdout is not None
        prefix = Path(owner.stdout.readline().strip())
        assert sweep(folder) == [] and left_behind(prefix)
        owner.send_signal(signal.SIGKILL)
    with private_cluster(folder) as mine:
        assert not prefix.exists() and not left_behind(prefix)
        assert mine.prefix != prefix and sweep(folder) == []


def test_a_daemon_that_does_not_start_is_shown(folder: Path) -> None:
    broken = Cluster(folder / "c", accounting=False)
    broken.up()
    broken.kill_ctld()
    with broken.layout.slurm_conf.open("a") as file:
        file.write("NoSuchOption=1\n")
    with pytest.raises(EvoError, match=r"(?s)slurmctld ended with status 1.*NoSuchOption.*--wipe"):
        broken.start_ctld()
    broken.down(wipe=True)


def test_foreign_folders_are_left_alone(folder: Path) -> None:
    (folder / "notes").write_text("mine")
    with pytest.raises(UserError, match="is no cluster"):
        Cluster(folder).up()
    Cluster(folder).down(wipe=True)
    assert (folder / "notes").read_text() == "mine"
    for name in ("a b", "x" * 100, "new\nline"):
        with pytest.raises(UserError, match="--prefix"):
            Cluster(folder / name).down()


def test_host_lines_of_others_stay(folder: Path) -> None:
    text = f"127.0.0.1 localhost\n127.1.1.1 n1 {MARK}{folder}\n127.1.1.2 n1 {MARK}{folder}2\n127.1.1.3 n1 {MARK}/\n10.0.0.1 n1 # a person's"
    assert without(text, folder) == f"127.0.0.1 localhost\n127.1.1.3 n1 {MARK}/\n10.0.0.1 n1 # a person's\n"
