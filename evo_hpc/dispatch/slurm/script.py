"""The batch scripts of jobs and of the controller, as text: what Slurm is asked for, and what it then runs."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evo_hpc.assets import asset_dir
from evo_hpc.config.slurm import Resources
from evo_hpc.dispatch.slurm.steps import by_srun
from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths, JobPaths

DEFAULT_WARNING = ("USR2", 120)
"""Signal and seconds before the end, where the profile says nothing."""
SETUP_FAILED = 75
"""Exit code (EX_TEMPFAIL) of a script whose set-up failed: no code that a job of ours ends with, so it counts as the machine's failure."""
_PATIENCE_SECONDS = 60
"""How long a signal is kept for a command that has no handler yet: loading from a busy shared filesystem is slow."""
_OWN_OPTIONS = {
    "array": "", "dependency": "", "error": "", "job-name": "", "kill-on-invalid-dep": "", "open-mode": "", "output": "",
    "parsable": "", "quiet": "", "test-only": "", "wait": "", "wrap": "", "a": "", "d": "", "e": "", "J": "", "o": "", "Q": "", "W": "",
    "no-requeue": "requeue", "requeue": "requeue", "signal": "warning_signal and warning_seconds", "time": "minutes", "t": "minutes",
}
"""Options of sbatch that are set here, and the field of the profile that they come from."""
_PLAIN = re.compile(r"^[A-Za-z0-9_./,:@=+%-]+$")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


class BadScript(UserError):
    """What would have to stand in a batch script cannot stand there."""


@dataclass(frozen=True)
class Task:
    """One attempt that a batch script starts."""

    index: int | None
    """Its index in the job array; null where the script is no array."""
    job: Path
    """Folder of the attempt."""
    job_name: str
    """Name in its intent."""
    start: int
    """Number of the start."""

    @property
    def log(self) -> Path:
        """What it prints, where it is one of an array."""
        return JobPaths(self.job).slurm_log


def job_script(resources: Resources, *, name: str, log: Path, python: list[str], tasks: list[Task], generation: int) -> str:
    """The script of one start, or of a job array of them, under Slurm's name `name`.

    It starts the launcher (in the profile's container, where roles are not steps of their own), passes the warning signal and
    SIGTERM on to it and ends with its exit code. `log` takes what Slurm has to say, and for a job without an array all that is
    printed; the tasks of an array print into the slurm.log of their own folder. Raises BadScript.
    """
    indexes = [task.index for task in tasks if task.index is not None]
    if not tasks or len(indexes) not in (0, len(tasks)) or len(set(indexes)) != len(indexes) or (len(tasks) > 1 and not indexes):
        raise ValueError(f"{name}: one task without an index, or any number with one each, not {[task.index for task in tasks]}")
    tasks = [Task(task.index, _path(task.job), task.job_name, task.start) for task in tasks]
    container = [] if by_srun(resources) else resources.container or []
    array = [("--array", _ranges(indexes))] if indexes else []
    return _render(
        "job.sh.j2", resources, name, log, extra=array, array=bool(indexes), tasks=tasks, generation=generation,
        script=JobPaths(tasks[0].job).script(tasks[0].start),
        command=[*container, *python, "-m", "evo_hpc.dispatch.launcher", "--executor", "slurm", "--generation", str(generation)],
    )


def controller_script(resources: Resources, *, name: str, log: Path, python: list[str], campaign: Path, arguments: Sequence[str] = ()) -> str:
    """The script of a campaign's controller: `evo-hpc run CAMPAIGN ARGUMENTS`, one at a time under this name. Raises BadScript."""
    paths = CampaignPaths(_path(campaign))
    return _render(
        "controller.sh.j2", resources, name, log, extra=[("--dependency", "singleton")], script=paths.controller_script,
        command=[*(resources.container or []), *python, "-m", "evo_hpc.cli", "run", str(paths.root), *arguments],
    )


def _render(
    template: str, resources: Resources, name: str, log: Path, *, extra: list[tuple[str, str]], command: list[str], **values: Any
) -> str:
    warning, seconds = warning_of(resources)
    signals = ["TERM", *([warning] if warning != "TERM" else [])]
    options = [
        ("--job-name", _text(name)), ("--output", _pattern(_path(log))), ("--open-mode", "append"), *_asked(resources),
        ("--signal", f"B:{warning}@{seconds}"), ("--requeue" if resources.requeue is not False else "--no-requeue", None),
        ("--kill-on-invalid-dep", "yes"), *extra,
    ]
    return _templates().get_template(template).render(
        name=name, options=options, more=_more(resources), signals=signals, patience_seconds=_PATIENCE_SECONDS, command=[_text(w) for w in command],
        environment=_environment(resources), setup=[_text(line, "\t") for line in resources.setup or []], setup_failed=SETUP_FAILED, **values,
    )


