"""The simulated Slurm: shows what the real one was recorded to show, and does what tests ask of it."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.record import recorded
from tests.chaos.scenarios import SCENARIOS, play
from tests.chaos.simulator import Simulator
from tests.chaos.story import SQUEUE, World, essence

SCRIPT = "#!/bin/bash\n#SBATCH --job-name={name} --output='{folder}/{name}.out' --open-mode=append --signal=B:USR2@60 {options}\n{body}\n"
LONG = "while :; do sleep 0.05; done"
QUICK = {"kill_wait": 0.2, "grace": 0.1, "preempt_lag": 0.1, "requeue_delay": 0.1, "sacct_lag": 0.05, "slots": 8}


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[Simulator]:
    """A quick one; whatever it runs dies with the test."""
    made = Simulator(tmp_path / "sim ulator", **QUICK)
    yield made
    made.kill_all()


@pytest.fixture
def jobs_folder(tmp_path: Path) -> Path:
    """Where scenarios keep their files."""
    return tmp_path / "jobs"


def run(simulator: Simulator, *command: str, seconds: float = 20) -> subprocess.CompletedProcess[str]:
    """A command of Slurm."""
    return subprocess.run(command, env={**simulator.environment(), "SLURM_TIME_FORMAT": "%s"}, cwd=simulator.folder, capture_output=True, text=True,
                          timeout=seconds)


def script(simulator: Simulator, name: str, body: str, options: str = "") -> str:
    """The path of a batch script."""
    path = simulator.folder / f"{name}.sh"
    path.write_text(SCRIPT.format(name=name, body=body, options=options, folder=simulator.folder))
    return str(path)


def submit(simulator: Simulator, name: str, body: str, options: str = "") -> str:
    """The id of a job that was taken."""
    done = run(simulator, "sbatch", "--parsable", script(simulator, name, body, options))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def user() -> str:
    """The login name, as the controller finds it."""
    return pwd.getpwuid(os.getuid()).pw_name


def squeue(simulator: Simulator) -> list[list[str]]:
    """Its lines, split."""
    done = run(simulator, "squeue", "--noheader", "--array", "--states=all", f"--user={user()}", SQUEUE)
    assert done.returncode == 0, done.stderr
    return [line.split("|") for line in done.stdout.splitlines()]


def shown(simulator: Simulator) -> dict[str, str]:
    """State by shown id."""
    return {line[-1]: line[3] for line in squeue(simulator)}


def accounted(simulator: Simulator) -> list[list[str]]:
    """sacct's lines, split."""
    done = run(simulator, "sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", f"--user={user()}", "--starttime=2020-01-01T00:00:00",
               "--format=JobIDRaw,JobID,JobName,State,ExitCode,Submit,Start,End,ElapsedRaw,AllocTRES,NodeList")
    assert done.returncode == 0, done.stderr
    return [line.split("|") for line in done.stdout.splitlines()]


def text(path: Path, *words: str, seconds: float = 10) -> str:
    """A file's content once it has these words."""
    end = time.monotonic() + seconds
    while not path.exists() or not all(w in path.read_text() for w in words):
        assert time.monotonic() < end, f"{path}: no {words}: {path.read_text() if path.exists() else 'missing'}"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("name", SCENARIOS)
def test_shows_what_the_real_one_shows(name: str, simulator: Simulator, jobs_folder: Path) -> None:
    """The same stories as on the live cluster: what is shown at rest, the order of states, answers and exit codes, starts."""
    Simulator(simulator.folder, requeue_delay=0.6)  # long enough to be seen waiting on a busy machine
    world = World(jobs_folder, simulator.environment(), quiet=0.2, poll=0.02, patience=10, preempt=lambda w, job: simulator.preempt(job))
    assert essence(play(name, world)) == essence(recorded(name))


def test_programs_are_quick(simulator: Simulator) -> None:
    """A call costs tens of milliseconds, so that a campaign can be run hundreds of times; the bound leaves room for a busy machine."""
    took = []
    for _ in range(10):
        begun = time.monotonic()
        squeue(simulator)
        took.append(time.monotonic() - begun)
    assert min(took) < 0.1


@pytest.mark.parametrize("command", [
    "squeue --noheader", "squeue", "sacct --noheader", "scancel --signal=TERM 1", "scancel --batch --signal=TERM 1", "scontrol show job 1", "scontrol update jobid=1 name=x", "sinfo", "sbatch --wrap x",
    "srun hostname",
])
def test_other_forms_are_refused(simulator: Simulator, command: str) -> None:
    """A command that the controller did not use so far must be noticed."""
    done = run(simulator, *command.split())
    assert done.returncode == 64 and done.stdout == "" and "simulator" in done.stderr


