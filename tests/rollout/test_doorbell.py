"""The doorbell: ready names are heard of at once and looked up no earlier; whatever is thrown at its port, and when it breaks, files are the truth."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evo_hpc.paths import ExchangePaths
from evo_hpc.rollout import doorbell as doorbell_module
from evo_hpc.rollout.doorbell import SILENT, Doorbell, proof
from evo_hpc.rollout.doorbell_hub import STRANGERS, Hub
from evo_hpc.rollout.exchange import BatchRequest, GroupRequest, Requests, post_request, retire, wait_any
from evo_hpc.store.atomic import read_json, write_bytes


@pytest.fixture
def exchange(tmp_path: Path) -> ExchangePaths:
    paths = ExchangePaths(tmp_path)
    for folder in paths.folders():
        folder.mkdir()
    return paths


@pytest.fixture
def hub(exchange: ExchangePaths) -> Iterator[Hub]:
    made = Hub(exchange, members=("trainer", "rollout"))
    assert made.start()
    yield made
    made.close()


@pytest.fixture
def ends(exchange: ExchangePaths, hub: Hub) -> Iterator[tuple[Doorbell, Doorbell]]:
    with Doorbell.connect(exchange, "trainer") as trainer, Doorbell.connect(exchange, "rollout") as worker:
        until(lambda: trainer.listening and worker.listening)
        yield trainer, worker


def until(ready, seconds: float = 5.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class CachingPath(type(Path())):  # type: ignore[misc]
    """A name as a client of a network filesystem sees it: once it was looked up and not there, it is not there for 30 s."""

    not_there: dict[str, float] = {}

    def exists(self) -> bool:  # type: ignore[override]
        if time.monotonic() - self.not_there.get(str(self), float("-inf")) < 30:
            return False
        found = os.path.exists(self)
        if not found:
            self.not_there[str(self)] = time.monotonic()
        return found


def seen_after(root: Path, writer: Doorbell, reader: Doorbell, name: str) -> float:
    """Seconds from when a name was there until a reader that had waited for it went on; 3 when it did not within 3 s."""
    done: list[float] = []
    waiting = threading.Thread(target=lambda: (wait_any([CachingPath(root / name)], lambda: None, reader), done.append(time.monotonic())), daemon=True)
    waiting.start()
    time.sleep(0.1)
    write_bytes(root / name, b"x", durable=False)
    began = time.monotonic()
    writer.ring(root / name)
    waiting.join(3.0)
    return done[0] - began if done else 3.0


def test_what_is_rung_is_seen_at_once_where_directories_are_cached(exchange: ExchangePaths, ends: tuple[Doorbell, Doorbell]) -> None:
    trainer, worker = ends
    took = [seen_after(exchange.root, trainer, worker, f"requests/n{i}") for i in range(5)]
    took += [seen_after(exchange.root, worker, trainer, f"rollouts/n{i}") for i in range(5)]
    assert sorted(took)[-2] < 0.1 and max(took) < 1, took  # once in a while a busy machine does not let a thread run for so long
    assert seen_after(exchange.root, SILENT, SILENT, "rollouts/polled") == 3.0, "the simulated cache hides names that are looked up too early"


def test_whoever_comes_later_is_told_what_is_there(exchange: ExchangePaths, hub: Hub, ends: tuple[Doorbell, Doorbell]) -> None:
    trainer, worker = ends
    for number in (1, 2, 3):
        group = GroupRequest(group_id="g", task_id="t", seeds=[1])
        post_request(exchange, BatchRequest(number=number, step=1, weight_version=0, groups=[group]), trainer)
    retire(exchange, 2, trainer)
    with Doorbell.connect(exchange, "rollout-1") as late:
        until(lambda: late.listening)
        requests, numbers = Requests(exchange, late), []
        while (number := requests.next()) is not None:
            numbers.append(number)
            requests.passed(number)
        assert numbers == [1, 3]


def test_a_member_that_is_lost_makes_all_poll_until_it_is_back(exchange: ExchangePaths, ends: tuple[Doorbell, Doorbell], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, worker = ends
    monkeypatch.setattr(doorbell_module, "_AGAIN_SECONDS", 0.3)
    assert worker._socket is not None
    worker._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: not trainer.listening and trainer.may_look(exchange.request(1)))
    worker.ring(exchange.rollouts(1))  # nobody hears that
    until(lambda: trainer.listening and worker.listening)
    until(lambda: exchange.rollouts(1) in trainer.names(exchange.rollouts(1).parent))


def test_without_a_hub_everything_is_polled(exchange: ExchangePaths, hub: Hub, ends: tuple[Doorbell, Doorbell]) -> None:
    hub.close()
    until(lambda: not any(end.listening for end in ends))
    assert all(end.may_look(exchange.request(9)) for end in ends)
    threading.Timer(0.1, lambda: write_bytes(exchange.rollouts(4), b"x")).start()
    assert wait_any([exchange.rollouts(3), exchange.rollouts(4)], lambda: None, ends[0]) == [exchange.rollouts(4)]
    empty = ExchangePaths(exchange.root / "other")
    assert not Doorbell.connect(empty, "trainer").listening


def test_a_member_that_never_came_is_waited_for_by_polling(exchange: ExchangePaths, hub: Hub) -> None:
    with Doorbell.connect(exchange, "trainer") as trainer:
        time.sleep(0.1)
        assert not trainer.listening and trainer.may_look(exchange.rollouts(1))


def test_a_name_that_nobody_rings_for_is_found_in_the_end(exchange: ExchangePaths, ends: tuple[Doorbell, Doorbell], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell_module, "_LOOK_ANYWAY_SECONDS", 0.5)
    write_bytes(exchange.rollouts(1), b"x")
    assert wait_any([exchange.rollouts(1)], lambda: None, ends[0]) == [exchange.rollouts(1)]


def test_the_token_is_private_and_loopback_is_all_that_is_bound(exchange: ExchangePaths, hub: Hub) -> None:
    assert stat.S_IMODE(exchange.doorbell.stat().st_mode) == 0o600
    assert read_json(exchange.doorbell)["host"] == "127.0.0.1" == hub._listener.getsockname()[0]
    assert not Hub(exchange, "no-such-host.invalid").start()


def connect(hub: Hub) -> socket.socket:
    return socket.create_connection(("127.0.0.1", hub.port), timeout=10)


def closed(connection: socket.socket) -> bool:
    """Whether the hub hangs up, all it says before that aside."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("words", [
    b"\x00\xff" * 3000, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"x" * 100_000, "rollout é 1\n".encode(), b"\n\n\n", b"+requests/batch-00000001.json\n",
    b"rollout " + b"0" * 64 + b" 00\n",
])
def test_strangers_are_shown_out(exchange: ExchangePaths, hub: Hub, ends: tuple[Doorbell, Doorbell], words: bytes) -> None:
    stranger = connect(hub)
    try:
        stranger.sendall(words)
    except ConnectionError:
        pass
    assert closed(stranger)
    assert seen_after(exchange.root, ends[0], ends[1], "requests/after") < 0.1
    assert not any("batch" in path.name for path in ends[1].names(exchange.request(0).parent)), "what strangers ring is not passed on"