def warning_of(resources: Resources) -> tuple[str, int]:
    """Name of the warning signal, and how many seconds before the end it comes."""
    name, seconds = DEFAULT_WARNING
    return resources.warning_signal or name, seconds if resources.warning_seconds is None else resources.warning_seconds


def _asked(resources: Resources) -> list[tuple[str, str]]:
    """The fields of the profile that are options of sbatch under another name or the same; those left out are Slurm's to decide."""
    asked = {
        "--partition": resources.partition, "--account": resources.account, "--qos": resources.qos, "--constraint": resources.constraint,
        "--reservation": resources.reservation, "--exclude": resources.exclude, "--nodes": resources.nodes,
        "--ntasks-per-node": resources.tasks_per_node, "--cpus-per-task": resources.cpus_per_task, "--gpus-per-node": resources.gpus_per_node,
        "--gres": resources.gres, "--mem": resources.memory, "--time": resources.minutes,
    }
    return [(option, _text(str(value))) for option, value in asked.items() if value is not None]


def _more(resources: Resources) -> list[str]:
    """The profile's own options, when none of them is one that a job is found or heard by."""
    for word in resources.sbatch_arguments or []:
        option = word.removeprefix("--").split("=")[0] if word.startswith("--") else word[1:2] if word.startswith("-") else None
        if option is None:
            raise BadScript(f"cluster.yaml: sbatch_arguments: {word!r} is no option; write it as one word: --name=value")
        own = option if option in _OWN_OPTIONS else next((own for own in _OWN_OPTIONS if word.startswith("--") and own.startswith(option)), None)
        if own is not None:  # sbatch takes any beginning of an option for it
            how = f"use `{_OWN_OPTIONS[own]}`" if _OWN_OPTIONS[own] else "remove it: jobs are found and followed by what is set here"
            raise BadScript(f"cluster.yaml: sbatch_arguments: {word!r} is not for a profile to set; {how}")
    return list(resources.sbatch_arguments or [])


def _environment(resources: Resources) -> list[tuple[str, str]]:
    found = {"PYTHONUNBUFFERED": "1", **(resources.environment or {})}
    for name, value in found.items():
        if not _VARIABLE.match(name):
            raise BadScript(f"cluster.yaml: environment: {name!r} is no name of a variable; use letters, digits and _")
        _text(value, "\t\n")
    return sorted(found.items())


def _ranges(indexes: list[int]) -> str:
    """[0, 1, 2, 5] -> 0-2,5"""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _path(path: Path) -> Path:
    """It, absolute: a job may start in another folder. Raises BadScript for one that no line of a script can hold."""
    try:
        return Path(_text(str(path.absolute())))
    except BadScript:
        raise BadScript(f"{str(path)!r}: Slurm cannot be told of a folder with line breaks, control characters or bytes that are not "
                        "UTF-8 in its name; rename it") from None


def _text(text: str, allowed: str = "") -> str:
    """It, when it can stand in a script: no control characters, and characters that there are in UTF-8."""
    if any(unicodedata.category(c) in ("Cc", "Cs") and c not in allowed for c in text):
        raise BadScript(f"{text!r}: a line break, control character or undecodable byte cannot be written into a batch script; remove it")
    return text


def _pattern(path: Path) -> str:
    """A file name as --output takes it. With a backslash anywhere in it Slurm replaces no %x, and takes one level of backslashes
    away; else %% stands for a percent sign (man sbatch: FILENAME PATTERN)."""
    text = str(path)
    return text.replace("\\", "\\\\") if "\\" in text else text.replace("%", "%%")


def _option(value: object) -> str:
    """A value in an #SBATCH line: double quotes hold together what has blanks or a #, and a backslash frees the next character."""
    text = str(value)
    if _PLAIN.match(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _quote(value: object) -> str:
    return shlex.quote(str(value))


@lru_cache(maxsize=1)
def _templates() -> Environment:
    made = Environment(  # shell, not HTML: every value goes through one of the filters
        loader=FileSystemLoader(asset_dir("templates") / "slurm"), autoescape=False, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )
    made.filters.update(quote=_quote, words=shlex.join, option=_option)
    return made
