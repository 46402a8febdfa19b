"""What a cluster was brought up with, as remembered under its prefix, and the ports that it uses."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from evo_hpc.errors import UserError
from tests.cluster.layout import Layout

NODES = ("n1", "n2", "n3", "n4")
GPU_NODES = NODES[:2]
PORTS = 16  # a cluster's share of the ports, from its base port on
FIRST, LAST = 20000, 32000  # below the range from which Linux takes the ports of outgoing connections


@dataclass(frozen=True)
class Settings:
    """Fixed while any daemon of the cluster lives."""

    base_port: int
    accounting: bool
    cgroup: bool

    @property
    def ctld_port(self) -> int:
        return self.base_port

    @property
    def dbd_port(self) -> int:
        return self.base_port + 1

    @property
    def database_port(self) -> int:
        return self.base_port + 2

    def node_port(self, node: str) -> int:
        return self.base_port + 3 + NODES.index(node)

    def address(self, node: str) -> str:
        """A loopback address that no other cluster gives to a node, since no other cluster has this base port."""
        return f"127.{self.base_port >> 8}.{self.base_port & 0xff}.{NODES.index(node) + 1}"

    def ports(self) -> tuple[int, ...]:
        return (self.ctld_port, self.dbd_port, self.database_port, *(self.node_port(n) for n in NODES))


def read_settings(layout: Layout) -> Settings | None:
    """The remembered settings, or None where no cluster was ever brought up."""
    try:
        return Settings(**json.loads(layout.settings.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{layout.settings}: not a cluster's settings ({error}); remove the folder {layout.prefix}") from error


def write_settings(layout: Layout, settings: Settings) -> None:
    """Before any other file of the cluster: it marks the folder as one that may be wiped."""
    temporary = layout.settings.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(settings)) + "\n")
    temporary.replace(layout.settings)


def port_is_free(port: int) -> bool:
    """Whether a daemon could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_base_port(asked: int | None, remembered: int | None) -> int:
    """The asked one, else the remembered one while its ports are free, else a free one. Raises UserError when there is none."""
    if asked is not None:
        if not 1024 <= asked <= 65535 - PORTS:
            raise UserError(f"--base-port {asked}: give one between 1024 and {65535 - PORTS}")
        candidates: Iterator[int] = iter([asked])
    else:
        spread = random.sample(range(FIRST, LAST, PORTS), k=64)  # two clusters that start together hardly ever meet
        candidates = iter([*([remembered] if remembered else []), *spread])
    for base in candidates:
        if all(port_is_free(port) for port in Settings(base, True, False).ports()):
            return base
    raise UserError(f"no free ports from {asked} on: another program listens there; leave --base-port out and free ones are found" if asked
                    else f"no {PORTS} free ports in a row between {FIRST} and {LAST}; name some with --base-port")
