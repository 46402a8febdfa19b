"""Hand-edited and damaged campaigns: one clear error that says what to do, exit code 2, nothing lost."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evo_hpc.assets import asset_dir
from evo_hpc.controller.loop import Controller
from evo_hpc.controller.validate import find_problems
from evo_hpc.errors import EvoError
from evo_hpc.paths import COMPLETE, CampaignPaths
from tests.crash.campaign import RULES, check_sound, evo, finish, make_campaign, outcome


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CampaignPaths:
    paths = make_campaign(tmp_path_factory.mktemp("finished") / "campaign")
    finish(paths)
    return paths


@pytest.fixture
def campaign(finished: CampaignPaths, tmp_path: Path) -> CampaignPaths:
    """A finished campaign of one's own, to damage."""
    shutil.copytree(finished.root, tmp_path / "campaign")
    return CampaignPaths(tmp_path / "campaign")


def test_a_finished_campaign_is_valid_and_has_nothing_left_to_do(campaign: CampaignPaths) -> None:
    assert evo("validate", str(campaign.root)).returncode == 0
    before = outcome(campaign)
    events = campaign.events.read_text()
    finish(campaign)
    assert outcome(campaign) == before and campaign.events.read_text() == events


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def copy_version(paths: CampaignPaths, name: str) -> None:
    """What a person does: copy v0001's folder and give it its own id."""
    shutil.copytree(paths.version("v0001").root, paths.version(name).root)
    edit(paths.version(name).version_yaml, "id: v0001", f"id: {name}")


def swap_policy(paths: CampaignPaths) -> None:
    """The base policy is replaced, with everything made consistent but the evaluations; what was trained from it is removed."""
    from evo_hpc.store.manifest import complete

    shutil.rmtree(paths.version("v0001").root)
    (paths.base.policy / COMPLETE).unlink()
    (paths.base.policy / "model.safetensors").unlink()
    (paths.base.policy / "model.safetensors").write_text("other weights")
    complete(paths.base.policy, {})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def decision(paths: CampaignPaths) -> Path:
    return paths.version("v0001").decision_yaml


def say_why(path: Path, by: str, because: str) -> None:
    """Overrule, with a reason or without."""
    text = path.read_text()
    begin, end = text.index("by: "), text.index("outcome: ")
    path.write_text(f"{text[:begin]}by: {by}\nbecause: {json.dumps(because)}\n{text[end:]}")


def cut_readings(path: Path) -> None:
    text = path.read_text()
    begin, end = text.index("gate:"), text.index("prediction:")
    path.write_text(text[:begin] + "gate: []\n" + text[end:])


def analyzer(paths: CampaignPaths, name: str, old: str, new: str) -> None:
    """A fifth analyzer, a copy of a built-in one under its own name, with a mistake in one file."""
    folder = paths.analyzers_folder / "mine"
    shutil.copytree(asset_dir("analyzers") / "signal", folder)
    edit(folder / "analyzer.yaml", "name: signal", "name: mine")
    edit(folder / name, old, new)


def another_layout(campaign: CampaignPaths) -> None:
    """A version that is still to be trained, by more ranks than the profile has."""
    version = campaign.version("v0002")
    version.root.mkdir()
    version.version_yaml.write_text("id: v0002\nparents: [v0001]\nhypothesis: It fits.\n")
    version.recipe_yaml.write_text(campaign.recipe_yaml.read_text() + "compute: {tensor_parallel: 2}\n")


