"""Runs analyzers in a process of their own, with limits on time, memory and output, and reads what they found."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

import evo_hpc
from evo_hpc.errors import Failure
from evo_hpc.harness.inputs import BadInputs, Inputs, effective_rows
from evo_hpc.harness.manifest import Analyzer, BadAnalyzer
from evo_hpc.harness.protocol import Outcome, Request
from evo_hpc.lineage.findings import AnalyzerReport
from evo_hpc.paths import AnalysisPaths

MEMORY_BYTES = 8 << 30
"""Address space of the process, far above what DuckDB is allowed: a bound on what a template can grow to."""
FILE_BYTES = 256 << 20
"""Size of any file that it writes."""
_POLL_SECONDS = 0.05
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH")


class AnalysisFailed(Failure):
    """The process that runs analyzers took too long, or died."""


def analyse(
    analyzers: Sequence[Analyzer], inputs: Inputs, out: Path, *, version: str, up_to_step: int | None,
    timeout_seconds: float = 300, while_waiting: Callable[[], None] | None = None,
) -> list[AnalyzerReport]:
    """Run analyzers over one version's tables; `out` gets one folder each (AnalysisPaths). Reports in the order given.

    `while_waiting` is called several times a second, for heartbeats; what it raises ends the analysis. Raises
    BadAnalyzer and BadInputs, which are the user's to mend, and AnalysisFailed.
    """
    return _analyse(analyzers, inputs, out, version=version, up_to_step=up_to_step, seconds=timeout_seconds, while_waiting=while_waiting, dry=False)


def check(analyzers: Sequence[Analyzer], *, timeout_seconds: float = 300, while_waiting: Callable[[], None] | None = None) -> None:
    """Run analyzers on empty tables, so that broken SQL and templates are found before a run needs them. Raises BadAnalyzer."""
    with tempfile.TemporaryDirectory(prefix="evo-check-") as out:
        _analyse(analyzers, Inputs(), Path(out), version="v0000", up_to_step=None, seconds=timeout_seconds, while_waiting=while_waiting, dry=True)


def _analyse(
    analyzers: Sequence[Analyzer], inputs: Inputs, out: Path, *, version: str, up_to_step: int | None, seconds: float,
    while_waiting: Callable[[], None] | None, dry: bool,
) -> list[AnalyzerReport]:
    if not analyzers:
        return []
    out.mkdir(parents=True, exist_ok=True)
    outcome = _run_child(Request(
        analyzers=[(str(analyzer.paths.root.resolve()), analyzer.manifest) for analyzer in analyzers],
        steps=_names(inputs.steps), train=_names(inputs.train), probe=_names(inputs.probe), effective=effective_rows(inputs.effective),
        version=version, up_to_step=up_to_step, out=str(out.resolve()), dry=dry,
        cpu_seconds=math.ceil(seconds) + 1, memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES, parent=os.getpid(),
    ), seconds, while_waiting)
    if outcome.state != "done":
        raise (BadAnalyzer if outcome.state == "bad_analyzer" else BadInputs)(outcome.message)
    return [AnalyzerReport.model_validate_json(AnalysisPaths(out / analyzer.name).findings.read_bytes()) for analyzer in analyzers]


def _names(paths: Sequence[Path]) -> list[str]:
    return [str(path.resolve()) for path in paths]


def _run_child(request: Request, seconds: float, while_waiting: Callable[[], None] | None) -> Outcome:
    names = ", ".join(manifest.name for _, manifest in request.analyzers)
    with tempfile.TemporaryDirectory(prefix="evo-analyse-") as scratch:
        asked, said, log = (Path(scratch, name) for name in ("request.json", "outcome.json", "log"))
        asked.write_text(request.model_dump_json(), encoding="utf-8")
        with asked.open("rb") as stdin, said.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "evo_hpc.harness.child"], stdin=stdin, stdout=stdout, stderr=stderr, cwd=scratch,
                env=_environment(scratch), start_new_session=True,
            )
            try:
                in_time = _wait(process, seconds, while_waiting)
            finally:
                _end(process)
        if not in_time:
            raise AnalysisFailed(f"analyzers {names} on {request.version}: not done after {seconds:g} s and ended; a query may never end, "
                                 "or the version has more rollouts than that time allows")
        if process.returncode:
            raise AnalysisFailed(f"analyzers {names} on {request.version}: {_how(process.returncode)}{_tail(log)}")
        try:
            return Outcome.model_validate_json(said.read_bytes())
        except ValidationError as error:
            raise AnalysisFailed(f"analyzers {names} on {request.version}: gave no outcome{_tail(log)}") from error


def _environment(scratch: str) -> dict[str, str]:
    """Nothing but what it takes to import this package: no home, no keys."""
    package = str(Path(evo_hpc.__file__).resolve().parent.parent)
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": package, "TMPDIR": scratch, "TZ": "UTC", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def _wait(process: subprocess.Popen[bytes], seconds: float, while_waiting: Callable[[], None] | None) -> bool:
    """Whether it ended in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            process.wait(timeout=_POLL_SECONDS)
            return True
        except subprocess.TimeoutExpired:
            if while_waiting is not None:
                while_waiting()
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it is left behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _how(code: int) -> str:
    if -code == signal.SIGXCPU or -code == signal.SIGKILL:
        return "killed (out of processor time or memory)"
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return ": " + lines[-1] if lines else ""