def test_programs_find_their_cluster_without_its_variable(simulator: Simulator) -> None:
    """Controllers pass an environment that they list; PATH is enough."""
    environment = {"PATH": simulator.environment()["PATH"]}
    done = subprocess.run(["sbatch", script(simulator, "a", "squeue --version; scontrol requeue $SLURM_JOB_ID; sleep 60", "--no-requeue")],
                          env=environment, cwd=simulator.folder, capture_output=True, text=True)
    assert done.stdout == "Submitted batch job 101\n", done.stderr
    text(simulator.folder / "a.out", "slurm-wlm 22.05.8", "Requested operation is presently disabled for job 101")
    assert shown(simulator) == {"101": "RUNNING"}


def test_slots_and_priority(simulator: Simulator, tmp_path: Path) -> None:
    """No more than fit run at once; the others wait with a reason and start in their order, also when nobody asks."""
    few = Simulator(tmp_path / "few", **{**QUICK, "slots": 1})
    try:
        ids = [submit(few, f"j{i}", "while [ ! -e go ]; do sleep 0.05; done") for i in range(3)]
        assert [(line[3], line[4]) for line in squeue(few)] == [("RUNNING", "None"), ("PENDING", "Resources"), ("PENDING", "Priority")]
        (few.folder / "go").touch()
        end = time.monotonic() + 10
        while len(list((few.folder / "runs").glob("*.end"))) < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert shown(few) == dict.fromkeys(ids, "COMPLETED")
    finally:
        few.kill_all()


def test_finished_jobs_leave_squeue_and_enter_accounting_late(simulator: Simulator) -> None:
    """MinJobAge and the lag of slurmdbd."""
    Simulator(simulator.folder, min_job_age=0.5, sacct_lag=0.3)
    number = submit(simulator, "a", "exit 3")
    simulator.wait(number, "FAILED")
    assert shown(simulator) == {number: "FAILED"}
    assert all(line[3] != "FAILED" for line in accounted(simulator))
    time.sleep(0.7)
    assert shown(simulator) == {}
    [line] = accounted(simulator)
    assert line[:5] == [number, number, "a", "FAILED", "3:0"] and line[9:] == ["billing=1,cpu=1,mem=100M,node=1", "n1"]
    assert float(line[5]) <= float(line[6]) <= float(line[7]) <= time.time() < float(line[5]) + 20


def test_preemption(simulator: Simulator) -> None:
    """The batch shell alone is warned, all of it is killed after the grace, and it starts again under the same id."""
    body = f"trap 'echo warned' USR2\n(trap 'echo child warned' USR2; {LONG}) &\necho start ${{SLURM_RESTART_COUNT:-0}}\n{LONG}"
    number = submit(simulator, "a", body)
    text(simulator.folder / "a.out", "start 0")
    simulator.preempt("a")
    said = text(simulator.folder / "a.out", "start 1")
    assert "warned" in said and "child" not in said
    assert [run["state"] for run in simulator.job(number)["runs"]] == ["PREEMPTED", "RUNNING"]
    simulator.preempt(number)
    text(simulator.folder / "a.out", "start 2")


def test_a_warning_without_a_trap_kills(simulator: Simulator) -> None:
    """As any signal does; Slurm calls that a failure, not a preemption."""
    number = submit(simulator, "a", f"echo ready; {LONG}")
    text(simulator.folder / "a.out", "ready")
    simulator.preempt(number)
    assert simulator.wait(number, "FAILED")["runs"][-1]["code"] == f"0:{signal.SIGUSR2}"


def test_preempted_without_requeue(simulator: Simulator) -> None:
    """It ends as PREEMPTED."""
    number = submit(simulator, "a", f"trap '' USR2; echo ready; {LONG}", "--no-requeue")
    text(simulator.folder / "a.out", "ready")
    simulator.preempt(number)
    simulator.wait(number, "PREEMPTED")
    time.sleep(0.1)
    assert [line[3] for line in accounted(simulator)] == ["PREEMPTED"]


def test_ending_within_the_grace_is_completed(simulator: Simulator) -> None:
    """The trap of a job that exits 0 when it is warned: Slurm does not requeue it."""
    Simulator(simulator.folder, grace=5)
    number = submit(simulator, "a", f"trap 'exit 0' USR2; echo ready; {LONG}")
    text(simulator.folder / "a.out", "ready")
    simulator.preempt(number)
    assert simulator.wait(number, "COMPLETED")["restart"] == 0


