"""The Debian packages that a cluster needs: found missing, and installed when this is root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from glob import glob

from evo_hpc.errors import Failure, UserError

LOCK_SECONDS = 180
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # a plain user's PATH often lacks the daemons
PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sinfo": "slurm-client"}
ACCOUNTING_PROGRAMS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
MYSQL_PLUGIN = "/usr/lib/*/slurm-wlm/accounting_storage_mysql.so"


def missing_packages(*, accounting: bool) -> list[str]:
    """Names of the packages to install, sorted."""
    programs = PROGRAMS | (ACCOUNTING_PROGRAMS if accounting else {})
    missing = {package for program, package in programs.items() if shutil.which(program, path=PATH) is None}
    if accounting and not glob(MYSQL_PLUGIN):
        missing.add("slurm-wlm-mysql-plugin")
    return sorted(missing)


def ensure_packages(*, accounting: bool) -> list[str]:
    """Install what is missing and return its names. Raises UserError when not root, Failure when apt-get fails."""
    missing = missing_packages(accounting=accounting)
    if not missing:
        return []
    command = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if os.getuid() != 0 or shutil.which("apt-get", path=PATH) is None:
        raise UserError(f"the test cluster needs these Debian packages, and only root can install them: {' '.join(missing)}. As root: {command}")
    folder = os.open("/var/lib/dpkg", os.O_RDONLY)  # apt's own lock does not wait while another one updates its lists
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        missing = missing_packages(accounting=accounting)
        if missing:
            options = ["-qq", "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}"]
            _apt_get([*options, "update"])  # where it fails, the lists that are there may do
            done = _apt_get([*options, "install", "-y", "--no-install-recommends", *missing])
            if done.returncode or missing_packages(accounting=accounting):
                tail = "\n".join(done.stdout.splitlines()[-12:])
                raise Failure(f"apt-get could not install {' '.join(missing)}:\n{tail}\nMend that and run: {command}")
    finally:
        os.close(folder)
    return missing


def _apt_get(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": PATH}
    return subprocess.run(["apt-get", *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
