"""`make setup`: what it refuses, that it touches nothing then, what it repairs. No test here installs anything real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import setup_venv  # noqa: E402

PROJECT_FILES = ("Makefile", "setup.cfg", "pyproject.toml", "requirements", "tools")


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    """A copy of what setup reads, in a folder without .venv."""
    root = tmp_path / "a checkout"
    root.mkdir()
    for name in PROJECT_FILES:
        source = repository / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, root / name)
    return root


def make(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        [shutil.which("make") or "make", "-C", str(root), *arguments], env=kept | environment, capture_output=True,
        text=True, stdin=subprocess.DEVNULL, timeout=60,
    )


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if "__pycache__" not in path.parts}


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_help_is_the_default_target_and_names_every_target(checkout: Path) -> None:
    done = make(checkout)
    assert done.returncode == 0
    for target in ("setup", "demo", "test", "test-slow", "clean"):
        assert f"make {target} " in done.stdout


def test_a_missing_python_is_said(checkout: Path) -> None:
    before = everything(checkout)
    done = make(checkout, "setup", "PYTHON=/nonexistent")
    assert done.returncode != 0
    assert "no Python at '/nonexistent'" in done.stderr
    assert everything(checkout) == before


def test_an_old_python_is_said_with_its_version(checkout: Path, tmp_path: Path) -> None:
    old = script(tmp_path / "old python", '[ "$1" = --version ] && echo "Python 3.9.2"; [ "$1" != -c ]')
    before = everything(checkout)
    done = make(checkout, "setup", f"PYTHON={old}")
    assert done.returncode != 0
    assert "older than Python 3.11 (Python 3.9.2)" in done.stderr
    assert everything(checkout) == before


def test_no_python_on_the_path_is_said(checkout: Path, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    done = make(checkout, "setup", PATH=str(empty))
    assert done.returncode != 0
    assert "Python 3.11 or newer was not found" in done.stderr


def test_a_full_disk_and_a_python_without_venv_are_said_together(checkout: Path, tmp_path: Path) -> None:
    """Debian's python3 without python3-venv has no ensurepip."""
    blind = (
        "import importlib.util, runpy, sys; real = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *rest: None if name == 'ensurepip' else real(name, *rest); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    python = script(
        tmp_path / "python", f'[ "$1" = -c ] && exec "{sys.executable}" "$@"\nexec "{sys.executable}" -c "{blind}" "$@"'
    )
    before = everything(checkout)
    done = make(checkout, "setup", f"PYTHON={python}", "MIN_FREE_GB=100000000")
    assert done.returncode != 0
    assert "GB free and the install needs 1e+08 GB" in done.stderr
    assert "-venv" in done.stderr and "nothing was changed" in done.stderr
    assert everything(checkout) == before


def finished(root: Path) -> Path:
    """What a finished setup leaves, as far as setup looks at it when it has nothing to do."""
    venv = root / ".venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "evo-hpc"):
        (venv / "bin" / name).symlink_to(sys.executable)
    (venv / setup_venv.STAMP).write_text(f'{{"inputs": "{setup_venv.inputs_key(root)}"}}')
    return venv


def test_a_finished_setup_is_left_alone_until_an_input_changes(checkout: Path) -> None:
    finished(checkout)
    done = make(checkout, "setup")
    assert (done.returncode, done.stderr) == (0, "")
    assert setup_venv.is_current(checkout, checkout / ".venv")
    with (checkout / setup_venv.LOCK).open("a") as lock:
        lock.write("# changed\n")
    assert not setup_venv.is_current(checkout, checkout / ".venv")
    assert make(checkout, "setup", "MIN_FREE_GB=100000000").returncode != 0


def test_an_environment_of_another_folder_is_not_used(checkout: Path) -> None:
    venv = finished(checkout)
    (venv / "pyvenv.cfg").write_text("command = /usr/bin/python3 -m venv --clear /somewhere/else/.venv\n")
    assert "made for another folder (/somewhere/else/.venv)" in (setup_venv.unusable(venv) or "")
    moved = checkout.rename(checkout.with_name("moved"))
    assert not setup_venv.is_current(moved, moved / ".venv")


