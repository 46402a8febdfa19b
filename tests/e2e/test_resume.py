"""kill -9 of real training at several places: the resumed run ends bit for bit where the undisturbed one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.processes import find_by_argument
from evo_hpc.store.schemas import ROLLOUT, STEP
from evo_hpc.store.tables import read_tables
from tests.crash.fake_roles import __name__ as _fakes  # the contract below is theirs too

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, EVERY = 9, 3


def small_campaign(folder: Path, repository: Path, base: Path | None = None) -> CampaignPaths:
    """The demo, cut short: a poor base policy, nine steps, few tasks."""
    folder.mkdir(parents=True)
    demo = repository / "campaigns" / "demo"
    text = (demo / "campaign.yaml").read_text()
    for old, new in (("steps: 240", "steps: 40"), ("dev: 160", "dev: 16"), ("probe: 48", "probe: 8"), ("samples_per_task: 8", "samples_per_task: 2"), ("proposals: 4", "proposals: 0"), ("every: 10", "every: 4")):
        assert old in text
        text = text.replace(old, new)
    (folder / "campaign.yaml").write_text(text if base is None else text.replace("path: base/policy", f"path: {base}"))
    recipe = (demo / "recipe.yaml").read_text()
    for old, new in (("steps: 40", f"steps: {STEPS}"), ("mini_batches: 1 ", "mini_batches: 2 "), ("every: 20", f"every: {EVERY}")):
        assert old in recipe
        recipe = recipe.replace(old, new)
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "cluster.yaml").write_text((demo / "cluster.yaml").read_text())
    return CampaignPaths(folder)


def controller(paths: CampaignPaths) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "evo_hpc.cli", "run", str(paths.root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(paths: CampaignPaths) -> str:
    process = controller(paths)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> CampaignPaths:
    paths = small_campaign(tmp_path_factory.mktemp("undisturbed") / "campaign", repository)
    finish(paths)
    return paths


def learned(paths: CampaignPaths) -> dict:
    """Everything that training determined: weights, every rollout's tokens, every metric that is not a time."""
    version = paths.version("v0001")
    rows = read_tables(sorted(version.rollouts.glob("*.parquet")), ROLLOUT)
    steps = read_tables(sorted(version.steps.glob("*.parquet")), STEP).sort_by("step")
    clocks = [n for n in steps.column_names if n.startswith("seconds_") or n in ("time", "incarnation", "attempt", "rollout_tokens_per_second", "reload_error")]
    return {
        "weights": (version.policy(STEPS) / "model.safetensors").read_bytes(),
        "rollouts": rows.select(["trainer_step", "group_id", "sample", "response_ids", "logprobs", "advantage"]).to_pylist(),
        "metrics": steps.drop_columns(clocks).to_pylist(),
        "scores": [read_json(paths.version(v).evaluation_complete("dev"))["meta"]["avg_at_k"] for v in ("v0000", "v0001")],
    }


def wait_for_step(paths: CampaignPaths, step: int, process: subprocess.Popen[str]) -> None:
    job = paths.version("v0001").job("train", 0)
    deadline = time.time() + 240
    while time.time() < deadline and process.poll() is None:
        progress = job.incarnations()[-1].progress if job.incarnations() else None
        if progress is not None and progress.exists() and read_json(progress).get("step", 0) >= step and read_json(progress)["stage"] == "training":
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not seen; controller: {process.poll()}")


def kill_role(paths: CampaignPaths, role: str) -> None:
    job = str(paths.version("v0001").job("train", 0).root)
    pids = find_by_argument("--job", job, "evo_hpc.dispatch.launcher") if role == "launcher" else find_by_argument("--job", job, "--role", role)
    assert len(pids) == 1, (role, pids)
    os.kill(pids[0], signal.SIGKILL)


def test_killed_and_resumed_is_bit_for_bit_the_undisturbed_run(undisturbed: CampaignPaths, tmp_path: Path, repository: Path) -> None:
    paths = small_campaign(tmp_path / "campaign", repository)
    process = controller(paths)
    wait_for_step(paths, 4, process)
    kill_role(paths, "launcher")  # the controller starts the attempt again; it resumes at step 3
    time.sleep(1)
    wait_for_step(paths, 5, process)
    process.kill()  # the controller; the job goes on without it
    process.wait()
    wait_for_step_alone = paths.version("v0001").job("train", 0)
    assert find_by_argument("--job", str(wait_for_step_alone.root), "evo_hpc.dispatch.launcher"), "the job outlives its controller"
    process = controller(paths)
    wait_for_step(paths, 7, process)
    kill_role(paths, "trainer")  # the job dies as a whole; a new attempt resumes at step 6
    output, _ = process.communicate()
    assert process.returncode == 0, output
    attempts = [read_json(job.record)["state"] for job in paths.version("v0001").jobs() if job.kind == "train"]
    assert attempts == ["failed", "done"]
    a, b = learned(undisturbed), learned(paths)
    assert a["scores"] == b["scores"]
    assert a["metrics"] == b["metrics"]
    assert a["rollouts"] == b["rollouts"]
    assert a["weights"] == b["weights"]


