"""Logins of clients without a secret: they keep nobody else from logging in."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.fake_auth_server import Authority, reply, rule
from support.nsq_client import ERROR, Client, Server, sized
from support.processes import WATCHDOG

from shmq.gateway import auth
from shmq.gateway.pools import KINDS, Pool

THREADS, PER_ADDRESS = KINDS["login"]

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


class Slow(Authority):
    """Lets `good` in at once, and refuses everybody else when `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.daemon_threads = True
        self.open = threading.Event()

    def finish_request(self, request: Any, client_address: Any) -> None:
        head = request.recv(65536, socket.MSG_PEEK)
        if b"secret=good" in head:
            self.reply = 200, reply(60, rule())
        else:
            self.open.wait(WATCHDOG)
            self.reply = 403, b""
        super().finish_request(request, client_address)


@pytest.fixture
def slow() -> Iterator[Slow]:
    """An authorisation server that takes its time."""
    with Slow() as server:
        yield server
        server.open.set()


def login(server: Server, secret: bytes, source: str = "127.0.0.1") -> Client:
    """A client that has asked to be let in, and has not read the answer."""
    sock = socket.create_connection(("127.0.0.1", server.port()), WATCHDOG, (source, 0))
    client = Client(sock)
    client.send(b"  V2AUTH\n" + sized(secret))
    return client


def test_a_good_client_is_let_in_while_others_wait(start: Start, slow: Slow) -> None:
    server = start(slow.flag)
    bad = [login(server, b"bad") for _ in range(64)]
    good = login(server, b"good", "127.0.0.2")
    answer = good.frame()
    assert answer is not None
    assert json.loads(answer[1])["permission_count"] == 1
    assert server.http("POST", "/topic/create?topic=t").status == 200
    good.sub("t", "c")  # what takes threads of its own
    slow.open.set()
    for client in bad:
        assert client.frame() == (ERROR, b"E_AUTH_FAILED AUTH failed")
    for client in (good, *bad):
        client.close()


def test_who_failed_is_in_the_log(start: Start, authority: Authority) -> None:
    server = start(authority.flag)
    authority.reply = 403, b""
    client = login(server, b"bad")
    where = "{}:{}".format(*client.sock.getsockname())
    assert client.frame() == (ERROR, b"E_AUTH_FAILED AUTH failed")
    assert f"status 403 (asked for client {where})" in server.log
    assert f"AUTH: client({where}) was not let in" in server.log
    client.close()
    authority.reply = 200, reply(60)
    client = login(server, b"nobody")
    where = "{}:{}".format(*client.sock.getsockname())
    assert client.frame() == (ERROR, b"E_UNAUTHORIZED AUTH no authorizations found")
    assert f"AUTH: client({where}) has no authorisations" in server.log
    client.close()


def test_an_identity_that_no_utf8_can_say(start: Start, authority: Authority) -> None:
    server = start(authority.flag)
    authority.reply = 200, reply(60, rule(), identity="a\ud800b")
    client = login(server, b"s")
    answer = client.frame()
    assert answer is not None
    assert json.loads(answer[1])["identity"] == "a\ufffdb"
    client.close()


class Questions:
    """Calls for `Pool` that end when they are let."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ends: dict[str, threading.Event] = {}

    def ask(self, name: str) -> Callable[[], str]:
        self._ends[name] = threading.Event()

        def call() -> str:
            self.begun.append(name)
            self._ends[name].wait(WATCHDOG)
            return name

        return call

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    def end_all(self) -> None:
        self.end(*self._ends)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what threads do."""
    async with asyncio.timeout(WATCHDOG):
        while not condition():
            await asyncio.sleep(0.001)


def test_an_address_has_its_share() -> None:
    async def scene() -> None:
        logins, questions = Pool("login", THREADS, PER_ADDRESS), Questions()
        names = [f"a{number}" for number in range(PER_ADDRESS + 3)]
        futures = [logins.ask("a", questions.ask(name)) for name in names]
        await until(lambda: len(questions.begun) == PER_ADDRESS)
        other = logins.ask("b", questions.ask("b"))
        await until(lambda: "b" in questions.begun)
        assert set(questions.begun) == {*names[:PER_ADDRESS], "b"}
        questions.end("b")
        assert await other == "b"
        futures[PER_ADDRESS].cancel()  # its client has gone: it is left out
        questions.end(names[0])
        await until(lambda: names[PER_ADDRESS + 1] in questions.begun)
        assert names[PER_ADDRESS] not in questions.begun
        questions.end_all()
        await asyncio.wait(futures)
        assert names[PER_ADDRESS] not in questions.begun
        logins.close()

    asyncio.run(scene())


def test_addresses_have_their_turns() -> None:
    """If a few hosts occupy all threads, a client from another host is next, not last."""

    async def scene() -> None:
        logins, questions = Pool("login", THREADS, PER_ADDRESS), Questions()
        crowd = [f"{number % 4}-{number}" for number in range(THREADS + 40)]
        futures = [logins.ask(name[0], questions.ask(name)) for name in crowd]
        await until(lambda: len(questions.begun) == THREADS)
        futures.append(logins.ask("b", questions.ask("b")))
        questions.end(questions.begun[0])
        await until(lambda: len(questions.begun) > THREADS)
        assert questions.begun[THREADS:] == ["b"]
        questions.end_all()
        assert sorted(await asyncio.gather(*futures)) == sorted([*crowd, "b"])
        logins.close()

    asyncio.run(scene())


def test_an_error_reaches_who_asked() -> None:
    async def scene() -> None:
        logins = Pool("login", THREADS, PER_ADDRESS)

        def fail() -> None:
            raise ValueError("so")

        with pytest.raises(ValueError, match="so"):
            await logins.ask("a", fail)
        logins.close()

    asyncio.run(scene())


def test_a_pattern_cannot_run_away() -> None:
    """A pattern that would take a backtracking library for ever is answered at once: a name has up
    to 64 characters."""
    grant = auth.grant_of(reply(60, rule(topic="^([a-z]+_?)+$")), 0.0)
    before = time.process_time()
    assert not grant.allows("publish", "a" * 63 + ".", "")
    assert grant.allows("publish", "a" * 63, "")
    assert time.process_time() - before < 1
    assert not grant.allows("subscribe", "a" * 63 + ".", "c")


@pytest.mark.parametrize(
    "item",
    [
        "text",
        {"topic": 5},
        {"topic": ["t"]},
        {"channels": "c"},
        {"channels": [5]},
        {"permissions": "publish"},
        {"permissions": ["own"]},
        {"permissions": [["publish"]]},
    ],
)
def test_replies_that_let_nobody_in(item: object) -> None:
    with pytest.raises(auth.Refused):
        auth.grant_of(reply(60, item), 0.0)