def wheel(folder: Path, name: str) -> Path:
    """A wheel with one module and one data file."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "value = 1\n",
        f"{name}/data.txt": "x" * 1000,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,{len(text)}\n" for file, text in files.items()) + f"{info}/RECORD,,\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def pip_into(target: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), *arguments], check=True, stdin=subprocess.DEVNULL)


def test_what_a_killed_pip_left_is_found_and_installed_again(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    names = ("whole", "truncated", "missing", "unfinished", "halfway")
    pip_into(site, *(str(wheel(tmp_path, name)) for name in names))
    assert setup_venv.broken_installs(site) == []
    (site / "truncated/data.txt").write_text("x" * 999)
    (site / "missing/__init__.py").unlink()
    (site / "unfinished-1.0.dist-info/INSTALLER").unlink()
    (site / "halfway-1.0.dist-info/RECORD").unlink()
    (site / "~orch").mkdir()
    found = {path.name for path in setup_venv.broken_installs(site)}
    assert found == {"~orch", *(f"{name}-1.0.dist-info" for name in names if name != "whole")}


def test_install_repairs_first_and_refuses_a_cuda_torch(checkout: Path) -> None:
    site = checkout / ".venv/lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    (site / "half-1.0.dist-info").mkdir(parents=True)
    calls: list[Sequence[str]] = []

    def pip(arguments: Sequence[str]) -> None:
        assert not (site / "half-1.0.dist-info").exists()
        calls.append(arguments)
        (site / "torch").mkdir(exist_ok=True)
        (site / "torch-2.13.0.dist-info").mkdir(exist_ok=True)
        cuda = None if "--index-url" in arguments else "13.0"
        if any(each.startswith("torch==") for each in arguments):
            (site / "torch/version.py").write_text(f"__version__ = '2.13.0'\ncuda = {cuda!r}\n")

    with pytest.raises(setup_venv.SetupError, match="TORCH_INDEX"):
        setup_venv.install(checkout, checkout / ".venv", pip, [])
    assert not (site / "torch-2.13.0.dist-info").exists(), "pip would take the CUDA build for satisfied"
    calls.clear()
    setup_venv.install(checkout, checkout / ".venv", pip, ["--index-url", "somewhere"])
    assert [call[-1] for call in calls] == ["somewhere", str(checkout / setup_venv.LOCK), str(checkout)]
    assert all("--no-deps" in call for call in calls)


def test_pip_noise_is_dropped_and_errors_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bin").mkdir()
    script(
        tmp_path / "bin/python",
        "echo 'Looking in links: /nowhere'\n"
        "echo \"WARNING: Location '/nowhere' is ignored: it is not a path and lacks a scheme.\" >&2\n"
        "echo 'WARNING: something else' >&2\n"
        "echo 'ERROR: no matching distribution' >&2\n"
        "exit 1",
    )
    with (tmp_path / "lock").open("w") as lock:
        pip = setup_venv.pip_runner(tmp_path, tmp_path / "setup.log", 1, lock.fileno())
        with pytest.raises(setup_venv.SetupError, match="no matching distribution") as failure:
            pip(["x"])
    shown = capsys.readouterr().out + str(failure.value)
    assert "nowhere" not in shown
    assert "WARNING: something else" in shown
    assert "nowhere" in (tmp_path / "setup.log").read_text()


def test_only_one_setup_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        with setup_venv.only_one(tmp_path):
            order.append("second")

    with setup_venv.only_one(tmp_path):
        other = threading.Thread(target=second)
        other.start()
        waiting.wait()
        other.join(timeout=0.3)
        order.append("first")
    other.join(timeout=10)
    assert order == ["first", "second"]
    assert f"another setup is running here (process {os.getpid()})" in capsys.readouterr().out


def test_the_lock_lasts_as_long_as_a_pip_whose_setup_was_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, setup_venv\n"
        "with setup_venv.only_one(pathlib.Path('.')) as held:\n"
        "    child = subprocess.Popen(['sleep', '60'], pass_fds=[held])\n"
        "    print(child.pid, flush=True)\n"
        "    child.wait()\n"
    )
    tools = str(Path(setup_venv.__file__).parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": tools}, stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    entered = threading.Event()

    def enter() -> None:
        with setup_venv.only_one(tmp_path):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(timeout=0.3)
    os.kill(child, 9)
    assert entered.wait(timeout=10)
    thread.join()
