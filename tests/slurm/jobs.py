"""Stand-ins for `python` that tell a test what reached them, and the waiting for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.dispatch.slurm.states import life
from tests.cluster.processes import wait_until

_TELLS = f"""#!{sys.executable}
import json, os, signal, sys, time
words, heard = sys.argv[1:], []
folder = words[words.index("--job") + 1] if "--job" in words else words[words.index("run") + 1]
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
def tell(what, value):
    path = os.path.join(folder, what + "-" + restart + ".json")
    with open(path + ".new", "w") as file:
        json.dump(value, file)
    os.rename(path + ".new", path)
for each in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(each, lambda number, frame: (heard.append(number), tell("heard", heard)))
tell("started", {{"words": words, "name": os.environ["SLURM_JOB_NAME"], "environment": dict(os.environ)}})
"""


def telling_python(folder: Path, then: str = "") -> str:
    """A program that writes started-R.json and heard-R.json, R the restart count, into the folder that it works for; then does `then`."""
    path = folder / "python that tells"
    path.write_text(f"{_TELLS}\n{then}\n")
    path.chmod(0o755)
    return str(path)


def told(path: Path, seconds: float = 60) -> Any:
    """What is in a file that a job writes, once it is there."""
    assert wait_until(path.exists, seconds, pause=0.1), f"{path} does not come within {seconds} s"
    return json.loads(path.read_text())


def of_name(commands: Commands, name: str) -> list[SlurmJob]:
    """The live jobs of a name, oldest first."""
    return sorted((job for job in commands.queue() if job.name == name and life(job.state) != "terminal"), key=lambda job: int(job.job_id))
