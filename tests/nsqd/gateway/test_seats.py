"""Connections of all kinds have one limit, and those that only wait give their places to others."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.nsq_client import ERROR, OK, Client, Server, sized
from support.processes import WATCHDOG, eventually

from shmq.door import seats as module
from shmq.door.seats import RESERVE, Seats

Start = Callable[..., Server]

HEAD = b"POST /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
#: Bytes after which a client may wait for ever.
WAYS = {
    "silent": b"",
    "head": HEAD,
    "body": HEAD + b"\r\nx",
    "idle": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "unread": b"GET /page/static/uPlot.esm.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100,
    "viewer": b"GET /page/ticks HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


@pytest.fixture
def flood() -> Iterator[Callable[..., list[socket.socket]]]:
    """`flood(server, count, data)`: so many connections from many addresses that send this."""
    made: list[socket.socket] = []

    def connect(
        server: Server, count: int, data: bytes, kind: str = "http", addresses: int = 50
    ) -> list[socket.socket]:
        socks = []
        for number in range(count):
            source = (f"127.0.0.{2 + number % addresses}", 0)
            with contextlib.suppress(OSError):
                port = server.port(kind)
                sock = socket.create_connection(("127.0.0.1", port), WATCHDOG, source)
                made.append(sock)
                socks.append(sock)
                sock.setblocking(False)
                sock.send(data)
        return socks

    yield connect
    for sock in made:
        sock.close()


def worker(server: Server) -> psutil.Process:
    found = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "shmq.gateway.worker" in child.cmdline()
    ]
    assert len(found) == 1
    return found[0]


def limited(server: Server, more: int = 150) -> psutil.Process:
    """Let the gateway open only so many more descriptors."""
    process = worker(server)
    hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + more, hard))
    return process


def publishes(server: Server, topic: bytes = b"t") -> bool:
    """Whether a new producer gets in."""
    with contextlib.suppress(OSError):
        sock = socket.create_connection(("127.0.0.1", server.port()), WATCHDOG)
        client = Client(sock)
        with contextlib.closing(client):
            client.sock.settimeout(WATCHDOG)
            client.send(b"  V2")
            return client.ask(b"PUB " + topic + b"\n" + sized(b"x")) == OK
    return False


def pings(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return server.http("GET", "/ping").status == 200
    return False


@pytest.mark.parametrize("way", WAYS)
def test_connections_that_wait_keep_nobody_out(
    way: str, start: Start, flood: Callable[..., list[socket.socket]]
) -> None:
    server = start()
    assert publishes(server)
    process = limited(server)
    flood(server, 300, WAYS[way])
    for number in range(5):
        topic = b"new-%d" % number
        eventually(lambda topic=topic: publishes(server, topic), 15, "a producer gets in")
        assert pings(server)
        assert server.http("GET", "/stats").status == 200
        assert server.post("/topic/create", topic=f"made-{number}").status == 200
    assert "ended after it rested" in server.log
    assert "Too many open files" not in server.log
    assert "Traceback" not in server.log
    assert process.is_running()


def test_http_counts_in_the_limits(start: Start, flood: Callable[..., list[socket.socket]]) -> None:
    server = start("--max-connections=10")
    flood(server, 60, WAYS["body"])
    counted = eventually(lambda: gauge(server, "connections") >= 10 and server)
    assert gauge(counted, "connections") <= 10 + RESERVE
    assert "connections exceed limit of 10" in server.log
    assert server.log.count("exceed limit of") <= 11


def test_an_address_has_its_share_of_http_and_tcp_together(
    start: Start, flood: Callable[..., list[socket.socket]]
) -> None:
    server = start("--max-connections-per-address=4")
    clients = []
    for _ in range(2):
        sock = socket.create_connection(("127.0.0.1", server.port()), WATCHDOG, ("127.0.0.9", 0))
        clients.append(Client(sock))
        clients[-1].send(b"  V2")
        assert clients[-1].ask(b"PUB t\n" + sized(b"x")) == OK
    flood(server, 1, WAYS["silent"], addresses=1)
    socks = []
    for _ in range(12):
        sock = socket.create_connection(
            ("127.0.0.1", server.port("http")), WATCHDOG, ("127.0.0.9", 0)
        )
        sock.sendall(WAYS["body"])
        socks.append(sock)
    eventually(lambda: "127.0.0.9" in server.log and "exceed limit of 4" in server.log)
    with contextlib.closing(
        Client(socket.create_connection(("127.0.0.1", server.port()), WATCHDOG, ("127.0.0.9", 0)))
    ) as one_more:
        answer = one_more.frame()
        assert answer == (ERROR, b"E_CONNECT_FAILED connections of 127.0.0.9 exceed limit of 4")
    assert pings(server)
    assert publishes(server)
    for each in clients:
        assert each.ask(b"PUB t\n" + sized(b"x")) == OK  # who works stays
        each.close()
    for sock in socks:
        sock.close()


def test_handshakes_that_never_end_count(
    start: Start, flood: Callable[..., list[socket.socket]], certificate: tuple[str, str]
) -> None:
    server = start(
        f"--tls-cert={certificate[0]}", f"--tls-key={certificate[1]}", "--max-connections=20"
    )
    context = ssl.create_default_context(cafile=certificate[0])
    context.check_hostname = False

    def asks() -> bool:
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", server.port("https")), WATCHDOG)
            with context.wrap_socket(sock) as secure:
                secure.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return secure.recv(100).startswith(b"HTTP/1.1 200")
        return False

    eventually(asks)
    flood(server, 100, b"\x16\x03\x01", "https")
    eventually(lambda: "connections exceed limit of 20" in server.log, what="they count")
    eventually(asks, 20, "somebody else gets in")
    eventually(lambda: publishes(server), 20, "a producer, too")
    assert pings(server)


def test_a_process_without_descriptors_neither_spins_nor_stops(
    start: Start, flood: Callable[..., list[socket.socket]]
) -> None:
    server = start()
    assert publishes(server)
    process = worker(server)
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    names = [int(name) for name in os.listdir(f"/proc/{process.pid}/fd")]
    process.rlimit(psutil.RLIMIT_NOFILE, (max(names) + 1, hard))
    before = sum(process.cpu_times()[:2])
    socks = flood(server, 100, b"")
    eventually(lambda: _ended(socks) > 50, what="connections are closed")
    process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: publishes(server) and pings(server), 20, "it goes on")
    assert sum(process.cpu_times()[:2]) - before < 5
    assert "Traceback" not in server.log


def _ended(socks: list[socket.socket]) -> int:
    count = 0
    for sock in socks:
        with contextlib.suppress(BlockingIOError):
            try:
                count += sock.recv(1, socket.MSG_PEEK) is not None
            except ConnectionError:
                count += 1
    return count


def gauge(server: Server, name: str) -> int:
    text = server.http("GET", "/metrics").body.decode()
    (line,) = [each for each in text.splitlines() if each.startswith(f"shmq_gateway_{name}{{")]
    return int(line.rpartition(" ")[2])


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_on_a_unix_socket_another_user_has_a_limit(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    for parent in (directory, *list(directory.parents)[:4]):
        parent.chmod(parent.stat().st_mode | 0o755)
    path = directory / "tcp"
    server = start(f"--tcp-address={path}", "--max-connections-per-address=3")
    path.chmod(0o777)
    program = (
        "import contextlib, os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "made = []\n"
        "for _ in range(6):\n"
        "    sock = socket.socket(socket.AF_UNIX); made.append(sock)\n"
        f"    sock.connect({str(path)!r})\n"
        "    with contextlib.suppress(BrokenPipeError):  # it is refused already\n"
        "        sock.sendall(b'  V2PUB t\\n\\0\\0\\0\\1x')\n"
        "    print(sock.recv(200))\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("OK") == 3, done.stdout
    assert done.stdout.count("connections of uid:65534 exceed limit of 3") == 3
    for _ in range(5):  # the broker's own user has none
        client = server.connect()
        assert client.ask(b"PUB t\n" + sized(b"x")) == OK


# ---- without sockets ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def taken(seats: Seats, kind: str, peer: str) -> module.Seat:
    seat, reason = seats.take(kind, peer, f"{peer}:{next(_ports)}")
    assert seat is not None, reason
    return seat


_ports = itertools.count(1)


def test_the_one_that_rests_longest_goes_and_none_that_works(clock: list[float]) -> None:
    seats = Seats(lambda: 3, lambda: 0)
    ended: list[module.Seat] = []
    first, second, third = (taken(seats, "HTTP", f"192.0.2.{n}") for n in range(3))
    for seat in (first, second, third):
        seat.close = lambda seat=seat: ended.append(seat)
    first.works()
    clock[0] += 2
    fourth = taken(seats, "TCP", "192.0.2.4")
    assert ended == [second]
    third.works()
    clock[0] += 2
    assert seats.take("TCP", "192.0.2.5", "x")[0] is None  # one that is silent for 2 s only
    first.rests()
    clock[0] += 20
    fourth.silent = lambda: False
    taken(seats, "TCP", "192.0.2.6")
    assert ended == [second, first]
    assert (len(seats.taken), seats.ended, seats.refused) == (3, 2, 1)


def test_a_new_connection_has_time_for_its_request(clock: list[float]) -> None:
    seats = Seats(lambda: 1, lambda: 0)
    taken(seats, "HTTP", "192.0.2.1")
    assert seats.take("TCP", "192.0.2.2", "x")[0] is None


def test_a_peer_at_its_limit_ends_its_own(clock: list[float]) -> None:
    seats = Seats(lambda: 100, lambda: 1)
    ended = []
    other = taken(seats, "HTTP", "192.0.2.1")
    mine = taken(seats, "HTTP", "192.0.2.2")
    other.close, mine.close = lambda: ended.append("other"), lambda: ended.append("mine")
    clock[0] += 2
    taken(seats, "TCP", "192.0.2.2")
    assert ended == ["mine"]
