"""Clients that mean no good: bounded memory, an answer or an end, and nobody else notices."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from processes import WATCHDOG, eventually
from wire import ERROR, OK, Client, Server, mpub, sized

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


def worker(server: Server) -> psutil.Process:
    """The gateway process."""
    found = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "shmq.gateway.worker" in child.cmdline()
    ]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def honest(server: Server, topic: str) -> Iterator[Callable[[], None]]:
    """`honest()`: another client publishes, takes and finishes as if nothing were."""
    client = server.connect()
    client.sub(topic, "honest", 1)

    def work() -> None:
        client.pub(topic, b"x")
        client.finish(client.delivery())

    yield work
    client.close()


def takes(client: Client, data: bytes, times: int) -> bool:
    """Whether the server takes all of it."""
    try:
        for _ in range(times):
            client.send(data)
    except OSError:
        return False
    return True


def test_declared_sizes_cost_nothing(server: Server, honest: Callable[[], None]) -> None:
    process = worker(server)
    before = process.memory_info().rss
    clients = [server.connect() for _ in range(100)]
    for client in clients:
        client.send(b"MPUB t\n" + struct.pack(">iii", 5 << 20, 5, 1 << 20) + b"x" * 100)
    honest()
    assert process.memory_info().rss - before < 30 << 20
    for client in clients:
        client.close()


def test_endless_lines_end(server: Server, honest: Callable[[], None]) -> None:
    client = server.connect()
    assert not takes(client, b"A" * 65536, 100)
    honest()
    client = server.connect(magic=b"")
    client.send(b"\0" * 4)
    assert client.frame() == (ERROR, b"E_BAD_PROTOCOL")


def test_who_does_not_read_is_cut_off(server: Server, honest: Callable[[], None]) -> None:
    producer, client = server.connect(), server.connect()
    bodies = [b"x" * 100000] * 40
    for _ in range(10):
        assert producer.ask(mpub(b"unread", bodies)) == OK
    process = worker(server)
    before = process.memory_info().rss
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert client.identify(heartbeat_interval=1000) == OK
    client.sub("unread", "c", 2500)
    eventually(lambda: server.channel("unread", "c")["in_flight_count"] > 0)
    honest()
    eventually(lambda: server.channel("unread", "c")["client_count"] == 0)
    assert process.memory_info().rss - before < 30 << 20
    assert server.channel("unread", "c")["depth"] == 400  # all of it was given back
    server.post("/topic/delete", topic="unread")


def test_replies_that_nobody_reads_do_not_pile_up(
    server: Server, honest: Callable[[], None]
) -> None:
    client = server.connect()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.identify(heartbeat_interval=1000)
    client.sub("replies", "c")
    process = worker(server)
    before = process.memory_info().rss
    client.sock.settimeout(0.5)
    nonsense = b"FIN 0123456789ABCDEF\n" * 1000
    assert not takes(client, nonsense, 3000)  # it is not read any more, or was ended
    honest()
    assert process.memory_info().rss - before < 30 << 20


def test_many_connections(server: Server, honest: Callable[[], None]) -> None:
    process = worker(server)
    limit = min(
        process.rlimit(psutil.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )
    count = max(min(limit - 200, 2000), 100)
    before = process.memory_info().rss
    clients = [server.connect() for _ in range(count)]
    honest()
    assert (process.memory_info().rss - before) / count < 40 << 10
    for client in clients:
        client.close()
    for _ in range(1000):
        with socket.create_connection(("127.0.0.1", server.port()), WATCHDOG):
            pass
    eventually(lambda: process.num_fds() < 100)
    honest()


def test_half_requests(server: Server, honest: Callable[[], None]) -> None:
    socks = [
        socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) for _ in range(50)
    ]
    for sock in socks:
        sock.sendall(b"POST /pub?topic=t HTTP/1.1\r\nContent-Length: 100\r\nX: ")
    honest()
    assert server.http("GET", "/ping").status == 200
    with socket.create_connection(("127.0.0.1", server.port("http")), WATCHDOG) as sock:
        sock.sendall(b"GET /" + b"x" * 100000)
        assert sock.recv(100).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    for sock in socks:
        sock.close()


def test_compression_bombs_stay_small(start: Start, tmp_path: Path) -> None:
    import zlib

    server = start()
    process = worker(server)
    client = server.connect()
    client.identify(feature_negotiation=True, deflate=True)
    before = process.memory_info().rss
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = packer.compress(b"NOP\n" * (2 << 20)) + packer.flush(zlib.Z_SYNC_FLUSH)
    client.send(bomb)
    other = server.connect()
    time.sleep(0.2)
    other.pub("t", b"x")
    assert process.memory_info().rss - before < 40 << 20
    line = zlib.compressobj(9, zlib.DEFLATED, -15)
    client = server.connect()
    client.identify(feature_negotiation=True, deflate=True)
    client.send(line.compress(b"A" * (256 << 20)) + line.flush(zlib.Z_SYNC_FLUSH))
    data = b"x"
    while data:
        try:
            data = client.sock.recv(4096)
        except ConnectionResetError:
            break
    assert other.ask(b"PUB t\n" + sized(b"y")) == OK
    assert process.memory_info().rss - before < 60 << 20
