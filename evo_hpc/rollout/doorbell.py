"""The doorbell: trainer and workers tell each other over TCP which names in the exchange are ready. It carries no data, and nothing needs it.

Every process rings at one hub (`doorbell_hub.py`), which tells all others. Files stay the truth: where there is no hub, or a connection
breaks, or a peer has lost its own, names are polled for as without it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from evo_hpc.paths import ExchangePaths
from evo_hpc.store.atomic import StoreError, read_json

PROTOCOL = "evo-hpc-doorbell-1"
LONGEST_LINE = 512
"""Bytes of one message; names in the exchange are far shorter."""
BEAT_SECONDS = 2.0
"""Between two signs of life of either side."""
DEAD_SECONDS = 10.0
"""Silence after which a connection counts as broken."""
HANDSHAKE_SECONDS = 5.0
_AGAIN_SECONDS = 2.0
_LOOK_ANYWAY_SECONDS = 30.0
"""How long a name may go unmentioned before it is looked up all the same: whoever should have rung may have died before it could."""


def proof(token: str, challenge: str, who: str) -> str:
    """What only a holder of the token can say to a challenge."""
    return hmac.new(token.encode(), f"{PROTOCOL}\x00{challenge}\x00{who}".encode(), hashlib.sha256).hexdigest()


class Doorbell:
    """One process's end. Without a connection it never listens, and whoever asks is told to look for himself."""

    def __init__(self, exchange: ExchangePaths | None = None, who: str = "") -> None:
        self._exchange, self._who = exchange, who
        self._heard: set[str] = set()
        self._rung: dict[str, None] = {}
        """What this process has rung and not forgotten; told again after a connection was lost."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._asked: dict[str, float] = {}
        self._socket: socket.socket | None = None
        self._all_connected = False
        self._closed = False
        self.count = 0
        """Grows with everything that is heard; what `wait` waits for a change of."""

    @classmethod
    def connect(cls, exchange: ExchangePaths, who: str, *, patience: float = 2.0) -> Doorbell:
        """The doorbell of an exchange, or one that never listens where the exchange has none. Waits `patience` seconds for a connection."""
        if not exchange.doorbell.exists():
            return cls()
        bell = cls(exchange, who)
        threading.Thread(target=bell._keep, name="doorbell", daemon=True).start()
        with bell._changed:
            bell._changed.wait_for(lambda: bell._socket is not None, patience)
        return bell

    @property
    def listening(self) -> bool:
        """Whether all that is rung is heard here."""
        return self._socket is not None and self._all_connected

    def may_look(self, path: Path) -> bool:
        """Whether to look a name up: it was rung for, or nobody would tell, or nobody has told for long."""
        if not self.listening:
            return True
        name = self._name(path)
        with self._changed:
            if name in self._heard or name in self._rung:
                self._asked.pop(name, None)
                return True
            now = time.monotonic()
            first = self._asked.setdefault(name, now)
            if now - first > _LOOK_ANYWAY_SECONDS:
                self._asked[name] = now
                return True
            return False

    def names(self, folder: Path) -> list[Path]:
        """The ready names in a folder of the exchange that were told of."""
        prefix = self._name(folder) + "/"
        with self._changed:
            return [folder / name.removeprefix(prefix) for name in sorted(self._heard | self._rung.keys()) if name.startswith(prefix)]

    def wait(self, heard: int, seconds: float) -> None:
        """Return when something was heard since `count` was `heard`, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.count != heard, seconds)

    def ring(self, path: Path) -> None:
        """Tell everybody that a name is ready."""
        if self._exchange is not None:
            with self._changed:
                self._rung[self._name(path)] = None
            self._send(f"+{self._name(path)}")

    def forget(self, path: Path) -> None:
        """Tell everybody that a name is gone."""
        if self._exchange is not None:
            name = self._name(path)
            with self._changed:
                self._rung.pop(name, None)
                self._heard.discard(name)
            self._send(f"-{name}")

    def close(self) -> None:
        """Leave; the others go on listening to each other."""
        self._send("bye")
        self._closed = True
        self._lose()

    def __enter__(self) -> Doorbell:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _name(self, path: Path) -> str:
        assert self._exchange is not None
        return path.relative_to(self._exchange.root).as_posix()

    def _send(self, line: str) -> None:
        connection = self._socket
        if connection is None:
            return
        try:
            with self._sending:
                connection.sendall(line.encode() + b"\n")
        except OSError:
            self._lose()

    def _keep(self) -> None:
        """Connect, listen, and connect again, until closed."""
        told = False
        while not self._closed:
            try:
                self._listen(*self._open())
            except (OSError, ValueError, KeyError, StoreError) as error:  # no peer that speaks as it should: the files are polled meanwhile
                if not told and not self._closed:
                    print(f"doorbell: {type(error).__name__}: {error}; polling until it is back", file=sys.stderr, flush=True)
                told = True
            self._lose()
            time.sleep(_AGAIN_SECONDS)

    def _open(self) -> tuple[socket.socket, Any]:
        assert self._exchange is not None
        where = read_json(self._exchange.doorbell)
        connection = socket.create_connection((where["host"], where["port"]), timeout=HANDSHAKE_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader, token, mine = connection.makefile("rb"), where["token"], secrets.token_hex(16)
            protocol, challenge = _line(reader).split()
            if protocol != PROTOCOL:
                raise ValueError(f"{where['host']}:{where['port']} speaks {protocol[:40]!r}")
            connection.sendall(f"{self._who} {proof(token, challenge, self._who)} {mine}\n".encode())
            if not hmac.compare_digest(_line(reader), proof(token, mine, "hub")):
                raise ValueError(f"{where['host']}:{where['port']} does not know the token")
        except BaseException:
            connection.close()
            raise
        return connection, reader

    def _listen(self, connection: socket.socket, reader: Any) -> None:
        connection.settimeout(DEAD_SECONDS)
        with self._changed:
            self._heard.clear()
            again = list(self._rung)
            self._socket = connection
        for name in again:
            self._send(f"+{name}")
        threading.Thread(target=self._beat, args=(connection,), name="doorbell-beat", daemon=True).start()
        while line := _line(reader):
            with self._changed:
                if line[0] == "+":
                    self._heard.add(line[1:])
                elif line[0] == "-":
                    self._heard.discard(line[1:])
                    self._rung.pop(line[1:], None)
                elif line in ("all", "missing"):
                    self._all_connected = line == "all"
                else:
                    continue
                self.count += 1
                self._changed.notify_all()

    def _beat(self, connection: socket.socket) -> None:
        while self._socket is connection:
            self._send(".")
            time.sleep(BEAT_SECONDS)

    def _lose(self) -> None:
        with self._changed:
            connection, self._socket = self._socket, None
            self._all_connected = False
            self.count += 1
            self._changed.notify_all()
        if connection is not None:
            connection.close()


def _line(reader: Any) -> str:
    """One message. Raises ValueError on one that is too long or no text, ConnectionError at the end."""
    data = reader.readline(LONGEST_LINE + 1)
    if not data.endswith(b"\n"):
        raise ConnectionError("the connection was closed") if len(data) <= LONGEST_LINE else ValueError("a message that is too long")
    return data[:-1].decode("ascii")


SILENT = Doorbell()
"""The doorbell that is not there."""
