"""A batch script as sbatch reads it: #SBATCH lines, and the pattern of its log's name."""

from __future__ import annotations

import _signal as signal  # without its enums

TYPE_CHECKING = False  # as in typing, whose import takes longer than the rest
if TYPE_CHECKING:
    from typing import Any

FLAGS = ("requeue", "no-requeue", "hold", "exclusive", "parsable", "contiguous", "overcommit")
VALUED = (
    "job-name", "output", "error", "open-mode", "signal", "time", "partition", "account", "qos", "constraint", "reservation", "exclude", "nodes",
    "ntasks", "ntasks-per-node", "gpus-per-node", "gpus", "gres", "cpus-per-task", "mem", "mem-per-cpu", "array", "kill-on-invalid-dep", "dependency",
    "nodelist", "export", "chdir", "comment", "mail-type", "mail-user", "nice", "begin", "licenses", "exclusive",
)
SHORT = {"J": "job-name", "o": "output", "e": "error", "p": "partition", "A": "account", "q": "qos", "C": "constraint", "N": "nodes", "n": "ntasks",
         "c": "cpus-per-task", "t": "time", "a": "array", "d": "dependency", "w": "nodelist", "x": "exclude", "D": "chdir", "H": "hold"}


class Refused(Exception):
    """What sbatch says on stderr, and its exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def words(line: str) -> list[str]:
    """Split as sbatch splits: both quotes, backslash everywhere, # begins a comment unless quoted or escaped."""
    found: list[str] = []
    word, begun, quote, escaped = "", False, "", False
    for char in line:
        if escaped:
            word, escaped, begun = word + char, False, True
        elif char == "\\":
            escaped = True
        elif quote:
            quote, word = ("", word) if char == quote else (quote, word + char)
        elif char.isspace():
            if begun:
                found.append(word)
            word, begun = "", False
        elif char in "\"'":
            quote, begun = char, True
        elif char == "#":
            break
        else:
            word, begun = word + char, True
    if quote:
        raise Refused("sbatch: fatal: Missing quote in batch script")
    return [*found, word] if begun else found


def options(text: str) -> dict[str, Any]:
    """The options of a script, long names without dashes; flags are True."""
    found: dict[str, Any] = {}
    for line in text.split("\n")[1:]:
        if line.startswith("#SBATCH"):
            _take(words(line[len("#SBATCH"):]), found)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def _take(given: list[str], found: dict[str, Any]) -> None:
    left = list(given)
    while left:
        word = left.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name in FLAGS and not equals:
                found[name] = True
                continue
            if name not in VALUED or (name in FLAGS and name != "exclusive"):
                raise Refused(f"sbatch: unrecognized option '{word}'\nTry \"sbatch --help\" for more information", 255)
            found[name] = value if equals else (left.pop(0) if left else "")
        elif word.startswith("-") and word[1:2] in SHORT:
            name = SHORT[word[1]]
            found[name] = True if name == "hold" else word[2:] or (left.pop(0) if left else "")
        else:
            raise Refused(f"sbatch: error: Unable to parse {word}", 64)


def indexes(text: str) -> list[int]:
    """Of --array: `0-2,7`, `0-9:3`, with or without a %limit."""
    found: list[int] = []
    try:
        for part in text.partition("%")[0].split(","):
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            found += range(int(first), int(last or first) + 1, int(step or 1))
    except ValueError:
        raise Refused("sbatch: error: Batch job submission failed: Invalid job array specification") from None
    return sorted(set(found))


def minutes(text: str | None) -> float | None:
    """Of --time: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""
    if not text:
        return None
    days, dash, rest = text.rpartition("-")
    parts = [float(p) for p in rest.split(":")]
    if dash:
        parts = (parts + [0, 0])[:3]
        return float(days) * 1440 + parts[0] * 60 + parts[1] + parts[2] / 60
    return {1: lambda: parts[0], 2: lambda: parts[0] + parts[1] / 60, 3: lambda: parts[0] * 60 + parts[1] + parts[2] / 60}[len(parts)]()


def warning(text: str | None) -> tuple[bool, int, float] | None:
    """Of --signal: to the batch shell alone?, number, seconds before the end."""
    if not text:
        return None
    target, colon, rest = text.rpartition(":")
    name, _, seconds = rest.partition("@")
    try:
        number = int(name) if name.isdigit() else int(getattr(signal, f"SIG{name.removeprefix('SIG')}"))
        return bool(colon) and "B" in target, number, float(seconds or 60)
    except (AttributeError, ValueError):
        raise Refused("sbatch: error: Invalid --signal specification", 255) from None


def file_name(pattern: str, job: dict[str, Any]) -> str:
    """A log's name for one task; a backslash anywhere means that the rest is literal."""
    if "\\" in pattern:
        return pattern.replace("\\", "")
    array = job["index"] is not None
    values = {"A": job["base"], "a": job["index"] if array else 4294967294, "j": job["raw"], "J": job["raw"], "x": job["name"], "u": job["user"], "N": "n1",
              "n": 0, "t": 0, "s": "batch"}
    made, rest = "", pattern
    while rest:
        head, percent, rest = rest.partition("%")
        made += head
        if not percent:
            break
        width = ""
        while rest[:1].isdigit():
            width, rest = width + rest[0], rest[1:]
        if rest[:1] == "%":
            made += "%"
        elif rest[:1] in values:
            value = values[rest[0]]
            made += f"{value:0{min(int(width), 10)}}" if width and isinstance(value, int) else str(value)
        else:
            made += f"%{width}{rest[:1]}"
        rest = rest[1:]
    return made
