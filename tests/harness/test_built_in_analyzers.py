"""Each finding of the built-in analyzers on a run that has it, and on one that does not; the numbers against numpy's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from evo_hpc.harness.inputs import Inputs
from evo_hpc.lineage.findings import AnalyzerReport
from evo_hpc.stats.passk import pass_at_k
from tests.harness.data import built_in, group, report_of, rollout, run_here, step_row, write_inputs

ANALYZERS = ("score", "signal", "length", "optimisation")
EFFECTIVE = """\
job: x
recipe:
  token_budget: 4096
  optimizer: {lr: 5.0e-05, grad_clip: 1.0, clip_low: 0.2, clip_high: 0.28, kl_coef: 0.001, mini_batches: 2}
  tool_use: {system_prompt: null}
trainer:
  token_budget: 4096
  optimizer: {lr_max: 0.00005, grad_clip: 1}
"""


def found(report: AnalyzerReport) -> set[str]:
    return {finding.id.split(".")[1] for finding in report.findings}


def value(report: AnalyzerReport, name: str) -> float | None:
    return report.measures[name].value


# -- score


def score_of(tmp_path: Path, scores: Sequence[float | None]) -> AnalyzerReport:
    steps = [step_row(step, score_mean=score) for step, score in enumerate(scores, start=1)]
    return report_of(built_in("score"), write_inputs(tmp_path, steps=steps), tmp_path / "out")


def wobble(scores: Sequence[float], size: float = 0.01) -> list[float]:
    return [score + size * (-1) ** i for i, score in enumerate(scores)]


@pytest.mark.parametrize(("scores", "findings"), [
    ([0.6] * 5 + [0.5] * 10 + [0.2] * 5, {"collapse", "fell_from_peak", "plateau"}),
    ([0.6] * 4 + [0.1] * 5, set()),  # less than two windows: too early to say
    ([0.6] * 5 + [0.29] * 5, {"collapse", "fell_from_peak"}),
    ([0.6] * 5 + [0.31] * 5, {"fell_from_peak"}),
    ([0.0] * 10, set()),
    ([0.0] * 20, {"plateau"}),
    (wobble([0.2 + 0.02 * i for i in range(30)]), {"still_rising"}),
    (wobble([0.7] * 30), {"plateau"}),
    (wobble([0.7] * 16), set()),
    ([0.5], set()),
    ([None] * 12, set()),
])
def test_findings_on_the_train_score(tmp_path: Path, scores: list[float | None], findings: set[str]) -> None:
    assert found(score_of(tmp_path, scores)) == findings


def test_the_collapse_is_told_with_numbers_and_evidence(tmp_path: Path) -> None:
    report = score_of(tmp_path, [0.6] * 5 + [0.5] * 10 + [0.2] * 5)
    collapse = next(f for f in report.findings if f.id == "score.collapse")
    assert collapse.text == "The train score collapsed, from 60.0 % in the first 5 steps to 20.0 % in the last 5."
    assert (collapse.severity, collapse.measure, collapse.below) == ("critical", "score.collapse_ratio", 0.5)
    assert collapse.value == pytest.approx(1 / 3) and [row["step"] for row in collapse.evidence] == [16, 17, 18, 19, 20]


def test_windows_of_a_short_run_do_not_overlap(tmp_path: Path) -> None:
    report = score_of(tmp_path, [0.1, 0.2, 0.5, 0.8, 0.9])
    assert value(report, "train_score_early") == pytest.approx(0.15) and value(report, "train_score_late") == pytest.approx(0.85)
    assert report.measures["train_score_late"].se == pytest.approx(np.std([0.8, 0.9], ddof=1) / np.sqrt(2))


def test_the_trend_is_least_squares(tmp_path: Path) -> None:
    scores = [0.3 + 0.01 * i + 0.05 * np.sin(5 * i) for i in range(30)]
    report = score_of(tmp_path, scores)
    x, y = np.arange(16, 31), np.array(scores[15:])
    slope, offset = np.polyfit(x, y, 1)
    residual = y - slope * x - offset
    error = np.sqrt((residual**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum()) * (x[-1] - x[0])
    assert value(report, "rise") == pytest.approx(slope * (x[-1] - x[0])) and report.measures["rise"].se == pytest.approx(error)


def test_probe_is_scored_as_the_evaluation_scores_it(tmp_path: Path) -> None:
    rewards = {"t0": [1, 1, 0, 0], "t1": [0, 0, 0, 0], "t2": [1, 1, 1, 1], "t3": [1, None, 0, 0], "t4": [1, 1]}  # one error, two missing
    rows = [rollout(task, i, r, suite="probe", advantage=None, kept=None) for task, rs in rewards.items() for i, r in enumerate(rs)]
    report = report_of(built_in("score"), write_inputs(tmp_path, probe=rows), tmp_path / "out")
    means = [0.5, 0, 1, 0.25, 0.5]
    assert value(report, "probe_avg_at_k") == pytest.approx(np.mean(means))
    assert report.measures["probe_avg_at_k"].se == pytest.approx(np.std(means, ddof=1) / np.sqrt(5))
    scores = {task: [float(r or 0) for r in rs] for task, rs in rewards.items()}
    assert value(report, "probe_pass_at_k") == pytest.approx(pass_at_k(scores, tasks=list(rewards), n=4, k=4))
    text = (tmp_path / "out/score/report.md").read_text()
    assert "| digits = 3 | 3 | 66.7 % |" in text and "| digits = 4 | 2 | 12.5 % |" in text and not report.findings


# -- signal

ALIVE, FAIL, PASS = [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]


def signal_of(tmp_path: Path, groups_of: Callable[[int], Sequence[Sequence[float | None]]], steps: int = 8, **changes: Any) -> AnalyzerReport:
    rows = [row for s in range(1, steps + 1) for i, rewards in enumerate(groups_of(s)) for row in group(f"t{i}", rewards, s, **changes)]
    return report_of(built_in("signal"), write_inputs(tmp_path, train=rows), tmp_path / "out")


@pytest.mark.parametrize(("groups_of", "findings"), [
    (lambda s: [ALIVE] * 4, set()),
    (lambda s: [ALIVE] * 3 + [FAIL], set()),
    (lambda s: [ALIVE] * 3 + [FAIL, PASS], {"dead_groups"}),
    (lambda s: [FAIL] * 4, {"dead_groups", "mostly_dead_groups", "all_fail_groups", "low_spread"}),
    (lambda s: [PASS] * 4, {"dead_groups", "mostly_dead_groups", "all_pass_groups", "low_spread"}),
    (lambda s: [PASS if s > 6 else ALIVE] * 4, {"all_pass_groups", "low_spread"}),
    (lambda s: [FAIL if s < 3 else ALIVE] * 4, set()),
    (lambda s: [[1, 1.04, 1, 1.04]] * 4, {"low_spread"}),
    (lambda s: [[1, 1, 1, 1, 1, 1, 1, 0]] * 4, {"advantage_imbalance"}),
    (lambda s: [[0, 0, 0, 0, 0, 0, 0, 1]] * 4, {"advantage_imbalance"}),
    (lambda s: [ALIVE] * 3 + [[1, 0, None, 0]], {"verifier_errors"}),
])
def test_findings_on_the_signal(tmp_path: Path, groups_of: Callable[[int], list[list[float]]], findings: set[str]) -> None:
    assert found(signal_of(tmp_path, groups_of)) == findings


def test_dead_groups_are_split_and_counted_without_errors(tmp_path: Path) -> None:
    report = signal_of(tmp_path, lambda s: [ALIVE, ALIVE, FAIL, PASS, PASS, [1, None, 1, 1]] if s > 4 else [ALIVE] * 6)
    assert value(report, "dead_group_fraction") == pytest.approx(12 / 44) and value(report, "all_pass_fraction") == pytest.approx(8 / 44)
    assert report.measures["dead_group_fraction"].se == pytest.approx(np.sqrt(12 / 44 * 32 / 44 / 44))
    assert value(report, "dead_group_fraction_early") == 0 and value(report, "dead_group_fraction_late") == pytest.approx(0.6)
    assert value(report, "all_fail_fraction_late") == pytest.approx(0.2) and value(report, "errored_group_fraction") == pytest.approx(4 / 48)
    assert value(report, "reward_spread_alive_late") == pytest.approx(np.std(ALIVE, ddof=1))
    assert "| 4 of 4 | 8 |" in (tmp_path / "out/signal/report.md").read_text()


def test_one_step_is_enough_for_the_signal(tmp_path: Path) -> None:
    report = signal_of(tmp_path, lambda s: [FAIL, FAIL, ALIVE], steps=1)
    assert found(report) == {"dead_groups", "mostly_dead_groups", "all_fail_groups"}
    assert "all wrong: 67 %" in report.findings[0].text and report.findings[0].evidence[0]["step"] == 1


# -- length


def length_of(tmp_path: Path, change: Callable[[int, int], dict[str, Any]], rewards: Sequence[float] = ALIVE) -> AnalyzerReport:
    rows = [
        {**row, **change(step, row["sample"])} for step in range(1, 9) for task in range(3) for row in group(f"t{task}", rewards, step)
    ]
    return report_of(built_in("length"), write_inputs(tmp_path, train=rows), tmp_path / "out")


def form(good: bool) -> dict[str, Any]:
    return {"components": [("correct", 0.0), ("format", float(good))]}


@pytest.mark.parametrize(("change", "findings"), [
    (lambda step, i: {}, set()),
    (lambda step, i: {"truncated": step > 6 and i == 0}, {"truncation"}),
    (lambda step, i: {"truncated": step < 3}, set()),
    (lambda step, i: form(i > 1), {"format_violations"}),
    (lambda step, i: form(i > 0), set()),
    (lambda step, i: {"response_tokens": 30 - 5 * i}, {"length_pays"}),  # the first two of a group are the right ones
    (lambda step, i: {"response_tokens": 30 + 5 * (i % 2)}, set()),
    (lambda step, i: {"response_tokens": 10 + 5 * step}, {"length_drift"}),
    (lambda step, i: {"response_tokens": 100 - 10 * step}, {"length_drift"}),
    (lambda step, i: {"trigrams_unique": 8}, {"repetition"}),
])
def test_findings_on_length(tmp_path: Path, change: Callable[[int, int], dict[str, Any]], findings: set[str]) -> None:
    assert found(length_of(tmp_path, change)) == findings


def test_where_no_form_is_judged_there_is_no_number(tmp_path: Path) -> None:
    report = length_of(tmp_path, lambda step, i: {})
    assert value(report, "format_violation_fraction") is None and value(report, "truncated_fraction") == 0
    assert value(report, "length_reward_correlation") is None  # all lengths are the same


def test_a_hard_prompt_is_no_correlation(tmp_path: Path) -> None:
    """Long prompts that always fail and short ones that always succeed say nothing about length within a prompt."""
    rows = [
        rollout(f"t{t}", i, float(t == 0 or i < 2 and t == 1), step=s, response_tokens=20 + 50 * t + i % 2)
        for s in range(1, 9) for t in range(3) for i in range(4)
    ]
    report = report_of(built_in("length"), write_inputs(tmp_path, train=rows), tmp_path / "out")
    assert value(report, "length_reward_correlation") == pytest.approx(0, abs=1e-9) and not report.findings


def test_the_direction_of_length_is_told(tmp_path: Path) -> None:
    for number, sign in enumerate((1, -1)):
        report = length_of(tmp_path / str(number), lambda step, i, sign=sign: {"response_tokens": 50 - sign * 5 * i})
        assert report.findings[0].text.startswith("Longer" if sign > 0 else "Shorter")


# -- optimisation


def optimisation_of(
    tmp_path: Path, metrics: Callable[[int], dict[str, float | None]] = lambda step: {}, *, effective: str | None = EFFECTIVE, steps: int = 20
) -> AnalyzerReport:
    rows = [step_row(step, **metrics(step)) for step in range(1, steps + 1)]
    return report_of(built_in("optimisation"), write_inputs(tmp_path, steps=rows, effective=effective), tmp_path / "out")


@pytest.mark.parametrize(("metrics", "findings"), [
    (lambda step: {}, set()),
    (lambda step: {"clip_fraction_low": 0.0, "clip_fraction_high": 0.0005}, {"inert_clip"}),
    (lambda step: {"clip_fraction_low": 0.0, "clip_fraction_high": 0.002}, set()),
    (lambda step: {"clip_fraction_low": 0.0, "clip_fraction_high": 0.0, "approx_kl_old": 0.0}, {"inert_clip"}),  # one update a batch
    (lambda step: {"grad_clipped": 0.0}, {"inert_grad_clip"}),
    (lambda step: {"grad_clipped": float(step % 5 != 0)}, {"mostly_clipped_gradients"}),
    (lambda step: {"entropy": 1.0 if step < 10 else 0.05}, {"entropy_collapse"}),
    (lambda step: {"entropy": 1.0 if step < 10 else 0.2}, set()),
    (lambda step: {"kl": 0.02 * step}, {"kl_high"}),
    (lambda step: {"grad_norm": 9.0 if step == 7 else 0.5}, {"grad_spikes"}),
    (lambda step: {"approx_kl_old": 2e-5}, {"small_updates"}),
    (lambda step: {"ratio_max": 30.0 if step == 3 else 1.5}, {"extreme_ratio"}),
    (lambda step: {"sampler_kl": 0.02}, {"sampler_mismatch"}),
    (lambda step: {"trained_tokens": 0.0 if step % 2 else 500.0}, {"skipped_steps"}),
    (lambda step: dict.fromkeys(("trained_tokens", "grad_norm", "kl", "entropy"), None if step % 2 else 0.4) | {"kl": 0.01}, {"skipped_steps"}),
])
def test_findings_on_the_optimisation(tmp_path: Path, metrics: Callable[[int], dict[str, float | None]], findings: set[str]) -> None:
    assert found(optimisation_of(tmp_path, metrics)) == findings


def test_a_setting_that_did_not_reach_the_trainer_is_critical(tmp_path: Path) -> None:
    report = optimisation_of(tmp_path, effective=EFFECTIVE.replace("grad_clip: 1}", "grad_clip: 0.5}"))
    finding = report.findings[0]
    assert (finding.id, finding.severity, finding.value) == ("optimisation.not_effective", "critical", 1)
    assert [(row["name"], row["asked"], row["ran_with"]) for row in finding.evidence] == [("optimizer.grad_clip", "1.0", "0.5")]


def test_each_setting_that_did_not_reach_its_place_is_a_finding_of_its_own(tmp_path: Path) -> None:
    tampered = EFFECTIVE.replace("grad_clip: 1}", "grad_clip: 0.5}").replace("trainer:\n", "cluster: {trainer: {threads: 2}}\ntrainer:\n  threads: 1\n")
    findings = optimisation_of(tmp_path, effective=tampered).findings
    assert [(f.id, f.evidence[0]["name"], len(f.evidence)) for f in findings] == [
        ("optimisation.not_effective", "cluster.trainer.threads", 1), ("optimisation.not_effective", "optimizer.grad_clip", 1),
    ]
    assert findings[0].text.startswith("cluster.trainer.threads: 2 was asked for, and the job ran with 1 (trainer.threads)")
    assert all(f.text in (tmp_path / "out/optimisation/report.md").read_text() for f in findings)


def test_inert_knobs_have_a_row_with_their_canary(tmp_path: Path) -> None:
    report = optimisation_of(tmp_path, lambda step: {"clip_fraction_low": 0.0, "clip_fraction_high": 0.0, "truncated_fraction": 0.0})
    assert value(report, "inert_knobs") == 3
    assert [(row["name"], row["canary"], row["acted"]) for row in report.findings[0].evidence] == [
        ("optimizer.clip_high", "clip_fraction_high", 0), ("optimizer.clip_low", "clip_fraction_low", 0),
    ]
    assert "| optimizer.clip_high | 0.28 | – | clip_fraction_high | 0 % | 0 |" in (tmp_path / "out/optimisation/report.md").read_text()


def test_numbers_are_equal_however_they_are_written(tmp_path: Path) -> None:
    assert value(optimisation_of(tmp_path), "not_effective_knobs") == 0


def test_without_its_own_account_nothing_is_said_of_the_configuration(tmp_path: Path) -> None:
    report = optimisation_of(tmp_path, effective=None)
    assert value(report, "not_effective_knobs") is None and not report.findings


def test_few_steps_are_no_trend(tmp_path: Path) -> None:
    report = optimisation_of(tmp_path, lambda step: {"entropy": 1.0 / 100**step}, steps=3)
    assert value(report, "entropy_ratio") is None and "entropy_collapse" not in found(report)


# -- all


@pytest.mark.parametrize("name", ANALYZERS)
def test_a_version_without_training_has_no_findings(tmp_path: Path, name: str) -> None:
    probe = [rollout(f"t{t}", i, float(i > t), suite="probe", advantage=None, kept=None) for t in range(3) for i in range(4)]
    report = report_of(built_in(name), write_inputs(tmp_path, probe=probe), tmp_path / "out")
    assert not report.findings
    measured = {each for each, measure in report.measures.items() if measure.value is not None}
    assert all(each.startswith("probe_") for each in measured), measured


@pytest.mark.parametrize("name", ANALYZERS)
def test_of_nothing_there_is_nothing_to_say_and_every_sentence_can_be_said(tmp_path: Path, name: str) -> None:
    outcome = run_here(built_in(name), Inputs(), tmp_path / "out", dry=True)
    assert outcome.state == "done", outcome.message


@pytest.mark.parametrize("name", ANALYZERS)
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    """Also where the rows come in another order: the analyzer, not the file, says how its table is sorted."""
    rng = np.random.default_rng(0)
    train = [
        row for s in range(1, 13) for t in range(5)
        for row in group(f"t{t}", rng.integers(0, 2, 4).tolist(), s, response_tokens=int(rng.integers(5, 50)))
    ]
    probe = [rollout(f"t{t}", i, float(rng.integers(0, 2)), suite="probe") for t, i in itertools.product(range(9), range(4))]
    steps = [step_row(s, score_mean=float(rng.random())) for s in range(1, 13)]
    seen, reports = [], []
    for number, order in enumerate((1, 1, -1)):
        inputs = write_inputs(tmp_path / str(number), steps=steps[::order], train=train[::order], probe=probe[::order], effective=EFFECTIVE)
        reports.append(report_of(built_in(name), inputs, tmp_path / str(number) / "out"))
        seen.append([file.read_bytes() for file in sorted((tmp_path / str(number) / "out" / name).iterdir())])
    assert len(seen[0]) == 3 and seen[0] == seen[1]
    tables = [pq.read_table(tmp_path / str(number) / "out" / name / "table.parquet").to_pylist() for number in (0, 2)]
    for first, other in zip(*tables, strict=True):  # sums of floats in another order differ in the last bit
        assert other == pytest.approx(first)
    assert {n: m.value for n, m in reports[2].measures.items()} == pytest.approx({n: m.value for n, m in reports[0].measures.items()})


def test_the_watch_sees_only_what_has_happened(tmp_path: Path) -> None:
    steps = [step_row(s, score_mean=0.6 if s <= 15 else 0.1) for s in range(1, 26)]
    inputs = write_inputs(tmp_path, steps=steps, probe=[rollout("t0", 0, 1, suite="probe")])
    early = report_of(built_in("score"), inputs, tmp_path / "early", up_to_step=15)
    late = report_of(built_in("score"), inputs, tmp_path / "late", up_to_step=25)
    assert "collapse" not in found(early) and "collapse" in found(late)
    assert early.up_to_step == 15 and value(early, "probe_avg_at_k") is None
