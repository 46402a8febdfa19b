"""Where a job's live traffic goes: shared memory when there is room, else the folder the profile names or the job's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from evo_hpc.config.cluster import Cluster
from evo_hpc.paths import SHARED_MEMORY, ExchangePaths, IncarnationPaths

_ROOM_BYTES = 256 << 20


def _root(base: Path, job_name: str) -> Path:
    return base / f"evo_hpc-{os.getuid()}" / job_name


def sweep_exchange(job_name: str) -> None:
    """Remove what dead incarnations of this very job left in shared memory; nobody else's files."""
    shutil.rmtree(_root(SHARED_MEMORY, job_name), ignore_errors=True)


def make_exchange(cluster: Cluster, job_name: str, incarnation: IncarnationPaths) -> ExchangePaths:
    """A fresh exchange folder, readable by this user alone."""
    name = f"inc-{incarnation.number}"
    if cluster.exchange is not None:
        root = _root(Path(cluster.exchange), job_name) / name
        shutil.rmtree(root, ignore_errors=True)
    elif os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > _ROOM_BYTES:
        root = _root(SHARED_MEMORY, job_name) / name
    else:
        root = incarnation.exchange
    exchange = ExchangePaths(root)
    root.mkdir(parents=True, mode=0o700)
    for folder in exchange.folders():
        folder.mkdir()
    return exchange
