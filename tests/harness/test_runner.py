"""The process that runs analyzers: its limits, what it may see, and how its errors read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from evo_hpc.harness import runner
from evo_hpc.harness.inputs import BadInputs, Inputs, effective_rows
from evo_hpc.harness.manifest import BadAnalyzer, load_analyzer
from evo_hpc.harness.runner import AnalysisFailed, analyse, check
from tests.harness.data import report_of, rollout, run_here, step_row, write_analyzer, write_inputs

ENDLESS = "SELECT count(*) AS step, 0.0 AS score_mean FROM range(100000000000) a, range(100000) b"
STEPS = [step_row(1), step_row(2, score_mean=0.75)]
POOR = "findings:\n  - {id: poor, severity: warning, measure: score, below: 0.7, says: 'Only {{ value | percent }} of {{ p.x }}.'}\n"
PLAIN = POOR.replace("{{ p.x }}", "it")
HOSTILE = "'; DROP TABLE steps; -- \\\" $b0 {{ 1 }}"


def children() -> set[str]:
    """Processes that run analyzers, as this one's children."""
    return {str(child.pid) for child in psutil.Process().children(recursive=True) if "evo_hpc.harness.child" in " ".join(child.cmdline())}


def test_a_folder_is_all_it_takes(tmp_path: Path) -> None:
    """Values with quotes and semicolons come through, and the process sees neither home nor keys."""
    folder = write_analyzer(
        tmp_path / "mine", query="SELECT {{ p.x | bind }} AS note, step, score_mean FROM steps WHERE {{ p.x | bind }} != 'a' ORDER BY step",
        more=f'parameters:\n  x: {{value: "{HOSTILE}", about: a trap}}\n{POOR}',
    )
    [report] = analyse([load_analyzer(folder)], write_inputs(tmp_path, steps=STEPS), tmp_path / "out", version="v0007", up_to_step=None)
    note = "'; DROP TABLE steps; -- \" $b0 {{ 1 }}"
    assert report.measures["score"].value == 0.625 and report.rows == 2
    assert [(f.id, f.text) for f in report.findings] == [("mine.poor", f"Only 62 % of {note}.")]
    assert pq.read_table(tmp_path / "out/mine/table.parquet").column("note").to_pylist() == [note, note]
    assert (tmp_path / "out/mine/report.md").read_text() == "v0007: 0.625\n"
    assert not children()


def test_the_environment_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    monkeypatch.setenv("HOME", "/home/somebody")
    environment = runner._environment("/scratch")
    assert "secret" not in environment.values() and "HOME" not in environment and environment["PATH"] == os.environ["PATH"]


def test_it_loads_nothing_heavy() -> None:
    heavy = ("torch", "scipy", "pandas", "ruamel", "rich", "typer", "matplotlib")
    program = f"import sys, evo_hpc.harness.child\nprint(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_an_endless_query_is_ended(tmp_path: Path) -> None:
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine", query=ENDLESS))
    began, waited = time.monotonic(), []
    with pytest.raises(AnalysisFailed, match=r"analyzers mine on v0001: not done after 2 s"):
        analyse([analyzer], Inputs(), tmp_path / "out", version="v0001", up_to_step=None, timeout_seconds=2, while_waiting=lambda: waited.append(1))
    assert time.monotonic() - began < 10 and len(waited) > 5 and not children()


def test_what_is_raised_while_waiting_ends_it(tmp_path: Path) -> None:
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine", query=ENDLESS))

    def lost() -> None:
        raise RuntimeError("the lease is lost")

    with pytest.raises(RuntimeError, match="the lease is lost"):
        analyse([analyzer], Inputs(), tmp_path / "out", version="v0001", up_to_step=None, while_waiting=lost)
    assert not children()


def test_a_template_cannot_take_all_memory(tmp_path: Path) -> None:
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine", report="{% set x = 'a' * 10 ** 11 %}"))
    with pytest.raises(BadAnalyzer, match=r"analyzer mine: .*report.md.j2: takes more memory"):
        analyse([analyzer], Inputs(), tmp_path / "out", version="v0001", up_to_step=None)


def test_a_table_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FILE_BYTES", 1 << 20)
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine", query="SELECT hash(range) AS step, random() AS score_mean FROM range(500000)"))
    with pytest.raises(BadAnalyzer, match=r"analyzer mine: .*writes a file of more than 1 MiB"):
        analyse([analyzer], Inputs(), tmp_path / "out", version="v0001", up_to_step=None)


def test_the_end_of_the_process_itself_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine"))
    monkeypatch.setattr(runner, "MEMORY_BYTES", 64 << 20)  # less than it takes to start
    with pytest.raises(AnalysisFailed, match=r"analyzers mine on v0001: ended"):
        analyse([analyzer], Inputs(), tmp_path / "out", version="v0001", up_to_step=None)


def test_dev_never_reaches_an_analyzer(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, probe=[rollout("t0", 0, 1, suite="dev")])
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine"))
    with pytest.raises(BadInputs, match="probe.parquet: rollouts of 'dev'"):
        analyse([analyzer], inputs, tmp_path / "out", version="v0001", up_to_step=None)
    assert not list((tmp_path / "out").iterdir())


