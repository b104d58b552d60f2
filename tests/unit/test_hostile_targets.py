"""`shmq forward` with a server that means harm: NATS, and all that speaks nsqd's protocol."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.certificates import of_this_host
from support.hostile import EVIL, Hostile, drip, evil_in, flood, frame, wrong_texts
from support.processes import eventually

from shmq.errors import ShmqError
from shmq.forward import nats_connection, nsqd
from shmq.forward.jetstream import JetStream
from shmq.forward.jetstream_origin import JetStreamOrigin
from shmq.forward.login import NatsLogin
from shmq.forward.marker import Marker
from shmq.forward.nats_connection import NatsConnection
from shmq.forward.nsqd import Nsqd
from shmq.forward.origin import Sink
from shmq.forward.target import Away, Source
from shmq.peers.documents import BadAnswer

ERRORS = (Away, BadAnswer, ShmqError)
EVIL_LINE = EVIL.replace("\r\n", "").encode("utf-8", "replace")
INFO = {"headers": True, "version": "2.12.0", "max_payload": 1 << 20}


def line(document: Any) -> bytes:
    return b"INFO " + json.dumps(document).encode() + b"\r\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_connection, "_TIMEOUT", 0.4)
    monkeypatch.setattr(nsqd, "_TIMEOUT", 0.4)


class Nats:
    """A NATS server. greeting: its first bytes. api: what it sends when it is asked; from the
    question's verb to the JSON of the answer, or bytes of the protocol."""

    def __init__(self) -> None:
        self.greeting = line(INFO)
        self.pong = b"PONG\r\n"
        self.api: Callable[[str], bytes] = lambda verb: b"{}"
        self.raw: bytes | Callable[[socket.socket], None] | None = None
        self.got: list[bytes] = []
        self.server = Hostile(self._serve)
        self.servers = [("127.0.0.1", self.server.port)]

    def _serve(self, sock: socket.socket) -> None:
        sock.sendall(self.greeting)
        file = sock.makefile("rb")
        while found := file.readline():
            self.got.append(found)
            words = found.split()
            if words[:1] == [b"PING"]:
                sock.sendall(self.pong)
            elif words[:1] in ([b"PUB"], [b"HPUB"]):
                file.read(int(words[-1]) + 2)
                if callable(self.raw):
                    self.raw(sock)
                elif self.raw is not None:
                    sock.sendall(self.raw)
                else:
                    verb = ".".join(words[1].decode().split(".")[2:4])
                    body = self.api(verb)
                    sock.sendall(b"MSG %b 1 %d\r\n%b\r\n" % (words[2], len(body), body))

    def connect(self, login: NatsLogin | None = None) -> NatsConnection:
        return NatsConnection(self.servers, login or NatsLogin({}))


@pytest.fixture
def nats() -> Iterator[Nats]:
    made = Nats()
    yield made
    made.server.close()


@pytest.mark.parametrize("body", list(wrong_texts(INFO)), ids=lambda body: repr(body[:24]))
def test_a_greeting_of_wrong_types_is_an_error(nats: Nats, body: bytes) -> None:
    nats.greeting = b"INFO " + body + b"\r\n"
    try:
        nats.connect().close()
    except ERRORS as exc:
        assert not evil_in(str(exc))  # noqa: PT017


@pytest.mark.parametrize(
    "greeting",
    [
        b"-ERR 'authorization " + EVIL_LINE + b"'\r\n",
        b"-ERR '" + EVIL_LINE + b"'\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"x" * 600_000,
        b"PING\r\n" * 5,
        b"",
    ],
    ids=lambda greeting: repr(greeting[:12]),
)
def test_a_greeting_that_is_none_is_an_error(nats: Nats, greeting: bytes) -> None:
    nats.greeting = greeting
    with pytest.raises(ERRORS) as found:
        nats.connect()
    assert not evil_in(str(found.value))


