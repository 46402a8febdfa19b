"""Makes or repairs .venv from requirements/cpu-py311.lock; called by `make setup`, standard library only.

Safe to kill at any point: what a killed pip left half-installed is found by its RECORD and installed again.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LOCK = "requirements/cpu-py311.lock"
INPUTS = (LOCK, "setup.cfg", "pyproject.toml")
STAMP = "evo-setup.json"
MIN_FREE_GB = 5.0
NOISE = re.compile(r"^(Looking in (links|indexes): |WARNING: (Url|Location) .* is ignored)")
SHOWN = re.compile(r"^\s*(ERROR|WARNING|Building|Installing collected packages)")
BIG_DOWNLOAD = re.compile(r"^\s*Downloading (\S+) \((\d{2,}(\.\d+)? MB|\S+ GB)\)")

Pip = Callable[[Sequence[str]], None]


class SetupError(Exception):
    """Setup cannot go on; the message says what is wrong and what to do."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def inputs_key(root: Path) -> str:
    """Hash of everything that the environment is made from; the folder counts, since its scripts name it."""
    digest = hashlib.sha256(os.fsencode(root))
    for name in INPUTS:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()


def is_current(root: Path, venv: Path) -> bool:
    """Whether a finished setup of these very inputs is there."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return False
    there = (venv / "bin" / "python").exists() and (venv / "bin" / "evo-hpc").exists()
    return there and stamp.get("inputs") == inputs_key(root)


def problems(*, can_make_venv: bool, free_gb: float, min_free_gb: float, folder: Path) -> list[str]:
    """What stands in the way of an install, each with what to do; empty when nothing does."""
    found = []
    if not can_make_venv:
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        found.append(
            f"{sys.executable} cannot make virtual environments (venv or ensurepip is missing). "
            f"On Debian or Ubuntu: apt-get install python{minor}-venv"
        )
    if free_gb < min_free_gb:
        found.append(
            f"{folder} has {free_gb:.1f} GB free and the install needs {min_free_gb:g} GB. "
            "Free some space, or clone to a larger disk"
        )
    return found


def unusable(venv: Path) -> str | None:
    """Why an existing environment must be made anew, or None."""
    config = venv / "pyvenv.cfg"
    if not config.is_file():
        return "it has no pyvenv.cfg"
    settings = dict(re.findall(r"^(\w[\w-]*)\s*=\s*(.*)$", config.read_text(), flags=re.M))
    command = settings.get("command")
    made_for = re.sub(r"^.* -m venv (--\S+ )*", "", command) if command else str(venv)
    if Path(made_for).resolve() != venv.resolve():
        return f"it was made for another folder ({made_for})"
    try:
        probe = subprocess.run(
            [venv / "bin" / "python", "-c", "import sys, pip; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return f"its Python does not start ({error.strerror})"
    if probe.returncode != 0:
        return "its Python or pip does not start"
    wanted = "%d.%d" % sys.version_info[:2]
    if probe.stdout.strip() != wanted:
        return f"it has Python {probe.stdout.strip()}, and {wanted} was asked for"
    return None


def broken_installs(site_packages: Path) -> list[Path]:
    """The .dist-info folders whose package is not whole (a killed pip), and pip's own leftovers.

    pip writes INSTALLER and RECORD last; RECORD gives every file's size.
    """
    broken = list(site_packages.glob("~*"))
    for info in sorted(site_packages.glob("*.dist-info")):
        record = info / "RECORD"
        if not (record.is_file() and (info / "INSTALLER").is_file() and (info / "METADATA").is_file()):
            broken.append(info)
            continue
        with record.open(newline="") as rows:
            if not all(_whole(site_packages / row[0], row[2]) for row in csv.reader(rows) if len(row) == 3):
                broken.append(info)
    return broken


def _whole(file: Path, size: str) -> bool:
    if file.suffix == ".pyc":
        return True
    try:
        return not size or file.stat().st_size == int(size)
    except FileNotFoundError:
        return False


@contextmanager
def only_one(root: Path) -> Iterator[int]:
    """Holds the setup lock of this checkout; a second setup waits. The descriptor goes to pip too, so that the lock
    lasts as long as a pip whose setup was killed."""
    with (root / ".setup.lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            say(f"another setup is running here (process {handle.read().strip() or 'unknown'}); waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield handle.fileno()


def pip_runner(venv: Path, log: Path, total: int, lock_fd: int) -> Pip:
    """A function that runs the environment's pip, shows its progress in few lines and keeps all of it in `log`."""

    def run(arguments: Sequence[str]) -> None:
        command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--progress-bar=off", *arguments]
        collected, tail = 0, []
        with log.open("a") as record:
            record.write("$ " + " ".join(command) + "\n")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", pass_fds=[lock_fd],
            )
            assert process.stdout is not None
            for line in process.stdout:
                record.write(line)
                record.flush()
                if NOISE.match(line):
                    continue
                tail = [*tail[-29:], line if len(line) < 300 else line[:300] + " …\n"]
                collected += line.startswith(("Collecting ", "Requirement already satisfied: "))
                if big := BIG_DOWNLOAD.match(line):
                    say(f"downloading {big[1]} ({big[2]})")
                elif SHOWN.match(line):
                    say(line.strip() if len(line) < 200 else f"{line.strip()[:160]} …")
                elif line.startswith("Collecting ") and collected % 25 == 0:
                    say(f"{collected} of {total} packages fetched")
        if process.wait() != 0:
            raise SetupError(
                "pip failed; its last lines:\n\n" + "".join(tail) + f"\nAll of its output: {log}\n"
                "When the cause is mended, run `make setup` again: it goes on from here."
            )

    return run


