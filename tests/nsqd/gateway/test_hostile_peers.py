"""nsqlookupds that mean harm, and work of one client that takes the threads of a gateway: they cost
what they touch, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hostile import EVIL, Hostile, drip, evil_in, flood, page, wrong_texts
from support.nsq_client import RESPONSE, Server
from support.processes import eventually
from support.session_without_socket import Host

from shmq.gateway.asker import Asker
from shmq.gateway.leasing import Leasing
from shmq.gateway.pools import KINDS, Pools

Start = Callable[..., Server]
OK = (RESPONSE, b"OK")


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


class Lookupd:
    """A nsqlookupd whose answers a test chooses. web: serves a connection of HTTP. told: its answer
    to each command, made from the command's line."""

    def __init__(self) -> None:
        self.identity: bytes = b""
        self.answer: Callable[[socket.socket], None] = lambda sock: None
        self.lines: list[bytes] = []
        self.pause = 0.0
        self.web = Hostile(self._web)
        self.tcp = Hostile(self._tcp)
        self.flag = f"--lookupd-tcp-address={self.tcp.address}"

    def says(self, channels: Any) -> None:
        body = json.dumps({"channels": channels}).encode()
        self.answer = lambda sock: sock.sendall(page(body))

    def _web(self, sock: socket.socket) -> None:
        sock.recv(65536)
        self.answer(sock)

    def _tcp(self, sock: socket.socket) -> None:
        file = sock.makefile("rb")
        file.read(4)
        while line := file.readline():
            said = b"OK"
            if line == b"IDENTIFY\n":
                file.read(struct.unpack(">i", file.read(4))[0])
                said = (
                    self.identity
                    or json.dumps(
                        {
                            "broadcast_address": "127.0.0.1",
                            "http_port": self.web.port,
                            "tcp_port": 1,
                        }
                    ).encode()
                )
            else:
                self.lines.append(line)
                time.sleep(self.pause)
            sock.sendall(struct.pack(">i", len(said)) + said)

    def close(self) -> None:
        self.web.close()
        self.tcp.close()


@pytest.fixture
def lookupds() -> Iterator[Callable[[], Lookupd]]:
    """Makes nsqlookupds."""
    with contextlib.ExitStack() as stack:

        def make() -> Lookupd:
            found = Lookupd()
            stack.callback(found.close)
            return found

        yield make


def channels(server: Server, topic: str) -> list[str]:
    document = json.loads(server.http("GET", f"/stats?format=json&topic={topic}").body)
    return [each["channel_name"] for one in document["topics"] or [] for each in one["channels"]]


def begun(
    start: Start, *peers: Lookupd, seconds: str = "500ms", words: tuple[str, ...] = ()
) -> Server:
    """A server that has met its nsqlookupds. seconds: that their answers may take."""
    flags = ("--http-client-connect-timeout=500ms", f"--http-client-request-timeout={seconds}")
    server = start(*(peer.flag for peer in peers), *flags, *words)
    eventually(lambda: all(b"PING\n" in peer.lines for peer in peers))
    return server


def test_one_bad_name_costs_no_other(start: Start, lookupds: Callable[[], Lookupd]) -> None:
    peer = lookupds()
    server = begun(start, peer)
    peer.says(
        ["../../x", f"a b\nUNREGISTER t {EVIL}", "", "x" * 100, 5, None, [], "good", "e#ephemeral"]
    )
    client = server.connect()
    client.send(b"PUB t\n" + struct.pack(">i", 1) + b"x")
    assert client.frame() == OK
    assert channels(server, "t") == ["good"]
    assert "7 of the channels of topic t have no name of a channel" in server.log
    assert not evil_in(server.log)


def test_invented_channels_are_bounded(start: Start, lookupds: Callable[[], Lookupd]) -> None:
    peer, honest = lookupds(), lookupds()
    server = begun(start, peer, honest)
    peer.says([f"c{number}" for number in range(3000)])
    honest.says(["mine"])
    assert server.http("POST", "/topic/create?topic=t").status == 200
    found = channels(server, "t")
    assert "mine" in found
    assert len(found) <= 129
    assert "names 3000 channels of topic t; the first 128 are made" in server.log


SENT = ("head", "body", "redirect", "flood")


def _web(sent: str) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        head = b"HTTP/1.1 200 OK\r\n"
        if sent == "flood":
            flood(sock, b"HTTP/1.1 100 Continue\r\n\r\n")
        elif sent == "redirect":
            sock.sendall(page(b"", b"HTTP/1.1 302 Found\r\nLocation: http://[::1]:1/x\r\n"))
        elif sent == "body":
            sock.sendall(head + b"Content-Length: 9999\r\n\r\n")
            drip(sock)
        else:
            sock.sendall(head)
            drip(sock)

    return answer


@pytest.mark.parametrize("sent", SENT)
def test_topics_are_made_without_one_that_has_no_answer(
    start: Start, lookupds: Callable[[], Lookupd], sent: str
) -> None:
    """After the deadline; then no thread is left to it."""
    peer = lookupds()
    server = begun(start, peer)
    peer.answer = _web(sent)
    client = server.connect()
    client.send(b"PUB t\n" + struct.pack(">i", 1) + b"x")
    assert client.frame() == OK
    eventually(lambda: peer.web.open == 0)


