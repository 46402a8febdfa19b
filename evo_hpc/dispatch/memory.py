"""Whether the kernel has killed something of this job for memory: its control group counts that, and nothing else says so."""

from __future__ import annotations

from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def killed_for_memory(own: Path = _OWN, groups: Path = _GROUPS) -> int:
    """How many processes of this control group, and below it, were killed for memory; 0 where the kernel does not tell."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return 0
    total = 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy; a group counts for those below it, too
            total += _count(groups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            folder = groups / "memory" / path.lstrip("/")
            total += sum(_count(each / "memory.oom_control") for each in (folder, *_parents(folder, groups / "memory")))
    return total


def _parents(folder: Path, top: Path) -> list[Path]:
    """In version 1 the limit that was hit, and its count, may be the job's, above the step's."""
    return [parent for parent in folder.parents if parent != top and parent.is_relative_to(top) and parent.name.startswith(("job_", "uid_"))]


def _count(path: Path) -> int:
    try:
        fields = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) >= 2)
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