def test_an_old_proof_is_none(exchange: ExchangePaths, hub: Hub, ends: tuple[Doorbell, Doorbell]) -> None:
    token = read_json(exchange.doorbell)["token"]
    stranger = connect(hub)
    challenge = stranger.recv(4096).split()[1].decode()
    replayed = proof(token, secrets.token_hex(16), "trainer")
    assert challenge not in replayed
    stranger.sendall(f"trainer {replayed} 00\n".encode())
    assert closed(stranger) and ends[0].listening, "nobody takes a member's place"


def test_a_hub_that_does_not_know_the_token_is_not_listened_to(exchange: ExchangePaths) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        write_bytes(exchange.doorbell, b'{"host": "127.0.0.1", "port": %d, "token": "t"}' % server.getsockname()[1])

        def pretend() -> None:
            peer, _ = server.accept()
            peer.sendall(f"{doorbell_module.PROTOCOL} 00\n{'0' * 64}\n+requests/x\nall\n".encode())
            peer.recv(4096)

        threading.Thread(target=pretend, daemon=True).start()
        with Doorbell.connect(exchange, "trainer", patience=0.5) as bell:
            assert not bell.listening and not bell.names(exchange.request(0).parent)


def test_half_open_connections_and_a_flood_keep_nobody_out(exchange: ExchangePaths, hub: Hub, ends: tuple[Doorbell, Doorbell], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evo_hpc.rollout.doorbell_hub.HANDSHAKE_SECONDS", 60.0)
    began, half_open = time.monotonic(), [connect(hub) for _ in range(2 * STRANGERS)]
    assert all(closed(each) for each in half_open[: STRANGERS - 1]), "of too many the oldest are shown out"
    assert time.monotonic() - began < 5, "at once, not when they have been silent for too long"
    monkeypatch.setattr("evo_hpc.rollout.doorbell_hub.HANDSHAKE_SECONDS", 0.5)
    assert seen_after(exchange.root, ends[0], ends[1], "requests/half-open") < 0.1
    done = threading.Event()

    def flood() -> None:
        while not done.is_set():
            with connect(hub) as each:
                each.sendall(secrets.token_bytes(512))

    floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    for each in floods:
        each.start()
    took = [seen_after(exchange.root, ends[0], ends[1], f"requests/flood{i}") for i in range(3)]
    with Doorbell.connect(exchange, "rollout-1") as late:
        until(lambda: late.listening, 15.0)
    done.set()
    for each in floods:
        each.join()
    assert max(took) < 0.5 and sorted(took)[1] < 0.1, took
    assert all(closed(each) for each in half_open), "who says nothing is not kept"
    assert len(hub._peers) <= 2 + STRANGERS