def test_checking_finds_all_that_is_broken_before_a_run_does(tmp_path: Path) -> None:
    good = write_analyzer(tmp_path / "good")
    sql = write_analyzer(tmp_path / "sql", query="SELECT step,\n  scor_mean FROM steps ORDER BY step")
    says = write_analyzer(tmp_path / "says", more=POOR)
    report = write_analyzer(tmp_path / "report", report="a\n{{ measures.nosuch }}\n")
    check([load_analyzer(good)])
    with pytest.raises(BadAnalyzer) as caught:
        check([load_analyzer(folder) for folder in (good, sql, says, report)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"analyzer sql: {sql}/query.sql.j2:2: ") and "scor_mean" in lines[0] and "score_mean" in lines[0]
    assert lines[1].startswith(f"analyzer says: {says}/analyzer.yaml: `says` of finding `poor`: ") and "'x'" in lines[1]
    assert lines[2].startswith(f"analyzer report: {report}/report.md.j2:2: ") and "nosuch" in lines[2]


@pytest.mark.parametrize(("changes", "message"), [
    ({"measures": "SELECT score_mean FROM result"}, "measures.sql.j2: gives 0 rows; measures are exactly one row"),
    ({"measures": "SELECT 'x' AS score"}, "measures are numbers, these are not: score (string)"),
    ({"measures": "SELECT 1 AS score__se"}, "score__se is the standard error of no measure"),
    ({"measures": "SELECT 1 AS score, 2 AS score"}, "two columns are called score"),
    ({"measures": "SELECT 1 AS other", "more": PLAIN}, "finding `poor` rests on `score`, which measures.sql.j2 does not give; it gives other"),
    ({"query": "SELECT {{ p.x }} AS score_mean", "more": "parameters:\n  x: {value: 1, about: a}\n"}, "query.sql.j2:1: 1 would go into the SQL"),
    ({"query": "SELECT {{ p.nosuch | bind }}"}, "query.sql.j2:1: 'dict object' has no attribute 'nosuch'"),
    ({"query": "SELECT 1 AS score_mean, INTERVAL 1 DAY AS x"}, "its table cannot be stored"),
    ({"query": "SELECT 1; SELECT 2"}, "query.sql.j2: has to be one SELECT"),
    ({"query": "SELECT *\nFROM read_csv('/etc/passwd')"}, "query.sql.j2:2: Permission Error"),
    ({"more": PLAIN.replace("says:", "evidence: {where: nosuch > 1}, says:")}, "`evidence` of finding `poor`: Binder Error"),
    ({"more": PLAIN.replace("says:", "evidence: {order: nosuch}, says:")}, "`evidence` of finding `poor`: Binder Error"),
    ({"report": "{{ 1 // 0 }}"}, "report.md.j2:1: "),
])
def test_each_mistake_is_one_message_with_its_file(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    outcome = run_here(load_analyzer(write_analyzer(tmp_path / "mine", **changes)), Inputs(), tmp_path / "out", dry=True)
    assert outcome.state == "bad_analyzer" and outcome.message.startswith(f"analyzer mine: {tmp_path}")
    assert message in outcome.message


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    measures = "SELECT 'nan'::DOUBLE AS a, 1e300 * 1e300 AS b, NULL AS c, 3::HUGEINT AS d, 1.5 AS e, 2 AS e__se"
    folder = write_analyzer(tmp_path / "mine", query="SELECT 1", measures=measures, report="{{ measures.d | number }}")
    found = report_of(load_analyzer(folder), Inputs(), tmp_path / "out").measures
    none = (None, None)
    assert {name: (m.value, m.se) for name, m in found.items()} == {"a": none, "b": none, "c": none, "d": (3, None), "e": (1.5, 2)}


def test_effective_yaml_is_flattened(tmp_path: Path) -> None:
    path = tmp_path / "effective.yaml"
    path.write_text(
        "job: x\nrecipe:\n  steps: 3\n  optimizer: {lr: 5e-05}\n  reward: {clip: null, weights: {}}\nrollout: {eager: true, ids: [1, 2]}\n"
    )
    assert effective_rows(path) == [
        ("recipe", "steps", "3"), ("recipe", "optimizer.lr", "5e-05"), ("recipe", "reward.clip", None), ("recipe", "reward.weights", "{}"),
        ("rollout", "eager", "true"), ("rollout", "ids", "[1, 2]"),
    ]
    assert effective_rows(None) == []


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    analyzer = load_analyzer(write_analyzer(tmp_path / "mine"))
    inputs = write_inputs(tmp_path, steps=STEPS)
    for name in ("a", "b"):
        analyse([analyzer], inputs, tmp_path / name, version="v0001", up_to_step=None)
    first, second = ({file.name: file.read_bytes() for file in (tmp_path / name / "mine").iterdir()} for name in ("a", "b"))
    assert len(first) == 3 and first == second
