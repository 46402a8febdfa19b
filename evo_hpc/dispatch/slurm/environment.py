"""The variables that Slurm's commands and the jobs they submit get: a list of those allowed, never all of the controller's."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping

from evo_hpc.config.slurm import Slurm
from evo_hpc.errors import UserError

ALLOWED = (
    "HOME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "SLURM_CONF",
    # Where caches and settings lie, which many move off a small home. Not XDG_RUNTIME_DIR and XDG_SESSION_*: those are of this host's login.
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
)
"""Besides PATH, USER, LOGNAME and LC_*. Not PYTHONPATH, VIRTUAL_ENV or LD_LIBRARY_PATH: the interpreter of a job is named by its
path and finds its own packages; what the controller's shell added to it (a module, another environment) would come before them
unseen. A site that needs one names it in `slurm.pass_environment`, or sets it by `setup` lines."""
_PATH = "/usr/local/bin:/usr/bin:/bin"
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "JWT")
_NO_SECRET = ("TOKENIZERS_PARALLELISM",)
_OF_SLURM = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "PMI_", "PMIX_")


def login() -> str:
    """This user's login name by the user database: $USER may be anybody's. Raises UserError where the uid has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise UserError(
            f"uid {os.getuid()} has no login name on this host, and Slurm's jobs belong to one; run on a host that knows the user"
        ) from error


def environment_for_jobs(slurm: Slurm, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What sbatch is run with, and so what jobs start with; `environ` is this process's where none is given.

    Variables of an enclosing job (SLURM_*, SBATCH_*) would be taken for options, or contradict those of the script. Raises UserError
    when `pass_environment` names such a one, or one that by its name is a secret: Slurm keeps a job's environment on disk.
    """
    environ = os.environ if environ is None else environ
    name = login()
    found = {"PATH": _PATH, "HOME": pwd.getpwuid(os.getuid()).pw_dir, "USER": name, "LOGNAME": name}
    found |= {key: value for key, value in environ.items() if key in ALLOWED or key == "PATH" or key.startswith("LC_")}
    enclosing = environ.get("SLURM_JOB_ID")
    if enclosing and enclosing in found.get("TMPDIR", ""):
        del found["TMPDIR"]  # a folder of the enclosing job, which goes away with it and is on its node alone
    for key in slurm.pass_environment:
        _check_name(key)
        if key in environ:
            found[key] = environ[key]
    return {key: value for key, value in found.items() if value}


def _check_name(key: str) -> None:
    if key == "SLURM_CONF" or key in _NO_SECRET:
        return
    if key.startswith(_OF_SLURM):
        raise UserError(
            f"cluster.yaml: slurm.pass_environment names {key}, which Slurm's own commands read; set what it stands for in `slurm` instead"
        )
    if any(word in key.upper() for word in _SECRET):
        raise UserError(
            f"cluster.yaml: slurm.pass_environment names {key}, by its name a secret, and Slurm keeps a job's environment on disk; "
            "put it into a file that you alone can read, and take it out of this list"
        )