@pytest.mark.parametrize("sent", [b"PING\r\n", b"INFO {}\r\n", b"+OK\r\n", b"-", b""])
def test_lines_without_end_are_given_up(nats: Nats, sent: bytes) -> None:
    nats.connect().close()

    def serve(sock: socket.socket) -> None:
        sock.sendall(nats.greeting)
        if sent == b"":
            drip(sock, b"MSG x 1 1", 0.01)
        flood(sock, sent)

    nats.server.serve = serve
    with pytest.raises(ERRORS):
        nats.connect()
    eventually(lambda: nats.server.open == 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"MSG x 1 999999999999\r\n",
        b"MSG x 1 " + b"9" * 5000 + b"\r\n",
        b"MSG x 1 -1\r\n",
        b"MSG x 1 1e3\r\n",
        b"MSG x 1 99999999\r\n",
        b"HMSG x 1 5 99999999\r\n",
        b"HMSG x 1 99 5\r\n12345\r\n",
        b"HMSG x 1 x 5\r\n12345\r\n",
        b"MSG\r\n",
        b"MSG x 1 2\r\nabcd\r\n",
        b"HMSG x\r\n",
    ],
    ids=lambda sent: repr(sent[:24]),
)
def test_a_message_of_a_false_length_is_not_read(nats: Nats, sent: bytes) -> None:
    nats.raw = lambda sock: (sock.sendall(sent), flood(sock, b"z" * 65536))[0]  # type: ignore[func-returns-value]
    connection = nats.connect()
    tracemalloc.start()
    with pytest.raises(ERRORS):
        connection.ask("$JS.API.INFO", {})
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    connection.close()


def test_what_the_server_says_of_itself_does_not_raise_the_bound(nats: Nats) -> None:
    nats.greeting = line({**INFO, "max_payload": 10**15})
    connection = nats.connect()
    assert connection.max_payload == 64 << 20
    connection.close()


def test_words_without_end_about_the_server_are_not_kept(nats: Nats) -> None:
    nats.pong = (
        b"".join(line({f"x{k}": "y", "max_payload": k}) for k in range(1, 101)) + b"PONG\r\n"
    )
    connection = nats.connect()
    assert connection.info == {**INFO, "max_payload": 100}
    connection.close()


STREAM = {"config": {"allow_atomic": True, "subjects": ["t", "shmq.>"], "retention": "limits"}}
MARKER = json.dumps({"v": 1, "source": "s", "identity": "i", "lease": 1, "messages": 0})


def answers(verb: str) -> Any:
    if verb == "STREAM.INFO":
        return {**STREAM, "created": "2026", "state": {"last_seq": 5}}
    if verb == "CONSUMER.LIST":
        each = {"name": "shmq-1", "config": {"opt_start_seq": 1, "metadata": {"shmq": "h/i/t"}}}
        return {"consumers": [{**each, "ack_floor": {"stream_seq": 1}}], "total": 1}
    return {}


@pytest.mark.parametrize("verb", ["STREAM.INFO", "STREAM.MSG", "STREAM.PURGE"])
def test_answers_of_wrong_types_to_the_target(nats: Nats, verb: str) -> None:
    right = answers(verb) or {"message": {"seq": 1, "data": "e30K"}, "error": {"code": 1}}
    target = JetStream(nats.servers, NatsLogin({}), "S", Source("h", "i", "t", "c"), {})
    for body in wrong_texts(right):
        nats.api = lambda asked, body=body: (  # type: ignore[misc]
            body if asked == verb else json.dumps(answers(asked)).encode()
        )
        try:
            target.open()
            target.send([b"x"], Marker("s", "i", 1, (1,), ()))
            target.confirm()
        except ERRORS as exc:
            assert not evil_in(str(exc))  # noqa: PT017
        target.close()


@pytest.mark.parametrize("verb", ["STREAM.INFO", "CONSUMER.LIST", "CONSUMER.DURABLE"])
def test_answers_of_wrong_types_to_the_origin(nats: Nats, verb: str) -> None:
    right = answers(verb) or {"error": {"code": 404}}
    sink = Sink("h", "i", "t")
    origin = JetStreamOrigin(nats.servers, NatsLogin({}), "S", {"consumer": "shmq"}, sink)
    for body in wrong_texts(right):
        nats.api = lambda asked, body=body: (  # type: ignore[misc]
            body if asked == verb else json.dumps(answers(asked)).encode()
        )
        try:
            origin.open(lambda lane: 0)
        except ERRORS as exc:
            assert not evil_in(str(exc))  # noqa: PT017
        origin.close()


