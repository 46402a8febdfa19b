"""The wheel: what travels in it, and that it runs from an environment elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from evo_hpc.assets import ASSETS

pytestmark = pytest.mark.slow

GENERATED = ("versions/v0001/version.yaml", "controller/lease.json", "events.jsonl", "hooks/__pycache__/reward.pyc")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(repository: Path) -> list[str]:
    """Files of the checkout that belong to it: committed, or new and not ignored."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=repository)
    return sorted({name for name in listed.split("\0") if name and (repository / name).exists()})


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout in which a campaign has run."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked(repository):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, source / name, follow_symlinks=False)
    for campaign in [path for path in (source / "campaigns").iterdir() if path.is_dir()]:
        for name in GENERATED:
            (campaign / name).parent.mkdir(parents=True, exist_ok=True)
            (campaign / name).write_text("generated")
    out = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", out, source,
        cwd=source,
    )
    return next(out.glob("*.whl"))


def test_exactly_the_package_and_its_assets_travel(built: Path, repository: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for name in tracked(repository):
        top = name.split("/")[0]
        if top in ASSETS:
            expected.add(f"evo_hpc/_assets/{name}")
        elif top == "evo_hpc" and not (repository / name).is_symlink():
            expected.add(name)
    assert inside == expected


def test_the_wheel_runs_from_an_environment_elsewhere(built: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=tmp_path)
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built, cwd=tmp_path,
    )
    # The dependencies come from the environment of the tests, after the new one's own packages; its editable install
    # of this project must not be what answers, so its hooks (.pth files) are not run.
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(dependencies + "\n")
    program = (
        "import evo_hpc\n"
        "from evo_hpc.assets import ASSETS, asset_dir\n"
        "print(evo_hpc.__file__)\n"
        "print(*[asset_dir(name) for name in ASSETS], sep='\\n')\n"
    )
    printed = run(python, "-c", program, cwd=tmp_path).split("\n")
    assert all(Path(line).is_relative_to(site) for line in printed if line), printed
    assert "Usage" in run(environment / "bin" / "evo-hpc", "--help", cwd=tmp_path)