DAMAGE: list[tuple[str, Callable[[CampaignPaths], object], str]] = [
    ("mistyped key", lambda c: edit(c.campaign_yaml, "samples_per_task", "sample_per_task"),
     r"campaign\.yaml:8: unknown key `evaluation\.sample_per_task`; did you mean `samples_per_task`\?"),
    ("mistyped domain key", lambda c: edit(c.campaign_yaml, "sealed: 8", "seeled: 8"),
     r"campaign\.yaml:4: unknown key `domain\.config\.seeled`; did you mean `sealed`\?"),
    ("unknown domain", lambda c: edit(c.campaign_yaml, "name: arithmetic", "name: aritmetic"), "did you mean 'arithmetic'"),
    ("other tasks", lambda c: edit(c.campaign_yaml, "train: 16", "train: 32"), "`domain` changed after the tasks were made"),
    ("unknown reward", lambda c: edit(c.recipe_yaml, "correct: 1.0", "corect: 1.0"), r"recipe\.yaml: reward\.weights: unknown component corect"),
    ("layout of other ranks", lambda c: another_layout(c), r"v0002/recipe\.yaml: compute: tensor_parallel x .* = 2 must divide the trainer's ranks \(1\)"),
    ("edited tasks", lambda c: edit(c.tasks("dev"), '"answer":"', '"answer":"1'), "edited after it was made"),
    ("half tasks file", lambda c: truncate(c.tasks("dev")), r"dev\.jsonl:20: not JSON"),
    ("lost parent", lambda c: shutil.rmtree(c.version("v0000").root), "parent v0000 does not exist: correct `parents`, or restore"),
    ("copied version", lambda c: shutil.copytree(c.version("v0001").root, c.version("v0002").root), "set it to the folder's name"),
    ("no version.yaml", lambda c: c.version("v0001").version_yaml.unlink(), r"v0001/version\.yaml: missing"),
    ("recipe edited after training", lambda c: edit(c.version("v0001").recipe_yaml, "lr: 0.0001", "lr: 0.5"), "was trained with another recipe"),
    ("steps edited after training", lambda c: edit(c.version("v0001").recipe_yaml, "steps: 12", "steps: 13"), "was trained with another recipe"),
    ("seed edited after training", lambda c: edit(c.campaign_yaml, "name: crash", "name: crash\nseed: 9"), "was trained with another recipe, init, seed"),
    ("copied version with its results", lambda c: copy_version(c, "v0002"), r"v0002: was copied together with results of another version \(analysis, comparisons, decision\.yaml, eval, jobs, train\)"),
    ("copied training", lambda c: (copy_version(c, "v0002"), shutil.rmtree(c.version("v0002").root / "jobs")), r"rm -r \S*v0002/analysis \S*v0002/comparisons "),
    ("evaluation of another policy", lambda c: swap_policy(c), "made of another policy than this version has now"),
    ("no dev", lambda c: edit(c.campaign_yaml, "samples_per_task: 2", "suites: [probe]"), r"campaign\.yaml:8: `evaluation\.suites`: `dev` must be among"),
    ("lost tasks file", lambda c: c.tasks("dev").unlink(), r"dev\.jsonl: missing; remove"),
    ("damaged manifest", lambda c: c.tasks_manifest.write_text("{}"), "not a manifest of tasks"),
    ("edited comparison", lambda c: edit(c.version("v0001").comparisons()[0], '"ci_high": 0.', '"ci_high": 0.9'), "edited after it was written"),
    ("raised alpha", lambda c: edit(c.campaign_yaml, "name: crash", "name: crash\ngate: {alpha: 0.1}"), "gate.alpha is 0.1, but 0.05 was declared"),
    ("misnamed version", lambda c: shutil.copytree(c.version("v0001").root, c.root / "versions" / "mine"), "versions/mine: not a version's name"),
    ("damaged comparison", lambda c: c.version("v0001").comparisons()[0].write_text("{}"), "not a comparison"),
    ("campaign hook", lambda c: (c.hooks.mkdir(), (c.hooks / "reward.py").write_text("")), "hooks are not supported yet"),
    ("base policy without its record", lambda c: (c.base.policy / COMPLETE).unlink(), "its COMPLETE.json is gone"),
    ("hook", lambda c: (c.version("v0001").hooks.mkdir(), (c.version("v0001").hooks / "reward.py").write_text("")), "hooks are not supported yet"),
    ("half evaluation", lambda c: truncate(c.version("v0001").evaluation("dev") / "part-00000.parquet"), "truncated or changed"),
    ("evaluation without record", lambda c: (c.version("v0000").evaluation("probe") / COMPLETE).unlink(), "the write never finished"),
    ("half training table", lambda c: truncate(next(c.version("v0001").metrics.glob("*.parquet"))), "truncated or changed"),
    ("half policy", lambda c: truncate(c.base.policy / "model.safetensors"), "truncated or changed"),
    ("damaged record", lambda c: c.version("v0001").job("train", 0).record.write_text("{"), r"record\.json:\d: not valid JSON"),
    ("edited look", lambda c: c.look(1).write_text("{}\n"), r"look-000001\.json: not a look"),
    ("removed look", lambda c: c.look(1).unlink(), "is not in the ledger; the ledger was shortened"),
    ("nonsense decision", lambda c: edit(decision(c), "decision: keep", "decision: perhaps"), r"decision\.yaml:3: `decision`: Input should be 'keep', "),
    ("mistyped decision", lambda c: edit(decision(c), "promoted:", "promotd:"), r"decision\.yaml:4: unknown key `promotd`; did you mean `promoted`"),
    ("another decision", lambda c: edit(decision(c), "decision: keep\npromoted: true", "decision: prune\npromoted: false"),
     r"decision\.yaml: says prune, but its readings say keep and promoted\. Restore it, or remove it: .* write `by: person`"),
    ("promoted without being kept", lambda c: edit(decision(c), "decision: keep", "decision: prune"), r"a version that is not kept \(prune\) cannot be promoted"),
    ("edited reading", lambda c: edit(decision(c), "difference: 0.3", "difference: 0.4"), "reading against v0000 .look 1. is not what comparisons/ says"),
    ("readings cut out", lambda c: (edit(decision(c), "decision: keep\npromoted: true", "decision: prune\npromoted: false"), cut_readings(decision(c))),
     r"decision\.yaml: rests on other looks at dev than the gate takes now"),
    ("decision of another version", lambda c: edit(decision(c), "version: v0001", "version: v0000"), r"decision\.yaml: belongs to v0000, not to v0001|was copied"),
    ("decision without a reason", lambda c: say_why(decision(c), "person", " "),
     "a decision by a person says why"),
    ("stop on nothing", lambda c: edit(c.campaign_yaml, "watch: {every: 0}", "watch: {stop_on: [score.colapse]}"),
     r"watch\.stop_on names score\.colapse, which no live analyzer finds; did you mean score\.collapse\?"),
    ("unknown knob", lambda c: c.rules_yaml.write_text(RULES.replace("optimizer.lr,", "optimizer.lrr,")), r"rules\.yaml:\d+: .*optimizer\.lrr"),
    ("knob that is not an agent's", lambda c: c.rules_yaml.write_text(RULES.replace("optimizer.lr,", "steps,")), r"rules\.yaml:\d+: .*steps"),
    ("rule that waits for nothing", lambda c: c.rules_yaml.write_text(RULES.replace("{measure: score.probe_avg_at_k, above: 0}", "{finding: signal.ded_groups}")),
     r"waits for signal\.ded_groups, which no analyzer finds; did you mean signal\.dead_groups\?"),
    ("analyzer with a broken manifest", lambda c: analyzer(c, "analyzer.yaml", "layer:", "lair:"), r"mine/analyzer\.yaml:\d+: unknown key `lair`; did you mean `layer`"),
    ("analyzer with a broken template", lambda c: analyzer(c, "query.sql.j2", "SELECT", "SELECT {% if"), r"mine/query\.sql\.j2:\d+"),
    ("removed harness", lambda c: shutil.rmtree(c.harness(1).root), r"harness/h0001: gone, and \S*v0000/analysis/h0001 was made by it\. Restore it"),
    ("analyzers is a file", lambda c: c.analyzers_folder.touch(), r"/analyzers: is a file, where the folder of the campaign's own analyzers belongs"),
    ("proposed by nobody", lambda c: edit(c.version("v0001").version_yaml, "author: campaign", "author: agent"), "but no round in .* proposed it"),
    ("edited harness", lambda c: edit(c.harness(1).rules, "larger-steps", "huge-steps"), r"harness/h0001: .*Your own analyzers go into \S*/analyzers, your own rules"),
    ("edited analysis", lambda c: edit(c.version("v0001").analysis("h0001") / "score" / "findings.json", '"value": ', '"value":  '), "v0001/analysis/h0001"),
    ("damaged lease", lambda c: c.lease.write_text("[]"), "not a record of an owner"),
]