def test_a_list_without_end_is_given_up(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmq.forward.jetstream_origin._MOST_CONSUMERS", 50)
    nats.api = lambda verb: json.dumps(
        {**answers(verb), **({"total": 2**60} if verb == "CONSUMER.LIST" else {})}
    ).encode()
    sink = Sink("h", "i", "t")
    origin = JetStreamOrigin(nats.servers, NatsLogin({}), "S", {"consumer": "other"}, sink)
    with pytest.raises(Away, match="more than 50"):
        origin.open(lambda lane: 0)
    origin.close()


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return of_this_host(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize(
    "more", [b"PONG\r\n", b"PING\r\n", b"INFO {}\r\n", b"-ERR 'x'\r\n", b"x"], ids=repr
)
def test_bytes_behind_the_greeting_are_not_taken_as_if_from_inside(
    nats: Nats, certificate: tuple[str, str], more: bytes
) -> None:
    nats.greeting = line({**INFO, "tls_required": True}) + more
    with pytest.raises(ShmqError, match="came before TLS"):
        nats.connect(NatsLogin({"ca": certificate[0]}))


def test_the_greeting_before_tls_is_not_believed(nats: Nats, certificate: tuple[str, str]) -> None:
    """It says that the server takes one byte, and is old. Inside it says nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    def serve(sock: socket.socket) -> None:
        sock.sendall(line({"tls_required": True, "max_payload": 1, "headers": False}))
        with context.wrap_socket(sock, server_side=True) as secure:
            while b"PING" not in secure.recv(4096):
                pass
            secure.sendall(b"PONG\r\n")
            secure.recv(1)

    nats.server.serve = serve
    connection = nats.connect(NatsLogin({"ca": certificate[0]}))
    assert connection.max_payload == 64 << 20
    assert connection.likely_payload == 1 << 20
    connection.close()


@pytest.mark.parametrize(
    "login", [{"password": "hidden", "user": "u", "ca": "x"}, {"token": "hidden"}]
)
def test_no_secret_is_sent_where_tls_was_asked_for_and_denied(
    nats: Nats, certificate: tuple[str, str], login: dict[str, str]
) -> None:
    """A certificate in the login asks for TLS, and so does tls:// in the address."""
    if "ca" in login:
        login["ca"] = certificate[0]
    with pytest.raises(ERRORS):
        nats.connect(NatsLogin(login, secure="ca" not in login))
    assert b"hidden" not in b"".join(nats.got)


# ---- nsqd ----


def target(serve: Callable[[socket.socket], None]) -> tuple[Nsqd, Hostile]:
    server = Hostile(serve)
    return Nsqd("127.0.0.1", server.port, "t"), server


@pytest.mark.parametrize(
    "sent",
    [
        frame(1, b"E_BAD " + EVIL.encode("utf-8", "replace")),
        frame(1, EVIL.encode("utf-8", "replace")),
        frame(0, b"NO"),
        frame(2, b"OK"),
        frame(7, b"OK"),
        struct.pack(">ii", (1 << 31) - 1, 0),
        struct.pack(">ii", -1, 0),
        b"HTTP/1.1 200 OK\r\n\r\n",
        frame(0, b"_heartbeat_"),
        b"",
    ],
    ids=lambda sent: repr(sent[:20]),
)
def test_an_answer_that_is_not_ok_confirms_nothing(sent: bytes) -> None:
    def serve(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(frame(0, b"OK"))
        sock.recv(65536)
        if sent == frame(0, b"_heartbeat_"):
            flood(sock, sent)
        sock.sendall(sent)
        time.sleep(0.1)

    to, server = target(serve)
    with server:
        to.open()
        to.send([b"x"], Marker("s", "i", 1, (1,), ()))
        with pytest.raises(ERRORS) as found:
            to.confirm()
        assert not evil_in(str(found.value))
        to.close()


def test_an_answer_that_drips_is_given_up() -> None:
    to, server = target(lambda sock: drip(sock, struct.pack(">ii", 5000, 0) + b"x" * 4996, 0.01))
    with server:
        with pytest.raises(Away, match="in time"):
            to.open()
        to.close()
        eventually(lambda: server.open == 0)


def test_a_heartbeat_is_no_confirmation() -> None:
    """It is answered, and what comes behind it counts."""
    answered = threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(frame(0, b"_heartbeat_"))
        if sock.recv(4) == b"NOP\n":
            answered.set()
        sock.sendall(frame(0, b"OK"))
        sock.recv(1)

    to, server = target(serve)
    with server:
        to.open()
        assert answered.is_set()
        to.close()
