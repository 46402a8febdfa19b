"""What `evo-hpc --help` costs and loads."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

NEEDLESS = ("torch", "vllm", "megatron", "transformers", "scipy", "pyarrow", "duckdb")
CONSOLE_SCRIPT = Path(sys.executable).parent / "evo-hpc"


def test_help_answers_within_half_a_second() -> None:
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([CONSOLE_SCRIPT, "--help"], capture_output=True, text=True)
        spent.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout
    assert min(spent) < 0.5, f"{min(spent):.2f} s"


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from evo_hpc.cli import main\n"
        "sys.argv = ['evo-hpc', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        f"loaded = [name for name in {NEEDLESS} if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
