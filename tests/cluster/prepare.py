"""What must be there before the first daemon starts: settings, configuration files, keys, MariaDB's own tables, host names."""

from __future__ import annotations

import getpass
import os
import secrets
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

from evo_hpc.errors import UserError
from tests.cluster import config
from tests.cluster.daemons import Daemon, every_daemon, failed, pid_of
from tests.cluster.hosts import add_hosts
from tests.cluster.layout import Layout
from tests.cluster.packages import PATH
from tests.cluster.settings import NODES, Settings, choose_base_port, read_settings, write_settings
from tests.cluster.teardown import other_cgroup_clusters


def prepare(layout: Layout, *, base_port: int | None, accounting: bool, cgroup: bool) -> Settings:
    """Write all files of a cluster of which nothing runs; where any daemon runs nothing is written. Returns the settings that hold.

    Raises UserError when the folder is somebody else's, what runs has other settings, or the machine cannot do what was asked.
    """
    old = read_settings(layout)
    if old is None and any(layout.prefix.iterdir()):
        raise UserError(f"{layout.prefix}: has files and is no cluster of this program; give an empty or new folder with --prefix")
    if old is not None and any(pid_of(layout, daemon) for daemon in every_daemon(layout, old)):
        if (old.accounting, old.cgroup) != (accounting, cgroup) or base_port not in (None, old.base_port):
            raise UserError(f"{layout.prefix}: is up with other settings ({old}); bring it down first, or give another --prefix")
        return old
    if cgroup:
        _check_cgroups(layout)
    settings = Settings(choose_base_port(base_port, old.base_port if old else None), accounting, cgroup)
    write_settings(layout, settings)
    for folder, mode in layout.folders():
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    _write_files(layout, settings)
    if accounting and not (layout.database / "mysql").is_dir():
        _install_database(layout)
    add_hosts(layout.prefix, {node: settings.address(node) for node in NODES})
    return settings


def _check_cgroups(layout: Layout) -> None:
    if os.getuid() != 0 or not Path("/sys/fs/cgroup/memory").is_dir():
        raise UserError("--cgroup needs root and control groups of version 1 in /sys/fs/cgroup; leave it out")
    if others := other_cgroup_clusters(layout, config.CGROUP_LINE):
        raise UserError(f"--cgroup: the cluster of {others[0]} has control groups of the same names; bring that one down, or leave --cgroup out")


def _write_files(layout: Layout, settings: Settings) -> None:
    host, user, password = socket.gethostname().split(".")[0], getpass.getuser(), secrets.token_hex(16)
    layout.slurm_conf.write_text(config.slurm_conf(layout, settings, host=host, user=user))
    layout.gres_conf.write_text(config.gres_conf())
    layout.cgroup_conf.write_text(config.cgroup_conf())
    layout.plugstack_conf.write_text("")  # Debian's names a folder that may not exist
    layout.env_script.write_text(f"export SLURM_CONF={shlex.quote(str(layout.slurm_conf))}\n")
    if settings.accounting:
        _write_private(layout.slurmdbd_conf, config.slurmdbd_conf(layout, settings, host=host, user=user, password=password).encode())
        _write_private(layout.database_script, config.database_script(password).encode())
    if not layout.munge_key.exists():
        _write_private(layout.munge_key, secrets.token_bytes(128))


def _write_private(path: Path, data: bytes) -> None:
    """For this user's eyes alone, from the first byte on."""
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)


def _install_database(layout: Layout) -> None:
    """Make MariaDB's own tables; its root is this user, by the socket, and nobody else."""
    user = getpass.getuser()
    with layout.log("mariadb-install").open("wb") as output:
        done = subprocess.run(
            ["mariadb-install-db", "--no-defaults", f"--user={user}", f"--datadir={layout.database}", "--skip-test-db", "--skip-name-resolve",
             "--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}"],
            env=os.environ | {"PATH": PATH}, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    if done.returncode:
        shutil.rmtree(layout.database)
        raise failed(layout, Daemon("mariadb-install", "mariadb-install-db", ()), f"ended with status {done.returncode}")