def test_a_killed_worker_changes_nothing(undisturbed: CampaignPaths, tmp_path: Path, repository: Path) -> None:
    """Its trainer goes on when another has taken its place and has done again what it had claimed."""
    paths = small_campaign(tmp_path / "campaign", repository)
    process = controller(paths)
    wait_for_step(paths, 4, process)
    kill_role(paths, "rollout")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    job = paths.version("v0001").job("train", 0)
    assert len(job.incarnations()) == 1 and "rollout was killed by signal 9 (SIGKILL)" in job.launch_log.read_text()
    assert learned(paths) == learned(undisturbed)


@pytest.mark.rare
def test_two_engines_one_step_off_sample_what_one_does(undisturbed: CampaignPaths, tmp_path: Path, repository: Path) -> None:
    """Staleness 1, exact weights, small batches: however many engines share them."""
    found = []
    for workers, batch in ((1, 0), (2, 3)):
        paths = small_campaign(tmp_path / f"with-{workers}", repository, undisturbed.base.policy)
        recipe = paths.recipe_yaml.read_text()
        recipe = recipe.replace("optimizer:  ", "optimizer:\n  old_logprobs: sampled\n#", 1)
        paths.recipe_yaml.write_text(recipe.replace("rollout:  ", "rollout:\n  max_staleness: 1\n#", 1))
        cluster = paths.cluster_yaml.read_text()
        paths.cluster_yaml.write_text(cluster.replace("engine:  ", f"engine:\n  workers: {workers}\n  batch_groups: {batch}\n#", 1))
        finish(paths)
        found.append(learned(paths))
    assert found[0] == found[1]
    rows = read_tables(sorted(paths.version("v0001").rollouts.glob("*.parquet")), ROLLOUT).select(["trainer_step", "weight_version", "staleness"])
    assert {tuple(row.values()) for row in rows.to_pylist()} == {(t, max(t - 2, 0), t - 1 - max(t - 2, 0)) for t in range(1, STEPS + 1)}
    steps = read_tables(sorted(paths.version("v0001").steps.glob("*.parquet")), STEP).sort_by("step")
    assert steps.column("staleness_max").to_pylist() == [0.0] + [1.0] * (STEPS - 1)
    assert all(ratio is None or ratio != 1.0 for ratio in steps.column("ratio_max").to_pylist()[1:]), "the ratio is to the policy that sampled"


@pytest.mark.rare
def test_a_torn_checkpoint_is_passed_over(undisturbed: CampaignPaths, tmp_path: Path, repository: Path) -> None:
    """The newest checkpoint is truncated after a kill: training resumes at the one before, loudly, with the same end."""
    paths = small_campaign(tmp_path / "campaign", repository)
    process = controller(paths)
    wait_for_step(paths, 7, process)
    process.kill()
    process.wait()
    kill_role(paths, "launcher")
    checkpoints = paths.version("v0001").job("train", 0).incarnation(0).checkpoints
    newest = checkpoints / "step-000006"
    weights = max((p for p in newest.iterdir() if p.suffix == ".distcp"), key=lambda p: p.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-100])
    finish(paths)
    log = paths.version("v0001").job("train", 0).incarnation(1).log("trainer").read_text()
    assert "step-000006 is not usable and is passed over" in log and "truncated or changed" in log and "resumed at step 3" in log
    assert learned(paths)["weights"] == learned(undisturbed)["weights"]


@pytest.mark.rare
def test_an_interrupt_loses_at_most_one_step(undisturbed: CampaignPaths, tmp_path: Path, repository: Path) -> None:
    paths = small_campaign(tmp_path / "campaign", repository)
    process = controller(paths)
    wait_for_step(paths, 4, process)
    seen = read_json(paths.version("v0001").job("train", 0).incarnation(0).progress)["step"]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    saved = [int(p.name.split("-")[1]) for p in paths.version("v0001").job("train", 0).incarnation(0).checkpoints.glob("step-*")]
    assert max(saved) >= seen
    finish(paths)
    assert learned(paths)["weights"] == learned(undisturbed)["weights"]


def test_the_stand_ins_of_the_crash_tests_keep_the_real_contract(undisturbed: CampaignPaths, tmp_path: Path) -> None:
    """Same folders, same records, same keys: what the crash tests show of the stand-ins holds for the real roles."""
    from tests.crash.campaign import finish as finish_fake
    from tests.crash.campaign import make_campaign

    assert _fakes
    fake = make_campaign(tmp_path / "campaign")
    fake.campaign_yaml.write_text(fake.campaign_yaml.read_text().replace("watch: {every: 0}", "watch: {every: 5}"))
    finish_fake(fake)
    assert _shape(fake) == _shape(undisturbed)


def _shape(paths: CampaignPaths) -> dict[str, list[str]]:
    """Folders and files by pattern, and the keys of the JSON records in them."""
    import json
    import re

    shape: dict[str, list[str]] = {}
    for path in paths.root.rglob("*"):
        name = re.sub(r"\d+", "N", path.relative_to(paths.root).as_posix())
        skip = ("checkpoints/", "policy/", "hooks", "logs/", "quarantined", ".tmp", "controller/")
        if path.is_dir() or any(part in name for part in skip):
            continue
        keys = sorted(json.loads(path.read_text())) if path.suffix == ".json" else []
        if path.name == "result.json":
            keys += sorted(json.loads(path.read_text())["outputs"])
        if path.name == "COMPLETE.json":
            keys += sorted(set(json.loads(path.read_text())["meta"]) - {"probe", "weight_version"})
        if path.name == "progress.json":
            keys = []
        shape[name] = keys
    return shape