@pytest.mark.parametrize(("event", "state", "code", "reason"), [
    ("time_out", "TIMEOUT", "0:0", "TimeLimit"), ("oom", "OUT_OF_MEMORY", "0:125", "OutOfMemory"), ("node_fail", "NODE_FAIL", "1:0", "NodeDown"),
])
def test_other_ends(simulator: Simulator, event: str, state: str, code: str, reason: str) -> None:
    """Each with Slurm's words, and no process of it left, not even one in a session of its own."""
    number = submit(simulator, "a", f"trap '' USR2; setsid sleep 1000 & echo $! ready; {LONG}", "--no-requeue")
    child = int(text(simulator.folder / "a.out", "ready").split()[0])
    getattr(simulator, event)(number)
    record = simulator.wait(number, state)
    assert record["reason"] == reason and record["runs"][-1]["code"] == code
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return b" Z " not in Path(f"/proc/{pid}/stat").read_bytes()[:40]
    except FileNotFoundError:
        return False


def test_node_failure_requeues_and_may_leave_the_old_step_alive(simulator: Simulator) -> None:
    """The split brain: an old step writes on beside its requeued copy."""
    number = submit(simulator, "a", f"echo start ${{SLURM_RESTART_COUNT:-0}} $$; {LONG}")
    old = int(text(simulator.folder / "a.out", "start 0").split()[2])
    simulator.node_fail(number, step_lives=True)
    text(simulator.folder / "a.out", "start 1")
    assert _lives(old) and simulator.job(number)["state"] == "RUNNING"
    simulator.node_fail(number)
    text(simulator.folder / "a.out", "start 2")
    simulator.kill_all()
    assert not _lives(old)


def test_time_limit(simulator: Simulator) -> None:
    """The warning comes before the limit by as much as was asked for."""
    Simulator(simulator.folder, minute=1)
    path = script(simulator, "a", f"trap 'echo warned' USR2; {LONG}", "--time=2\n#SBATCH --signal=B:USR2@1")
    number = run(simulator, "sbatch", "--parsable", path).stdout.strip()
    simulator.wait(number, "TIMEOUT")
    assert "warned" in text(simulator.folder / "a.out")


def test_lost_jobs_and_ids_used_again(simulator: Simulator) -> None:
    """slurmctld forgets what it acknowledged, the process goes on, and another job gets the id."""
    number = submit(simulator, "a", f"echo $$; {LONG}")
    pid = int(text(simulator.folder / "a.out", "\n"))
    simulator.lose(number)
    assert shown(simulator) == {} and accounted(simulator) == [] and _lives(pid)
    assert run(simulator, "scontrol", "requeue", number).stderr == f"Invalid job id specified for job {number}\n"
    simulator.reuse_ids()
    other = submit(simulator, "b", LONG)
    assert other == number and [line[2] for line in squeue(simulator)] == ["b"]
    third = submit(simulator, "c", LONG)
    assert third not in (number, other)
    simulator.lose(third, goes_on=False)
    assert simulator.job("b")["state"] == "RUNNING"


def test_held(simulator: Simulator) -> None:
    """By an administrator, while it waits."""
    Simulator(simulator.folder, slots=0)
    number = submit(simulator, "a", "true")
    simulator.hold(number, "JobHeldAdmin")
    Simulator(simulator.folder, slots=1)
    assert [line[3:5] for line in squeue(simulator)] == [["PENDING", "JobHeldAdmin"]]
    simulator.release(number)
    simulator.wait(number, "COMPLETED")


def test_down(simulator: Simulator) -> None:
    """Nobody answers but slurmdbd; what ended meanwhile is noticed later."""
    number = submit(simulator, "a", "echo $$; sleep 0.3")
    text(simulator.folder / "a.out", "\n")
    simulator.down(60)
    for command in (["sbatch", script(simulator, "b", "true")], ["scancel", number], ["scontrol", "hold", number], ["squeue"], ["sinfo"]):
        done = run(simulator, *command)
        assert done.returncode in (1, 8) and ("Unable to contact slurm controller" in done.stderr or command[0] == "scontrol")
    assert run(simulator, "scontrol", "show", "hostnames", "n[1-3,07],m").stdout.split() == ["n1", "n2", "n3", "n07", "m"]
    accounted(simulator)
    time.sleep(0.5)
    simulator.down(0)
    assert shown(simulator) == {number: "COMPLETED"}


