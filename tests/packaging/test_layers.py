"""The order of the package's parts, and what its controller side may load."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

# A part imports only from parts above it. jobs is the contract of a job: its spec, claim and context.
ORDER = (
    "errors", "seeds", "paths", "assets", "config", "store", "stats", "jobs", "lineage", "domains", "rollout",
    "training", "evaluation", "harness", "memory", "agent", "dispatch", "controller", "report", "cli", "__main__",
)
CONTROLLER_SIDE = tuple(part for part in ORDER if part not in ("rollout", "training", "evaluation"))
HEAVY = ("torch", "vllm", "megatron", "transformers")


def source_files(repository: Path) -> list[Path]:
    return sorted(path for path in (repository / "evo_hpc").rglob("*.py") if "_assets" not in path.parts)


def part_of(path: Path, repository: Path) -> str:
    return path.relative_to(repository / "evo_hpc").parts[0].removesuffix(".py")


def imported_modules(path: Path, repository: Path) -> list[tuple[str, int]]:
    """Every absolute module name that a file imports, anywhere in it, with its line."""
    package = path.relative_to(repository).with_suffix("").parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            found += [(module, node.lineno)]
            if module == "evo_hpc":
                found += [(f"evo_hpc.{alias.name}", node.lineno) for alias in node.names]
    return found


def test_each_part_imports_only_from_parts_above_it(repository: Path) -> None:
    wrong = []
    for path in source_files(repository):
        part = part_of(path, repository)
        if part == "__init__":
            continue
        if part not in ORDER:
            wrong.append(f"{path}: part {part!r} has no place in the order; give it one here and in the design")
            continue
        for module, line in imported_modules(path, repository):
            target = module.split(".")[1] if module.startswith("evo_hpc.") else part
            if target in ORDER and ORDER.index(target) > ORDER.index(part):
                wrong.append(f"{path}:{line}: {part} imports {module}, which lies below it")
    assert not wrong, "\n".join(wrong)


def test_the_controller_side_never_loads_torch(repository: Path) -> None:
    modules = []
    for path in source_files(repository):
        if part_of(path, repository) in CONTROLLER_SIDE:
            parts = path.relative_to(repository).with_suffix("").parts
            modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [each for each in {HEAVY} if each in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *modules], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def declared(repository: Path, *extras: str) -> set[str]:
    """Normalised names of the distributions that setup.cfg asks for."""
    config = ConfigParser()
    config.read(repository / "setup.cfg")
    lines = config["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += config["options.extras_require"][extra].splitlines()
    names = (re.match(r"[\w.-]+", line.strip()) for line in lines)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def test_every_import_is_declared(repository: Path) -> None:
    homes = importlib.metadata.packages_distributions()
    base, cpu = declared(repository), declared(repository, "cpu")
    wrong = []
    for path in source_files(repository):
        # A domain that makes its own first policy imports torch inside that function: that is a job.
        light = part_of(path, repository) in CONTROLLER_SIDE and part_of(path, repository) != "domains"
        allowed = base if light else cpu
        for module, line in imported_modules(path, repository):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top == "evo_hpc":
                continue
            names = {re.sub(r"[-_.]+", "-", each).lower() for each in homes.get(top, [top])}
            if not names & allowed:
                wrong.append(f"{path}:{line}: {top} comes from {sorted(names)}, which setup.cfg does not ask for")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("extra", ["cpu", "test"])
def test_the_lock_holds_everything_declared(repository: Path, extra: str) -> None:
    lines = (repository / "requirements/cpu-py311.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    locked = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    assert declared(repository, extra) <= set(locked), "declared but not locked"
    config = ConfigParser()
    config.read(repository / "setup.cfg")
    for line in config["options.extras_require"][extra].splitlines():
        name, exact, version = line.partition("==")
        if exact:
            assert locked[name.strip()] == version, f"{name} is pinned differently in setup.cfg and in the lock"
