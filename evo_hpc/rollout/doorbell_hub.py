"""The hub of the doorbell: one thread in the job's launcher that passes on which names are ready, to processes that know the token."""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from evo_hpc.paths import ExchangePaths
from evo_hpc.rollout.doorbell import BEAT_SECONDS, DEAD_SECONDS, HANDSHAKE_SECONDS, LONGEST_LINE, PROTOCOL, proof
from evo_hpc.store.atomic import StoreError, dump_json, write_bytes

STRANGERS = 32
"""Connections that have not proved themselves, at most; of more the oldest is closed, so a flood cannot keep a member out for long."""
MEMBERS = 4096
"""Members, at most."""
NAMES = 1 << 16
"""Names remembered for members that come later, at most; of more the oldest is forgotten, and will be found by polling."""
_BACKLOG_BYTES = 4 << 20
"""What a member may leave unread before it is taken for dead."""
_LOOP_SECONDS = 0.5


@dataclass
class _Peer:
    connection: socket.socket
    since: float
    challenge: str = field(default_factory=lambda: secrets.token_hex(16))
    who: str | None = None
    """Name of a member; null before it has proved that it knows the token."""
    unread: bytes = b""
    unsent: bytes = b""
    seen: float = 0.0


class Hub:
    """Listens on `host` (loopback where the job is on one machine) until `close`. While one of `members` is not
    connected all others poll."""

    def __init__(self, exchange: ExchangePaths, host: str = "127.0.0.1", members: Iterable[str] = ()) -> None:
        self._exchange, self._host = exchange, host
        self._token = secrets.token_hex(32)
        self._peers: dict[socket.socket, _Peer] = {}
        self._names: dict[str, None] = {}
        self._missing = set(members)
        """Members that did not come yet, or whose connection broke: they may ring, and nobody would hear."""
        self._closed = threading.Event()
        self._beaten = 0.0

    def start(self) -> bool:
        """Bind, write where it is, and serve from a thread; False when the machine refuses, which is said in a line."""
        try:
            self._listener = socket.create_server((self._host, 0), backlog=128)
            self._listener.setblocking(False)
            where = {"host": self._host, "port": self._listener.getsockname()[1], "token": self._token}
            write_bytes(self._exchange.doorbell, dump_json(where), mode=0o600, durable=False)
        except (OSError, StoreError) as error:
            print(f"no doorbell on {self._host} ({error}); the exchange is polled", file=sys.stderr, flush=True)
            return False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="doorbell-hub", daemon=True)
        self._thread.start()
        return True

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """End the thread and all connections."""
        self._closed.set()
        self._wake.close()
        self._thread.join(5.0)

    def _serve(self) -> None:
        while not self._closed.is_set():
            for key, mask in self._selector.select(_LOOP_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif (peer := self._peers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                    if mask & selectors.EVENT_WRITE:
                        self._flush(peer)
                    if mask & selectors.EVENT_READ:
                        self._read(peer)
            self._sweep()
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or no descriptor is free: the next turn tries anew
            time.sleep(0.001)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = [peer for peer in self._peers.values() if peer.who is None]
        if len(strangers) >= STRANGERS:
            self._drop(strangers[0])
        now = time.monotonic()
        peer = self._peers[connection] = _Peer(connection, now, seen=now)
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(peer, f"{PROTOCOL} {peer.challenge}")

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.seen = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            if peer.connection not in self._peers:
                return
            if not self._take(peer, line):
                self._drop(peer)
                return
        if len(peer.unread) > LONGEST_LINE:
            self._drop(peer)

    def _take(self, peer: _Peer, line: bytes) -> bool:
        """Do what a line says; False when nobody of ours would say that."""
        if len(line) > LONGEST_LINE or not line.isascii():
            return False
        text = line.decode("ascii")
        if peer.who is None:
            return self._admit(peer, text)
        if text == "bye":
            self._drop(peer, in_order=True)
        elif text[:1] == "+":
            self._names.pop(text[1:], None)
            self._names[text[1:]] = None
            if len(self._names) > NAMES:
                self._names.pop(next(iter(self._names)))
            self._tell(text, but=peer)
        elif text[:1] == "-":
            self._names.pop(text[1:], None)
            self._tell(text, but=peer)
        else:
            return text == "."
        return True

    def _admit(self, peer: _Peer, text: str) -> bool:
        words = text.split(" ")
        if len(words) != 3 or not hmac.compare_digest(words[1], proof(self._token, peer.challenge, words[0])):
            return False
        if sum(each.who is not None for each in self._peers.values()) >= MEMBERS:
            return False
        peer.who = words[0]
        # A member that comes back takes its own place: what the older connection would still say is void.
        for other in [each for each in self._peers.values() if each.who == peer.who and each is not peer]:
            self._drop(other, in_order=True)
        self._missing.discard(peer.who)
        self._send(peer, proof(self._token, words[2], "hub"))
        for name in self._names:
            self._send(peer, f"+{name}")
        self._say_who_is_there()
        return True

    def _say_who_is_there(self) -> None:
        self._tell("missing" if self._missing else "all")

    def _tell(self, line: str, but: _Peer | None = None) -> None:
        for peer in list(self._peers.values()):
            if peer.who is not None and peer is not but:
                self._send(peer, line)

    def _send(self, peer: _Peer, line: str) -> None:
        peer.unsent += line.encode("ascii") + b"\n"
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            sent = peer.connection.send(peer.unsent) if peer.unsent else 0
            peer.unsent = peer.unsent[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        if len(peer.unsent) > _BACKLOG_BYTES:
            self._drop(peer)
        elif peer.connection in self._peers:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
            if self._selector.get_key(peer.connection).events != wanted:
                self._selector.modify(peer.connection, wanted)

    def _drop(self, peer: _Peer, *, in_order: bool = False) -> None:
        if self._peers.pop(peer.connection, None) is None:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.who is not None and not in_order:
            self._missing.add(peer.who)
            self._say_who_is_there()

    def _sweep(self) -> None:
        """Close what does not prove itself in time, and what has fallen silent; show the others that the hub lives."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if (peer.who is None and now - peer.since > HANDSHAKE_SECONDS) or now - peer.seen > DEAD_SECONDS:
                self._drop(peer)
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            self._tell(".")