def test_accounting_absent_or_down(simulator: Simulator) -> None:
    """Slurm's words for both."""
    command = ("sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", f"--user={user()}", "--starttime=2020-01-01T00:00:00",
               "--format=JobIDRaw,JobID,JobName,State,ExitCode,Submit,Start,End,ElapsedRaw,AllocTRES,NodeList")
    simulator.accounting("absent")
    assert (run(simulator, *command).returncode, run(simulator, *command).stderr) == (1, "Slurm accounting storage is disabled\n")
    simulator.accounting("down")
    assert "Problem talking to the database" in run(simulator, *command).stderr
    simulator.accounting("ok")
    assert run(simulator, *command).returncode == 0


def test_sbatch_that_times_out(simulator: Simulator) -> None:
    """With and without a job behind it, and with one that shows up late; each fault strikes once."""
    path = script(simulator, "a", LONG)
    simulator.plan("sbatch", "timeout_before")
    simulator.plan("sbatch", "timeout_after")
    simulator.plan("sbatch", "timeout_after", seconds=0.6)
    for jobs in (0, 1, 1):
        done = run(simulator, "sbatch", "--parsable", path)
        assert (done.returncode, done.stdout) == (1, "") and "Socket timed out on send/recv operation" in done.stderr
        assert len(shown(simulator)) == jobs
    assert len(simulator.jobs()) == 2
    time.sleep(0.7)
    assert len(shown(simulator)) == 2
    assert run(simulator, "sbatch", "--parsable", path).returncode == 0


@pytest.mark.parametrize(("kind", "jobs"), [("hang_before", 0), ("hang_after", 1)])
def test_sbatch_that_hangs(simulator: Simulator, kind: str, jobs: int) -> None:
    """Until it is killed; the cluster goes on meanwhile."""
    simulator.plan("sbatch", kind)
    process = subprocess.Popen(["sbatch", script(simulator, "a", LONG)], env=simulator.environment(), start_new_session=True)
    end = time.monotonic() + 10
    while not (simulator.folder / "hanging").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert process.poll() is None and len(shown(simulator)) == jobs
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(shown(simulator)) == jobs


def test_planned_failures_and_refusals(simulator: Simulator) -> None:
    """As often as planned, after as many calls as planned."""
    simulator.plan("squeue", "fail", times=2, skip=1)
    codes = [run(simulator, "squeue", "--noheader", "--array", "--states=all", f"--user={user()}", SQUEUE).returncode for _ in range(4)]
    assert codes == [0, 1, 1, 0]
    for kind, words in (("refuse_partition", "Invalid partition name specified"), ("refuse_qos", "QOSMaxSubmitJobPerUserLimit")):
        simulator.plan("sbatch", kind)
        done = run(simulator, "sbatch", script(simulator, "a", "true"))
        assert done.returncode == 1 and words in done.stderr and simulator.jobs() == []
    with pytest.raises(ValueError, match="no fault"):
        simulator.plan("squeue", "timeout_after")


def test_steps(simulator: Simulator) -> None:
    """srun runs a command for every task, and ends them together when one fails."""
    body = "srun --ntasks=3 --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 1 ] && exit 7; exec sleep 1000'; echo code $?"
    submit(simulator, "a", body)
    assert "code 143" in text(simulator.folder / "a.out", "code")


def test_commands_killed_at_any_moment(simulator: Simulator) -> None:
    """The cluster's file is whole whoever dies, and nothing is submitted twice by one call."""
    path = script(simulator, "a", LONG, "--hold")
    for delay in range(20):
        process = subprocess.Popen(["sbatch", "--parsable", path], env=simulator.environment(), stdout=subprocess.PIPE, text=True)
        time.sleep(delay * 0.004)
        process.kill()
        process.communicate()
    jobs = simulator.jobs()
    assert len({j["raw"] for j in jobs}) == len(jobs) <= 20
    json.loads((simulator.folder / "state.json").read_text())


def test_many_at_once(simulator: Simulator) -> None:
    """Parallel submissions get ids of their own, and each job starts exactly once."""
    path = script(simulator, "a", "echo start $SLURM_JOB_ID")
    processes = [subprocess.Popen(["sbatch", "--parsable", path], env=simulator.environment(), stdout=subprocess.PIPE, text=True) for _ in range(12)]
    ids = [p.communicate()[0].strip() for p in processes]
    assert len(set(ids)) == 12
    for number in ids:
        simulator.wait(number, "COMPLETED")
    assert sorted((simulator.folder / "a.out").read_text().splitlines()) == sorted(f"start {n}" for n in ids)
