"""The evaluator epoch changes with everything that determines a score, and with nothing else; missing rollouts are failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evo_hpc.config.campaign import Evaluation
from evo_hpc.evaluation.epoch import differing, epoch_components, epoch_of
from evo_hpc.evaluation.scores import BadEvaluation, read_evaluation, scores_by_task, summarise
from evo_hpc.paths import COMPLETE, VersionPaths
from evo_hpc.store.manifest import complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import write_table
from tests.store.test_tables import rollout

INPUTS: dict[str, Any] = {
    "suite": "dev", "task_set": "t", "evaluation": Evaluation(), "verifier": {"version": "1"}, "template": "x", "tokenizer": "y",
    "engine": {"engine": "vllm", "engine_version": "0.32", "dtype": "float32", "max_model_len": "80"}, "score": "correct",
    "campaign_seed": 7, "stop_token_ids": (1,),
}


@pytest.mark.parametrize("change", [
    {"suite": "probe"}, {"task_set": "u"}, {"verifier": {"version": "2"}}, {"template": "z"}, {"tokenizer": "z"}, {"score": "format"}, {"campaign_seed": 8},
    {"stop_token_ids": (1, 2)},
    {"engine": {**INPUTS["engine"], "engine_version": "0.33"}}, {"engine": {**INPUTS["engine"], "dtype": "bfloat16"}},
    *({"evaluation": Evaluation(**{name: value})} for name, value in
      {"samples_per_task": 4, "temperature": 0.7, "top_p": 0.9, "max_response_tokens": 32, "seed": 1}.items()),
])
def test_whatever_determines_a_score_changes_the_epoch(change: dict[str, Any]) -> None:
    a, b = epoch_components(**INPUTS), epoch_components(**{**INPUTS, **change})
    assert epoch_of(a) != epoch_of(b)
    assert len(differing(a, b)) == 1


def test_a_longer_context_and_the_list_of_suites_do_not() -> None:
    a = epoch_components(**INPUTS)
    b = epoch_components(**{**INPUTS, "engine": {**INPUTS["engine"], "max_model_len": "99"}, "evaluation": Evaluation(suites=["dev"])})
    assert epoch_of(a) == epoch_of(b) and differing(a, b) == []


def test_missing_rollouts_and_verifier_errors_count_as_failures() -> None:
    rows = [rollout(task_id="a", sample=0), rollout(task_id="a", sample=1, error_class="verifier", reward=None, components=[])]
    summary = summarise(rows, ["a", "b"], 2)
    assert (summary["expected"], summary["rollouts"], summary["missing"], summary["avg_at_k"]) == (4, 2, 3, 0.25)


@pytest.fixture
def version(tmp_path: Path) -> VersionPaths:
    paths = VersionPaths(tmp_path / "v0001")
    folder = paths.evaluation("dev")
    rows = [rollout(task_id="b", sample=1, components=[("correct", 0.0)]), rollout(task_id="b", sample=0), rollout(task_id="a", sample=0)]
    write_table(folder / "part-00000.parquet", rows, ROLLOUT)
    complete(folder, {"version": "v0001", "suite": "dev", "policy_step": 1, "epoch": "e", "epoch_components": {}, "policy_identity": "p", **summarise(rows, ["a", "b"], 2)})
    return paths


def test_scores_by_task_in_sample_order(version: VersionPaths) -> None:
    assert scores_by_task(version, "dev") == {"b": [1.0, 0.0], "a": [1.0]}
    record = read_evaluation(version, "dev")
    assert record is not None and record.missing == 1 and record.avg_at_k == 0.5
    assert read_evaluation(version, "probe") is None


def test_an_evaluation_of_another_version_is_not_taken(version: VersionPaths) -> None:
    version.root.rename(version.root.with_name("v0002"))
    with pytest.raises(BadEvaluation, match="belongs to v0001, not to v0002; a copied version starts without eval/"):
        read_evaluation(VersionPaths(version.root.with_name("v0002")), "dev")


def test_the_identity_of_an_evaluation_is_that_of_its_rows(version: VersionPaths) -> None:
    first = read_evaluation(version, "dev")
    folder = version.evaluation("dev")
    (folder / COMPLETE).unlink()
    write_table(folder / "part-00000.parquet", [rollout(task_id="a")], ROLLOUT)
    complete(folder, {"version": "v0001", "suite": "dev", "policy_step": 1, "epoch": "e", "epoch_components": {}, "policy_identity": "p",
                      **summarise([rollout(task_id="a")], ["a", "b"], 2)})
    second = read_evaluation(version, "dev")
    assert first is not None and second is not None and first.id != second.id


def test_a_damaged_evaluation_says_what_to_do(version: VersionPaths) -> None:
    (version.evaluation("dev") / COMPLETE).write_text('{"files": [], "meta": {}}')
    with pytest.raises(BadEvaluation, match="Remove the folder"):
        read_evaluation(version, "dev")
