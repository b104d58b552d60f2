"""HTTP clients that publish with the same head again and again: it is parsed once, and each answer
is what it would be if the head was parsed each time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.nsq_client import Client, Server
from support.processes import WATCHDOG
from support.secrets import write_secret

import shmq
from shmq.gateway import http_messages, http_server
from shmq.gateway.access import Listener

Publish = Callable[[Server], "Publisher"]

TOKEN = "0123456789abcdef"
PIECES = [
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\n\r\nlonger hello",
    b"POST /pub?topic=b HTTP/1.1\r\nHost: h\r\ncontent-length:1\r\nConnection: Keep-Alive\r\n\r\nx",
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nContent-Length: 05\r\n\r\nhello",
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nContent-Length: 36\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n",
    b"\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    b"\r\n",
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
    b"POST /pub?topic=a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
    b"POST /pub?topic=a HTTP/1.0\r\nContent-Length: 1\r\n\r\nx",
]


@pytest.fixture(scope="session")
def kind() -> str:
    """Nothing of this is nsqd's."""
    return "shmq"


class Wire(asyncio.Transport):
    """A transport that keeps the bytes a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.said += bytes(data)

    def writelines(self, pieces: Any) -> None:
        self.said += b"".join(pieces)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Talk:
    """One client of a server that remembers heads, or of one that does not."""

    def __init__(self, remembers: bool = True) -> None:
        self.remembers = remembers
        self.parsed = 0
        self.bodies: list[bytes] = []
        listener = Listener(secure=False, local=True, unix=False)
        self.wire = Wire()
        server = http_server.Server(self._handle, listener, self._unparsed)
        self.connection = server()
        self._publish_known = self.connection._publish
        self.connection._publish = self._split  # type: ignore[method-assign]
        self.pieces: list[bytes] = []
        self.connection.connection_made(self.wire)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.parsed += 1
        self.connection.again = None
        body = await http_messages.read_body(request, 100, "MSG_TOO_BIG")
        if not body:
            return http_messages.failure(400, "MSG_EMPTY")
        self._publish(body)
        if self.remembers:
            self.connection.again = http_server.Again(self._publish)
        return http_messages.reply_of("OK", nsq=True)

    def _split(self, data: bytes) -> bytes:
        """Note which requests the server knew."""
        rest = self._publish_known(data)
        self.pieces[-1:] = [piece for piece in (data[: len(data) - len(rest)], rest) if piece]
        return rest

    def _publish(self, body: bytes) -> bool:
        self.bodies.append(body)
        return True

    def _unparsed(self, method: str, target: str) -> web.StreamResponse:
        return http_messages.failure(404, "NOT_FOUND")

    async def send(self, data: bytes) -> None:
        """Also let the server do all that it does at once."""
        if not self.wire.closed:
            self.pieces.append(data)
            self.connection.data_received(data)
        for _ in range(12):
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def said(self) -> bytes:
        return re.sub(rb"Date: [^\r]*", b"Date:", self.wire.said)


def talked(pieces: list[bytes], remembers: bool = True) -> Talk:
    """Of a client that sends the pieces."""

    async def talking() -> Talk:
        talk = Talk(remembers)
        for piece in pieces:
            await talk.send(piece)
        await talk.end()
        return talk

    return asyncio.run(talking())


def compared(pieces: list[bytes]) -> Talk:
    """The pieces lead to the same, whatever the server remembers. aiohttp forgets the
    requests before a wrong one in the same piece; those that are known were answered before."""
    ours = talked(pieces)
    plain = talked(ours.pieces, remembers=False)
    assert ours.said == plain.said, pieces
    assert (ours.bodies, ours.wire.closed) == (plain.bodies, plain.wire.closed), pieces
    return ours


def test_a_head_is_parsed_once() -> None:
    talk = compared([PIECES[0], PIECES[1], PIECES[0] + PIECES[1], PIECES[2], PIECES[2], PIECES[0]])
    assert len(talk.bodies) == 7
    assert talk.parsed == 2
    cut = [PIECES[1][:-1], PIECES[1][-1:]]  # parsed again; it is remembered once
    assert compared([PIECES[0], *cut * 200, PIECES[2], PIECES[2]]).parsed == 202


def test_a_request_may_be_cut_anywhere() -> None:
    whole = PIECES[1]
    for cut in range(1, len(whole)):
        talk = compared([PIECES[0], whole[:cut], whole[cut:], whole])
        assert talk.bodies[1:] == [b"longer hello"] * 2
        # the end of the head is in the first piece, or nothing is known of where a request ends
        head = cut >= len(whole) - len(b"longer hello")
        assert (talk.parsed == 2) == head, cut


def test_other_requests_between_are_parsed() -> None:
    for other in PIECES[3:]:
        compared([PIECES[0], other, PIECES[0], PIECES[0] + other, PIECES[0]])
    talk = compared([PIECES[0], PIECES[6], PIECES[0], PIECES[4], PIECES[0]])
    assert talk.parsed == 3


def test_a_body_that_looks_like_a_known_request_is_a_body() -> None:
    for before in (b"", PIECES[0], PIECES[2], PIECES[6], PIECES[8]):
        talk = compared([PIECES[0], before + PIECES[5], PIECES[0], PIECES[0]])
        assert PIECES[0][:36] in talk.bodies


def test_random_input_is_answered_as_ever() -> None:
    """Requests that are known, nearly known or none, cut and joined anywhere."""
    chance = random.Random(4)
    for _ in range(100):
        stream = b"".join([PIECES[0], *chance.choices(PIECES, k=chance.randrange(1, 8))])
        if chance.random() < 0.5:
            at = chance.randrange(len(PIECES[0]), len(stream))
            stream = (
                stream[:at]
                + chance.choice([b"\r", b"\n", b"0", b"\0", b":", b"7"])
                + stream[at + 1 :]
            )
        cuts = chance.sample(range(1, len(stream)), chance.randrange(0, 6))
        ends = sorted({len(PIECES[0]), *cuts, len(stream)})
        compared([stream[start:end] for start, end in zip([0, *ends], ends, strict=False)])


def test_publishing_counts_as_a_sign_of_life() -> None:
    """aiohttp ends a connection whose last request is too long ago."""

    async def main() -> None:
        talk = Talk()
        await talk.send(PIECES[0])
        talk.connection._next_keepalive_close_time = 0.0
        await talk.send(PIECES[0])
        assert talk.parsed == 1
        loop = asyncio.get_running_loop()
        assert talk.connection._next_keepalive_close_time > loop.time()
        talk.connection._process_keepalive()
        assert not talk.wire.closed
        await talk.end()

    asyncio.run(main())


def test_a_client_that_reads_nothing_is_waited_for() -> None:
    async def main() -> None:
        talk = Talk()
        await talk.send(PIECES[0])
        talk.connection.pause_writing()
        await talk.send(PIECES[0])
        await talk.send(PIECES[0])
        assert talk.parsed == 2
        talk.connection.resume_writing()
        await talk.send(b"")
        assert len(talk.bodies) == 3
        await talk.end()

    asyncio.run(main())


# ---- with a broker ----


class Publisher:
    """One connection that stays open."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port("http"), WATCHDOG)
        self.close = self._connection.close
        self.headers = {"Authorization": f"Bearer {TOKEN}"}

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", path, body, self.headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()