@pytest.mark.parametrize("sent", ["head", "body"])
def test_one_that_drips_holds_up_no_other_client(
    start: Start, lookupds: Callable[[], Lookupd], sent: str
) -> None:
    """Statistics, and clients of topics that are there, are answered before any of the forty that
    wait for it."""
    peer = lookupds()
    server = begun(start, peer, seconds="1m")
    peer.says([])
    assert server.http("POST", "/topic/create?topic=there").status == 200
    peer.answer = _web(sent)
    clients = [server.connect() for _ in range(40)]
    for number, client in enumerate(clients):
        client.send(b"PUB new%d\n" % number + struct.pack(">i", 1) + b"x")
    eventually(lambda: peer.web.open >= 6)
    other = server.connect()
    other.sub("there", "c")
    assert server.http("GET", "/stats").status == 200
    socks = [client.sock for client in clients]
    assert not select.select(socks, [], [], 0)[0]
    peer.web.close()
    for client in clients:
        assert client.frame() == OK


def test_an_honest_one_beside_it_is_used(start: Start, lookupds: Callable[[], Lookupd]) -> None:
    """Also by the other processes of the gateway."""
    slow, honest = lookupds(), lookupds()
    server = begun(start, slow, honest, words=("--gateway-workers=2",))
    slow.answer = lambda sock: drip(sock, b"x", 0.02)
    honest.says(["mine"])
    for number in range(6):  # the processes take turns
        assert server.http("POST", f"/topic/create?topic=t{number}").status == 200
        assert channels(server, f"t{number}") == ["mine"]


def test_answers_of_wrong_types_cost_nothing(start: Start, lookupds: Callable[[], Lookupd]) -> None:
    peer = lookupds()
    server = begun(start, peer)
    for number, body in enumerate(wrong_texts({"channels": ["c"]})):
        peer.answer = lambda sock, body=body: sock.sendall(page(body))  # type: ignore[misc]
        assert server.http("POST", f"/topic/create?topic=t{number}").status == 200
    assert "Traceback" not in server.log
    assert not evil_in(server.log)


@pytest.mark.parametrize(
    "identity",
    [
        *(b"[" * 90_000, b"NaN", b"{}", b"[]", b'{"broadcast_address":7,"http_port":1}'),
        b'{"broadcast_address":"a/b@c","http_port":1}',
        b'{"broadcast_address":"127.0.0.1","http_port":-1}',
        b'{"broadcast_address":"\\u001b[31m\\nx","http_port":1}',
        *(b"E_BAD \x1b]0;owned\x07\nforged", b"\xff\xff"),
    ],
    ids=lambda identity: repr(identity[:30]),
)
def test_an_identity_of_wrong_types_is_a_line_of_the_log(
    start: Start, lookupds: Callable[[], Lookupd], identity: bytes
) -> None:
    peer, honest = lookupds(), lookupds()
    peer.identity = identity
    server = start(peer.flag, honest.flag)
    honest.says(["mine"])
    eventually(lambda: honest.lines)
    eventually(lambda: peer.tcp.met)
    assert server.http("POST", "/topic/create?topic=t").status == 200
    eventually(lambda: b"REGISTER t mine\n" in honest.lines)
    assert channels(server, "t") == ["mine"]
    assert "Traceback" not in server.log
    assert not evil_in(server.log)


def test_a_slow_one_keeps_no_other_from_what_it_must_know(
    start: Start, lookupds: Callable[[], Lookupd]
) -> None:
    """It takes 0.8 s of the second that it has for each command."""
    slow, quick = lookupds(), lookupds()
    server = begun(start, slow, quick)
    slow.pause = 0.8
    slow.says([])
    quick.says([])
    for number in range(20):
        server.http("POST", f"/topic/create?topic=t{number}")
    eventually(lambda: b"REGISTER t19\n" in quick.lines)
    assert len([line for line in slow.lines if line.startswith(b"REGISTER")]) < 19


# ---- threads ----


def _held(pools: Pools, kind: str, key: str, until: threading.Event) -> list[Any]:
    """Work of one client that takes all threads that it gets."""
    return [pools.of(kind).ask(key, until.wait) for _ in range(200)]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"look", "close"}))
def test_work_of_one_kind_and_client_holds_up_no_other(kind: str) -> None:
    """200 jobs of one client are held: other clients' jobs of this kind run, and all other
    kinds'."""

    async def run() -> None:
        pools, until = Pools(), threading.Event()
        held = _held(pools, kind, "a", until)
        for other in KINDS.keys() - {kind}:
            assert await pools.of(other).ask("a", lambda: 7) == 7
        assert await pools.of(kind).ask("b", lambda: 8) == 8
        assert not any(each.done() for each in held)
        pools.of(kind).forget(held[-1])
        assert held[-1].cancelled()
        pools.of(kind).forget(held[0])
        assert not held[0].cancelled()  # it has begun: its result must not get lost
        until.set()
        await asyncio.gather(*held[:-1])
        pools.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"COMMIT t", "commit"),
        (b"ABANDON t", "commit"),
        (b"STAGE t", "stage"),
        (b"LEASE t c", "lease"),
        (b"LREAD t c", "lease"),
        (b"LMAKE t", "lease"),
        (b"LMAKE missing", "topic"),
        (b"LHOLD missing c", "topic"),
    ],
)
def test_the_pool_of_each_lease_command(line: bytes, kind: str) -> None:
    host = Host()
    host.kind_of = lambda topic: "topic" if topic == b"missing" else "general"  # type: ignore[method-assign]
    leasing = Leasing(host, Asker())
    name, *names = line.split()
    leasing._names = tuple(each.decode() for each in names)
    assert leasing._kind(name) == kind
