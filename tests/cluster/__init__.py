"""A private Slurm cluster on this machine, for tests: `python -m tests.cluster up`, or `Cluster(prefix).up()`."""

from __future__ import annotations

from tests.cluster.cluster import Cluster

__all__ = ["Cluster"]