def install(root: Path, venv: Path, pip: Pip, torch_arguments: Sequence[str]) -> None:
    """Brings an existing environment to the lock and installs the project itself, editable."""
    site_packages = venv / "lib" / ("python%d.%d" % sys.version_info[:2]) / "site-packages"
    for leftover in broken_installs(site_packages):
        say(f"repairing {leftover.name}")
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    requirements = (root / LOCK).read_text().splitlines()
    torch = [line for line in requirements if line.startswith("torch==")]
    if torch:
        say(f"installing {torch[0]}")
        pip(["--no-deps", *torch, *torch_arguments])
        _refuse_cuda_build(site_packages)
    say("installing what is in " + LOCK)
    pip(["--no-deps", "-r", str(root / LOCK)])
    say("installing evo-hpc itself (editable)")
    pip(["--no-deps", "--no-build-isolation", "--quiet", "-e", str(root)])


def _refuse_cuda_build(site_packages: Path) -> None:
    facts = runpy.run_path(str(site_packages / "torch" / "version.py"))
    if facts.get("cuda") is None:
        return
    for info in site_packages.glob("torch-*.dist-info"):
        shutil.rmtree(info)
    raise SetupError(
        f"pip took the CUDA build of torch {facts['__version__']}; this environment needs the CPU build. "
        "Run again with pip's arguments for PyTorch's CPU wheel index:\n"
        '  make setup TORCH_INDEX="--index-url <address of the CPU wheel index, see pytorch.org>"'
    )


def setup(root: Path, *, min_free_gb: float, torch_arguments: Sequence[str]) -> None:
    """Everything `make setup` does. Raises SetupError; touches nothing before its checks pass."""
    venv = root / ".venv"
    if is_current(root, venv):
        say("up to date")
        return
    reason = unusable(venv) if venv.exists() else None
    fresh = reason is not None or not venv.exists()
    found = problems(
        can_make_venv=all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        free_gb=shutil.disk_usage(root).free / 1e9,
        min_free_gb=min_free_gb if fresh or not (venv / STAMP).exists() else min(min_free_gb, 0.5),
        folder=root,
    )
    if found:
        raise SetupError("\n  ".join(["nothing was changed, because", *(f"- {each}" for each in found)]))
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        say("note: no C++ compiler (g++) was found; only torch.compile would need one, and it is off on CPU")
    with only_one(root) as lock_fd:
        if is_current(root, venv):
            say("up to date")
            return
        (venv / STAMP).unlink(missing_ok=True)
        if fresh and unusable(venv) is not None:
            say("making .venv" + (f" anew: {reason}" if reason else "") + f" with {sys.executable}")
            made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], stdin=subprocess.DEVNULL)
            if made.returncode != 0:
                raise SetupError("the virtual environment could not be made: see the lines above")
        total = sum("==" in line for line in (root / LOCK).read_text().splitlines())
        install(root, venv, pip_runner(venv, venv / "setup.log", total, lock_fd), torch_arguments)
        temporary = venv / f".{STAMP}.{os.getpid()}"
        temporary.write_text(json.dumps({"inputs": inputs_key(root)}))
        temporary.replace(venv / STAMP)
    say("done")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--current", action="store_true", help="only say by exit code whether nothing is to be done")
    parser.add_argument("--min-free-gb", type=float, default=MIN_FREE_GB)
    parser.add_argument("--torch-index", default="", help="pip arguments for the torch wheel")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if arguments.current:
        return 0 if is_current(root, root / ".venv") else 1
    try:
        setup(root, min_free_gb=arguments.min_free_gb, torch_arguments=arguments.torch_index.split())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