@pytest.fixture
def publish() -> Iterator[Callable[[Server], Publisher]]:
    """`publish(server)`: a publisher of that server."""
    with contextlib.ExitStack() as made:
        yield lambda server: made.enter_context(contextlib.closing(Publisher(server)))


def test_what_is_published_again_is_kept(
    server: Server, connect: Callable[[], Client], publish: Publish, topic: str
) -> None:
    publisher, client = publish(server), connect()
    client.sub(topic, "c", 100)
    two = b"\0\0\0\2\0\0\0\1x\0\0\0\1y"
    for _ in range(3):
        assert publisher.post(f"/pub?topic={topic}", b"one") == (200, b"OK")
        assert publisher.post(f"/mpub?topic={topic}&binary=true", two) == (200, b"OK")
    assert publisher.post(f"/mpub?topic={topic}&binary=true", two[:-1])[0] == 413
    assert publisher.post(f"/pub?topic={topic}&defer=1", b"late") == (200, b"OK")
    assert publisher.post(f"/pub?topic={topic}&defer=1", b"late") == (200, b"OK")
    found = [client.delivery() for _ in range(11)]
    assert [one.body for one in found] == [b"one", b"x", b"y"] * 3 + [b"late"] * 2
    for one in found:
        client.finish(one)
    assert publisher.post(f"/pub?topic={topic}", b"x" * (1 << 20) + b"x")[1] == (
        b'{"message":"MSG_TOO_BIG"}'
    )


def test_a_topic_that_was_deleted_is_created_again(
    server: Server, publish: Publish, topic: str
) -> None:
    publisher = publish(server)
    for _ in range(3):
        for _ in range(3):
            assert publisher.post(f"/pub?topic={topic}", b"x") == (200, b"OK")
        assert server.topic(topic)["message_count"] == 3
        with shmq.attach(server.instance) as broker:  # the gateway does not know of it
            broker.delete_topic(topic)


def test_a_change_of_the_options_counts_at_once(
    start: Callable[..., Server], publish: Publish, tmp_path: Path
) -> None:
    """A token that was taken away opens nothing more, and a limit holds."""
    tokens = tmp_path / "tokens"
    write_secret(tokens, f"{TOKEN}\n")
    tokens.chmod(0o600)
    server = start(f"--http-token-file={tokens}", "--gateway-workers=1")
    publisher = publish(server)
    for _ in range(3):
        assert publisher.post("/pub?topic=t", b"x") == (200, b"OK")
    tokens.write_text(f"{TOKEN[::-1]}\n")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert server.http("PUT", "/config/log_level", b"debug", **headers).status == 200
    assert publisher.post("/pub?topic=t", b"x")[0] == 401
    publisher.headers = {"Authorization": f"Bearer {TOKEN[::-1]}"}
    assert publisher.post("/pub?topic=t", b"x") == (200, b"OK")
    assert server.topic("t")["message_count"] == 4
