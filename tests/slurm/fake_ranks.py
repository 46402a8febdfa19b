"""A trainer of several ranks without torch: the ranks meet by MASTER_ADDR and MASTER_PORT, all talk to all, and the first one trains.

Run as a program it takes the place of the jobs' interpreter, as tests/crash/fake_python.py does. What goes wrong, in which attempt, is
told by the environment: `FAKE_RANKS=0:dies,1:exits,2:hangs`; `notices`: the first one dies of a peer's end.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

from evo_hpc.jobs.context import RoleContext

MEET_SECONDS = 60.0


def train(context: RoleContext) -> dict[str, Any]:
    """Every rank proves that it spoke with each other one; then the first trains, and the others wait for it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = Store(rank)
    heard = all_to_all(store, rank, world)
    (context.incarnation.root / f"met-{rank}.json").write_text(json.dumps({
        "heard": heard, "host": socket.gethostname(), "local_rank": os.environ["LOCAL_RANK"], "world": world, "addr": os.environ["MASTER_ADDR"],
    }))
    plans = dict(each.split(":") for each in os.environ.get("FAKE_RANKS", "").split(",") if each)
    plan = plans.get(str(context.spec.attempt))
    if rank == world - 1 and plan == "dies":
        time.sleep(1)
        raise RuntimeError("the last rank cannot go on")
    if rank == world - 1 and plan == "exits":
        time.sleep(1)
        print("the last rank says no more than this", file=sys.stderr, flush=True)
        os._exit(1)
    if plan == "hangs":
        hang_in_a_collective()
    import fake_roles

    if rank:
        store.wait()  # until the first one closes its end
        context.raise_if_stopped()
        return {}
    if plan == "notices":
        store.watch()
    try:
        return fake_roles.train(context)
    finally:
        store.close()


def hang_in_a_collective() -> None:
    time.sleep(3600)


class Store:
    """What torch's TCPStore does: the first rank listens where all others were told it would, and knows where they are."""

    def __init__(self, rank: int) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers: list[socket.socket] = []
        self.closed = False
        if rank == 0:
            self.listener = socket.create_server(("", address[1]), backlog=64)
            return
        deadline = time.monotonic() + MEET_SECONDS
        while True:
            try:
                self.first = socket.create_connection(address, timeout=MEET_SECONDS)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def gather(self, world: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Of the first rank: what every rank says, told to all of them."""
        said = {0: mine}
        while len(said) < world:
            peer, _ = self.listener.accept()
            self.peers.append(peer)
            told = receive(peer)
            said[told["rank"]] = told
        everything = [said[rank] for rank in range(world)]
        for peer in self.peers:
            send(peer, everything)
        return everything

    def wait(self) -> None:
        self.first.settimeout(None)
        self.first.recv(1)

    def watch(self) -> None:
        """Die of a peer's end, as a collective does."""
        def until_gone(peer: socket.socket) -> None:
            try:
                gone = peer.recv(1) == b""
            except OSError:
                gone = True
            if gone and not self.closed:
                print("the first rank has lost a peer", file=sys.stderr, flush=True)
                os._exit(1)

        for peer in self.peers:
            threading.Thread(target=until_gone, args=(peer,), daemon=True).start()

    def close(self) -> None:
        self.closed = True
        for peer in self.peers:
            peer.close()


def all_to_all(store: Store, rank: int, world: int) -> list[int]:
    """Each rank sends its number to each other one over a connection of their own; the numbers that this one got."""
    server = socket.create_server(("", 0), backlog=world)
    mine = {"rank": rank, "host": os.environ["SLURMD_NODENAME"], "port": server.getsockname()[1]}
    if rank:
        send(store.first, mine)
        everybody = receive(store.first)
    else:
        everybody = store.gather(world, mine)
    for other in everybody:
        if other["rank"] != rank:
            with socket.create_connection((other["host"], other["port"]), timeout=MEET_SECONDS) as peer:
                send(peer, {"rank": rank})
    server.settimeout(MEET_SECONDS)
    heard = []
    for _ in range(world - 1):
        with server.accept()[0] as peer:
            heard.append(receive(peer)["rank"])
    return sorted(heard)


def send(peer: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    peer.sendall(struct.pack("!I", len(data)) + data)


def receive(peer: socket.socket) -> Any:
    (length,) = struct.unpack("!I", _exactly(peer, 4))
    return json.loads(_exactly(peer, length))


def _exactly(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = peer.recv(length - len(data))
        if not more:
            raise ConnectionError("the peer is gone")
        data += more
    return data


if __name__ == "__main__":
    import evo_hpc.dispatch.launcher as launcher
    from evo_hpc.dispatch.roles import ROLES, Role

    assert sys.argv[1:3] == ["-m", "evo_hpc.dispatch.launcher"], sys.argv
    for kind, roles in ROLES.items():
        if kind == "analyse":
            continue
        launcher.ROLES[kind] = tuple(
            Role(r.name, "fake_ranks:train" if kind == "train" and r.primary else f"fake_roles:{'rollout' if r.name == 'rollout' else kind}", r.primary)
            for r in roles
        )
    sys.exit(launcher.main(sys.argv[3:]))
