"""Records what a live cluster says of itself: `python -m tests.dispatch.slurm.record_site`, with SLURM_CONF set."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

from evo_hpc.dispatch.slurm.site import ACCOUNTING_QUESTIONS, QUESTIONS, parse_config

FOLDER = Path(__file__).parent / "recorded_site"


def main() -> None:
    """Write one file a question, the cluster's own folder called /cluster in it."""
    FOLDER.mkdir(exist_ok=True)
    prefix = str(Path(os.environ["SLURM_CONF"]).parent.parent)
    cluster = parse_config(_run(("scontrol", "show", "config")))["ClusterName"]
    for name, argv in {**QUESTIONS, **ACCOUNTING_QUESTIONS}.items():
        words = {"user": pwd.getpwuid(os.getuid()).pw_name, "cluster": cluster}
        text = _run(tuple(each.format_map(words) for each in argv))
        (FOLDER / f"{name}.txt").write_text(text.replace(prefix, "/cluster"))


def _run(argv: tuple[str, ...]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}).stdout


if __name__ == "__main__":
    main()
