"""Where a cluster's files lie: the one owner of the names under its prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evo_hpc.errors import UserError

LONGEST_PREFIX = 80  # a Unix socket's whole path ends at 107 bytes
PLAIN = re.compile(r"/[A-Za-z0-9._/+-]+")


@dataclass(frozen=True)
class Layout:
    """The paths under `prefix`. Raises UserError when Slurm's files could not spell it."""

    prefix: Path

    def __post_init__(self) -> None:
        text = str(self.prefix)
        if not PLAIN.fullmatch(text) or len(text) > LONGEST_PREFIX:
            raise UserError(f"{text}: cannot be a cluster's prefix (absolute, at most {LONGEST_PREFIX} characters, of A-Z a-z 0-9 . _ / + - only); "
                            "give another with --prefix, such as /tmp/evo-cluster")

    @property
    def settings(self) -> Path:
        return self.prefix / "settings.json"

    @property
    def env_script(self) -> Path:
        return self.prefix / "env.sh"

    @property
    def slurm_conf(self) -> Path:
        return self.prefix / "etc/slurm.conf"

    @property
    def gres_conf(self) -> Path:
        return self.prefix / "etc/gres.conf"

    @property
    def cgroup_conf(self) -> Path:
        return self.prefix / "etc/cgroup.conf"

    @property
    def plugstack_conf(self) -> Path:
        return self.prefix / "etc/plugstack.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.prefix / "etc/slurmdbd.conf"

    @property
    def database_script(self) -> Path:
        return self.prefix / "etc/database.sql"

    @property
    def munge_key(self) -> Path:
        return self.prefix / "munge/key"

    @property
    def munge_seed(self) -> Path:
        return self.prefix / "munge/seed"

    @property
    def munge_socket(self) -> Path:
        return self.prefix / "run/munge.socket"

    @property
    def database(self) -> Path:
        return self.prefix / "database"

    @property
    def database_socket(self) -> Path:
        return self.prefix / "run/mariadbd.socket"

    @property
    def state(self) -> Path:
        return self.prefix / "state"

    def folders(self) -> tuple[tuple[Path, int], ...]:
        """What must exist before anything starts, each with its mode."""
        return tuple((self.prefix / name, mode) for name, mode in (
            ("etc", 0o755), ("run", 0o755), ("log", 0o755), ("spool", 0o755), ("state", 0o700), ("munge", 0o700), ("database", 0o700)))

    def pid_file(self, daemon: str) -> Path:
        return self.prefix / "run" / f"{daemon}.pid"

    def log(self, daemon: str) -> Path:
        return self.prefix / "log" / f"{daemon}.log"

    def namespace(self, node: str) -> Path:
        return self.prefix / "run" / f"{node}.uts"

    def spool(self, node: str) -> Path:
        return self.prefix / "spool" / node
