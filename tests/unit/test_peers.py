"""One request of HTTP to a server that means harm: it ends at its deadline, within its bounds."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest
from support.hostile import Hostile, drip, flood, page, wrong_texts
from support.processes import eventually

from shmq.errors import ShmqError
from shmq.gateway import auth
from shmq.options import Options
from shmq.peers import documents, http, sockets
from shmq.peers.documents import BadAnswer
from shmq.spark import hosts

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def answered(*pieces: bytes, then: Callable[[socket.socket], None] | None = None) -> Hostile:
    """A server that reads a request, sends these, and goes on with `then`."""

    def serve(sock: socket.socket) -> None:
        sock.recv(65536)
        for piece in pieces:
            sock.sendall(piece)
        if then is not None:
            then(sock)

    return Hostile(serve)


def ask(server: Hostile, seconds: float = 20.0, most: int = 1 << 20) -> http.Answer:
    return http.ask(f"http://{server.address}/x", time.monotonic() + seconds, most=most)


DRIPS = {
    "status line": b"",
    "header names": HEAD,
    "early answers": b"HTTP/1.1 100 Continue\r\n\r\n",
    "a body with its length": HEAD + b"Content-Length: 100000\r\n\r\n",
    "a body to the end": HEAD + b"\r\n",
    "the size of a chunk": CHUNKED,
    "a chunk": CHUNKED + b"fffff\r\n",
    "trailers": CHUNKED + b"0\r\n",
}


@pytest.mark.parametrize("place", DRIPS)
def test_an_answer_that_drips_ends_at_the_deadline(place: str) -> None:
    """Each byte comes in time, so a timeout for each read would never end it. A trickle of good
    bytes cannot hold the thread either: the server sees its connection end."""
    byte = b"1" if place == "the size of a chunk" else b"a"
    with answered(DRIPS[place], then=lambda sock: drip(sock, byte, 0.01)) as server:
        with pytest.raises(TimeoutError):
            ask(server, seconds=0.3)
        eventually(lambda: server.open == 0)


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"X: y\r\n" * 100_000,
        HEAD + b"X: " + b"y" * (1 << 20),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000,
        CHUNKED + b"0\r\n" + b"X: y\r\n" * 100_000,
        b"x" * (1 << 20),
        CHUNKED + b"f" * 100,
        CHUNKED + b"1;" + b"x" * 10_000,
        CHUNKED + b"-1\r\n",
        CHUNKED + b"1\r\nxx",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b" folded: y\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/0.9\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_a_head_without_bounds_is_no_answer(sent: bytes) -> None:
    with answered(sent, then=lambda sock: flood(sock, sent[-6:])) as server:
        with pytest.raises(
            (http.NotHttp, ConnectionError, TimeoutError), match=r"^(?!there was no)"
        ):
            ask(server)
        eventually(lambda: server.open == 0)


@pytest.mark.parametrize(
    "sent",
    [HEAD + b"\r\n", HEAD + b"Content-Length: 99999999999\r\n\r\n", CHUNKED + b"ffffffffff\r\n"],
)
def test_a_body_without_end_is_cut(sent: bytes) -> None:
    with answered(sent, then=lambda sock: flood(sock, b"x" * 65536)) as server:
        with pytest.raises(http.TooLong):
            ask(server)
        eventually(lambda: server.open == 0)


def test_right_answers_are_read() -> None:
    chunked = CHUNKED + b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nT: r\r\n\r\n"
    for sent in (page(b"abcde"), HEAD + b"\r\nabcde", chunked, b"HTTP/1.0 200\r\n\r\nabcde"):
        with answered(b"HTTP/1.1 100 Continue\r\n\r\n", sent) as server:
            assert ask(server).body == b"abcde"


def test_a_target_that_a_peer_has_named_begins_no_line_of_its_own() -> None:
    with answered(page(b"")) as server:
        with pytest.raises(ValueError, match="cannot be asked"):
            http.ask(f"http://{server.address}/a b", time.monotonic() + 5, most=1)
        for url in ("file:///etc/passwd", "http://", "ftp://x/", "http://h:99999/"):
            with pytest.raises(ValueError, match=r"."):
                http.ask(url, time.monotonic() + 5, most=1)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"NaN",
        b'{"a":Infinity}',
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"\xff",
        b"{",
    ],
)
def test_what_is_no_json_is_a_bad_answer(sent: bytes) -> None:
    with pytest.raises(BadAnswer):
        documents.parsed(sent)


# ---- TLS ----


def test_a_handshake_that_drips_ends_at_the_deadline() -> None:
    """A record of TLS that says it has 16 KiB, byte by byte."""
    with answered(b"\x16\x03\x03\x40\x00", then=lambda sock: drip(sock, b"\x02", 0.01)) as server:
        with pytest.raises(OSError, match=r"."):
            http.ask(f"https://localhost:{server.port}/", time.monotonic() + 0.5, most=1)
        eventually(lambda: server.open == 0)


def test_bytes_before_tls_are_an_error() -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(ShmqError, match="3 bytes came before TLS"):
        sockets.secured(
            near, ssl.create_default_context(), "h", time.monotonic() + 5, held=b"abc", peer="h:1"
        )


# ---- authorisation servers ----


def options(**more: object) -> Options:
    return Options(
        http_client_connect_timeout=0.5,
        http_client_request_timeout=0.5,
        **more,  # type: ignore[arg-type]
    )


def login(server: Hostile) -> object:
    try:
        return auth.query(
            options(auth_http_address=[f"http://{server.address}/auth"]),
            client="c",
            remote_ip="127.0.0.1",
            tls=False,
            common_name="",
            secret="s",
        )
    except OSError:  # no valid reply
        return None


def test_redirects_without_end_have_one_deadline() -> None:
    """Each is answered slowly, but in time."""

    def serve(sock: socket.socket) -> None:
        sock.recv(65536)
        time.sleep(0.4)
        sock.sendall(page(b"", b"HTTP/1.1 302 Found\r\nLocation: /again\r\n"))

    with Hostile(serve) as server:
        assert login(server) is None
        assert server.met <= 3


@pytest.mark.parametrize(
    "place", ["http:///etc/passwd", "file:///etc/passwd", "//\x1b[31m", "/a\tb"]
)
def test_a_redirect_to_nowhere_is_refused(place: str) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: {place}\r\n".encode()
    with answered(page(b"", head)) as server:
        assert login(server) is None


def test_a_secret_does_not_leave_tls_by_a_redirect() -> None:
    with pytest.raises(auth.Refused, match="not encrypted"):
        auth._next("https://a/auth?secret=s", "http://b/auth?secret=s")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"ttl":1e999}',
        b'{"ttl":NaN}',
        b'{"ttl":' + b"9" * 4000 + b',"authorizations":[{"topic":7}]}',
        b'{"ttl":60,"authorizations":[' + b'{"topic":"a"},' * 9000 + b'{"topic":"a"}]}',
        b'{"ttl":60,"authorizations":[{"topic":"a","channels":[' + b'"",' * 90000 + b'""]}]}',
        b'{"ttl":60,"authorizations":[{"topic":"' + b"a" * 5000 + b'"}]}',
        b'{"ttl":60,"identity":"' + b"a" * 5000 + b'"}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_reply_that_is_too_much_lets_nobody_in(body: bytes) -> None:
    with answered(page(body)) as server:
        assert login(server) is None


def test_a_grant_for_ever_has_an_end() -> None:
    assert auth.grant_of(b'{"ttl":' + b"9" * 4000 + b"}", 0.0).expires < 1e10


def test_threads_of_slow_servers_end() -> None:
    """At the deadline of the request, whatever the server still sends."""
    before = threading.active_count()
    with answered(DRIPS["header names"], then=lambda sock: drip(sock, b"a", 0.01)) as server:
        for _ in range(3):
            assert login(server) is None
        eventually(lambda: server.open == 0)
    eventually(lambda: threading.active_count() <= before)


# ---- nsqlookupds of Spark ----


def known(server: Hostile) -> list[str]:
    return hosts.known_to_lookupd([f"http://{server.address}"], "t")


def test_one_wrong_instance_costs_no_other() -> None:
    right = {"broadcast_address": "db-7", "tcp_port": 4150}
    wrong = [7, {}, {**right, "tcp_port": "x"}, {**right, "broadcast_address": "/run/x\x1b[31m"}]
    body = json.dumps({"producers": [*wrong, right]}).encode()
    with answered(page(body)) as server:
        assert known(server) == ["db-7:4150"]


WRONG = list(wrong_texts({"producers": []}))


@pytest.mark.parametrize("body", WRONG, ids=lambda body: repr(body[:20]))
def test_answers_of_wrong_types_are_errors_of_shmq(body: bytes) -> None:
    with answered(page(body)) as server:
        try:
            assert known(server) == []
        except ShmqError as exc:
            assert str(exc).isprintable()  # noqa: PT017


def test_a_nsqlookupd_of_spark_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_LOOKUPD_SECONDS", 0.3)
    with answered(HEAD, then=lambda sock: drip(sock, b"a", 0.01)) as server:
        with pytest.raises(ShmqError, match="no nsqlookupd answers"):
            known(server)
        eventually(lambda: server.open == 0)