@pytest.mark.parametrize("damage, message", [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_damage_is_named_by_validate(campaign: CampaignPaths, damage: Callable, message: str) -> None:
    damage(campaign)
    assert re.search(message, "\n".join(find_problems(campaign)))


def test_validate_exits_2_with_one_line_a_problem(campaign: CampaignPaths) -> None:
    by_name = {name: damage for name, damage, _ in DAMAGE}
    for name in ("mistyped key", "no version.yaml"):
        by_name[name](campaign)
    found = evo("validate", str(campaign.root))
    assert found.returncode == 2 and len(found.stdout.splitlines()) >= 2 and "Traceback" not in found.stderr
    as_json = json.loads(evo("validate", str(campaign.root), "--json").stdout)
    assert as_json["valid"] is False and as_json["problems"] == found.stdout.splitlines()


LENIENT = {"half training table"}
"""Found by its size alone; everything else stops the controller as well."""


@pytest.mark.parametrize("damage, message", [d[1:] for d in DAMAGE if d[0] not in LENIENT], ids=[d[0] for d in DAMAGE if d[0] not in LENIENT])
def test_the_controller_refuses_to_guess(campaign: CampaignPaths, damage: Callable, message: str) -> None:
    damage(campaign)
    before = files(campaign)
    with pytest.raises(EvoError, match=message):
        Controller(campaign, lambda state, plan, events: None).run()
    assert files(campaign) == before, "nothing touched"


def test_a_refusal_has_one_clear_message_and_exit_code_2(campaign: CampaignPaths) -> None:
    edit(campaign.campaign_yaml, "samples_per_task", "sample_per_task")
    ran = evo("run", str(campaign.root))
    assert ran.returncode == 2 and "Traceback" not in ran.stderr and ran.stdout == ""
    assert ran.stderr.splitlines() == [
        f"evo-hpc: {campaign.campaign_yaml}:8: unknown key `evaluation.sample_per_task`; did you mean `samples_per_task`?"
    ]


def files(campaign: CampaignPaths) -> list[Path]:
    return sorted(p for p in campaign.root.rglob("*") if p.is_file() and "controller" not in p.parts)


def test_a_removed_evaluation_is_made_again_and_the_same_scores_are_the_same_look(campaign: CampaignPaths) -> None:
    before = outcome(campaign)
    shutil.rmtree(campaign.version("v0001").evaluation("dev"))
    finish(campaign)
    assert outcome(campaign) == before and len(campaign.looks()) == 1
    assert len([j for j in campaign.version("v0001").jobs() if j.kind == "evaluate"]) == 2


@pytest.mark.parametrize("remove", [
    lambda c: shutil.rmtree(c.version("v0001").train),
    lambda c: shutil.rmtree(c.base.policy),
])
def test_what_was_removed_is_published_again_from_its_job(campaign: CampaignPaths, remove: Callable) -> None:
    before = outcome(campaign)
    remove(campaign)
    finish(campaign)
    assert outcome(campaign) == before
    check_sound(campaign)


def test_a_missing_base_model(tmp_path: Path) -> None:
    paths = make_campaign(tmp_path / "campaign")
    edit(paths.campaign_yaml, "supervised: {steps: 1}", "path: /nowhere/model")
    for command in ("validate", "run"):
        done = evo(command, str(paths.root))
        assert done.returncode == 2 and "/nowhere/model" in done.stdout + done.stderr and "base_model" in done.stdout + done.stderr


def test_not_a_campaign(tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "absent", "no such campaign folder"), (tmp_path, "not a campaign folder")):
        done = evo("run", str(folder))
        assert done.returncode == 2 and message in done.stderr and list(tmp_path.iterdir()) == []


def test_after_another_evaluation_setting_the_remedy_that_is_named_works(campaign: CampaignPaths) -> None:
    """More samples: an old and a new evaluation are refused, the error says what to remove, and then both are made anew."""
    edit(campaign.campaign_yaml, "samples_per_task: 2", "samples_per_task: 3")
    shutil.rmtree(campaign.version("v0001").evaluation("dev"))
    done = evo("run", str(campaign.root))
    assert done.returncode == 2 and "v0001/decision.yaml: rests on other looks at dev than the gate takes now" in done.stderr
    campaign.version("v0001").decision_yaml.unlink()
    done = evo("run", str(campaign.root))
    assert done.returncode == 2 and "different evaluator epochs (samples_per_task: 2 -> 3)" in done.stderr and "eval/dev" in done.stderr
    assert len(campaign.looks()) == 1, "a refused comparison spends nothing"
    shutil.rmtree(campaign.version("v0000").evaluation("dev"))
    finish(campaign)
    last = json.loads(campaign.version("v0001").comparisons()[-1].read_text())
    assert last["interval"]["k"] == 3 and last["look"]["number"] == 2 and last["look"]["alpha"] < 0.01


def test_another_try_at_a_version_is_another_look(campaign: CampaignPaths) -> None:
    """Removing a version and training another in its place is no way to look at dev for free."""
    for number, lr in ((2, "0.0002"), (3, "0.0003")):
        shutil.rmtree(campaign.version("v0001").root)
        campaign.recipe_yaml.write_text(f"steps: 12\noptimizer: {{lr: {lr}}}\ncheckpoint: {{every: 4}}\n")
        finish(campaign)
        assert len(campaign.looks()) == number


def test_corruption_is_not_published_again(campaign: CampaignPaths) -> None:
    """The published policy and the job's copy are one file: a flipped byte is found, and the remedy does not launder it."""
    weights = campaign.version("v0001").policy(12) / "model.safetensors"
    job = campaign.version("v0001").job("train", 0).incarnation(0).policy(12) / "model.safetensors"
    for path in (weights, job):
        path.write_bytes(b"W" + path.read_bytes()[1:])
    assert "content differs from the hash" in evo("validate", str(campaign.root)).stdout
    shutil.rmtree(campaign.version("v0001").train)
    done = evo("run", str(campaign.root))
    assert done.returncode == 1 and "content differs from the hash" in done.stderr
    assert not campaign.version("v0001").train.exists()


def test_a_version_added_by_hand_works(campaign: CampaignPaths, repository: Path) -> None:
    """As the README says, with its own version.yaml and another learning rate: trained, evaluated, compared with its parent."""
    version = campaign.version("v0002")
    version.root.mkdir()
    (block,) = re.findall(r"```yaml\n(.*?)```", (repository / "README.md").read_text(), re.S)
    version.version_yaml.write_text(block)
    shutil.copy(campaign.version("v0001").recipe_yaml, version.recipe_yaml)
    edit(version.recipe_yaml, "lr: 0.0001", "lr: 0.0002")
    finish(campaign)
    shown = json.loads(evo("show", str(campaign.root), "v0002", "--json").stdout)
    assert shown["factors"] == ["optimizer"] and [c["against"] for c in shown["comparisons"]] == ["v0001"]
    assert shown["author"] == "person" and json.loads(evo("status", str(campaign.root), "--json").stdout)["looks"] == 2


def test_a_version_that_starts_where_another_ended(campaign: CampaignPaths) -> None:
    version = campaign.version("v0002")
    version.root.mkdir()
    version.version_yaml.write_text("id: v0002\nparents: [v0001]\ninit: v0001@12\n")
    shutil.copy(campaign.version("v0001").recipe_yaml, version.recipe_yaml)
    finish(campaign)
    changes = json.loads(evo("diff", str(campaign.root), "v0001", "v0002", "--json").stdout)
    assert changes["factors"] == ["init"] and changes["changes"][0]["after"] == "v0001@12"


def test_a_model_from_elsewhere_is_taken_as_it_is(tmp_path: Path) -> None:
    """Even with base_model.supervised still in the file, which then is not used; nobody is told to remove their model."""
    paths = make_campaign(tmp_path / "campaign")
    mine = tmp_path / "my model"
    mine.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (mine / name).write_text("{}")
    edit(paths.campaign_yaml, "supervised: {steps: 1}", f"path: {json.dumps(str(mine))}\n  supervised: {{steps: 1}}")
    finish(paths)
    assert paths.base.jobs() == [] and sorted(p.name for p in mine.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_copy_of_a_running_campaign_leaves_the_original_alone(tmp_path: Path) -> None:
    """cp -r in the middle of training: the copy trains by itself, stopping it does not stop the original."""
    import signal
    import time

    from tests.crash.campaign import controller

    original = make_campaign(tmp_path / "original", environment={"FAKE_STEP_SECONDS": "0.4"})
    first = controller(original)
    progress = original.version("v0001").job("train", 0).incarnation(0).progress
    deadline = time.time() + 60
    while not progress.exists():
        assert time.time() < deadline and first.poll() is None
        time.sleep(0.05)
    copy = CampaignPaths(tmp_path / "copy")
    shutil.copytree(original.root, copy.root, ignore=shutil.ignore_patterns(".tmp-*", "controller"))
    second = controller(copy)
    time.sleep(2)
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=60)
    assert first.wait(timeout=90) == 0
    check_sound(original)
    assert len(original.version("v0001").job("train", 0).incarnations()) == 1, "the original was never disturbed"
    finish(copy)
    check_sound(copy)
    assert outcome(copy) == outcome(original)


def test_a_torn_folder_is_set_aside_not_deleted(campaign: CampaignPaths) -> None:
    folder = campaign.version("v0001").evaluation("dev")
    (folder / COMPLETE).unlink()
    shutil.move(folder, folder.with_name("dev.mine"))
    finish(campaign)
    assert folder.with_name("dev.mine").is_dir() and (folder / COMPLETE).exists()


def test_a_person_may_overrule_the_gate_and_the_search_goes_on_from_there(campaign: CampaignPaths) -> None:
    edit(decision(campaign), "decision: keep\npromoted: true", "decision: prune\npromoted: false")
    say_why(decision(campaign), "person", "Its answers are right for the wrong reason.")
    assert evo("validate", str(campaign.root)).returncode == 0
    record = json.loads(evo("status", str(campaign.root), "--json").stdout)
    assert record["incumbent"] == "v0000" and record["versions"][1]["stage"] == "pruned"
    finish(campaign)
    assert "wrong reason" in decision(campaign).read_text(), "what a person wrote stays"


def test_a_removed_decision_is_made_again_without_another_look(campaign: CampaignPaths) -> None:
    before = decision(campaign).read_text()
    decision(campaign).unlink()
    finish(campaign)
    assert decision(campaign).read_text() == before and len(campaign.looks()) == 1


def test_a_fifth_analyzer_is_a_folder_and_nothing_else(campaign: CampaignPaths) -> None:
    analyzer(campaign, "query.sql.j2", "SELECT", "SELECT")
    finish(campaign)
    harness = campaign.harness(2)
    assert harness.analyzer("mine").manifest.exists() and (campaign.version("v0001").analysis("h0002") / "mine" / "findings.json").exists()
    assert (campaign.version("v0001").analysis("h0001") / "score").exists(), "what an earlier harness found stays"
    assert "mine.dead_group_fraction" in evo("analyze", str(campaign.root), "v0001").stdout


def test_a_finished_campaign_is_read_with_any_number_of_ranks(campaign: CampaignPaths) -> None:
    edit(campaign.recipe_yaml, "steps: 12", "steps: 12\ncompute: {tensor_parallel: 2}")
    assert find_problems(campaign) == [] and evo("status", str(campaign.root)).returncode == 0
