"""Makes a process quick at what is no subject of crash tests; called in the process that forks cases, never in one that tests run in.

Measured: of the CPU time of a campaign's controller half is reading YAML by pure Python and a quarter compiling the templates of
analyzers; imports take more than all the rest. What is read, written, asked of Slurm and concluded stays what it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml.comments import CommentedMap

from evo_hpc.config import yaml_io
from evo_hpc.dispatch import launcher
from evo_hpc.dispatch.roles import Role
from evo_hpc.dispatch.slurm import judge, queue
from evo_hpc.harness import manifest, runner
from evo_hpc.harness.protocol import Outcome
from evo_hpc.lineage.findings import AnalyzerReport
from evo_hpc.paths import AnalysisPaths
from evo_hpc.store.atomic import dump_json


class _Loader(yaml.CSafeLoader):
    """YAML 1.2's scalars, as the package reads them."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"), ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node)))
_dump_tree = yaml_io.dump_tree
RUN_CHILD = runner._run_child
"""Real analyzers, for who wants them."""


def hasten() -> None:
    """For the rest of this process's life, and of its forks."""
    yaml_io._parse = lambda path, text: CommentedMap(yaml.load(text, _Loader))  # type: ignore[assignment]
    yaml_io.dump_tree = _json_is_yaml
    manifest.check_template = lambda *_: None  # type: ignore[assignment]
    runner._run_child = _find_nothing  # type: ignore[assignment]
    judge.FRESH_BEAT_SECONDS, judge.RERUN_SECONDS = 4.0, 1.5
    queue.LAG_SECONDS, queue.OUTAGE_SECONDS, queue.LONGEST_BACKOFF_SECONDS = 2.0, 3.0, 1.0
    launcher._BEAT_SECONDS, launcher._POLL_SECONDS = 0.3, 0.05
    for kind, roles in launcher.ROLES.items():  # as in tests/crash/fake_python.py
        if kind == "analyse":
            continue
        launcher.ROLES[kind] = tuple(Role(r.name, f"fake_roles:{'rollout' if r.name == 'rollout' else kind}", r.primary) for r in roles)


def _json_is_yaml(tree: Any) -> bytes:
    if isinstance(tree, CommentedMap):
        return _dump_tree(tree)
    return json.dumps(yaml_io.plain(tree), indent=1).encode() + b"\n"


def _find_nothing(request: Any, seconds: float, while_waiting: Any) -> Outcome:
    """Analyzers that run in no time."""
    for _, each in request.analyzers:
        out = AnalysisPaths(Path(request.out) / each.name)
        out.root.mkdir()
        report = AnalyzerReport(
            analyzer=each.name, layer=each.layer, version=request.version, up_to_step=request.up_to_step, measures={}, findings=[], rows=0,
        )
        out.findings.write_bytes(dump_json(report.model_dump(mode="json")))
    return Outcome(state="done")
