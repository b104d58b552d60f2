"""TLS handshakes that fail, and certificates that are no user's, at a real gateway: they are
counted, logged once for each address, and cost it only so much."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from support.access import File
from support.certificates import Pki, context_of
from support.nsq_client import Server
from support.processes import WATCHDOG, eventually

import shmq
from shmq.errors import Unauthorized

Start = Callable[..., Server]

TOKEN = "a-token-that-nobody-can-guess-0123456789"


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours counts them."""
    return "shmq"


@pytest.fixture
def secured(start: Start, file: File, pki: Pki, tmp_path: Path) -> Server:
    """It asks for certificates; one of them is a user's. Statistics have a door of their own."""
    file.write(
        "[users.scanner]\ncertificate = 'CN=scanner,O=Acme'\nallow = [{ do = ['publish'] }]\n"
        f"[users.more]\ntoken = '{TOKEN}'\nallow = [{{ do = ['all'] }}]\n"
    )
    cert, key = pki["server"]
    return start(
        file.flag,
        f"--tls-cert={cert}",
        f"--tls-key={key}",
        f"--tls-root-ca-file={pki['authority'][0]}",
        "--tls-client-auth-policy=require-verify",
        "--tls-required=tcp-https",
        "--https-address=127.0.0.1:0",
        "--gateway-workers=1",
        status=200,
    )


def figure(server: Server, name: str) -> int:
    answer = server.http("GET", "/metrics", Authorization=f"Bearer {TOKEN}")
    found = re.search(rf"^shmq_gateway_{name}_total\{{.*\}} (\d+)$", answer.body.decode(), re.M)
    assert found is not None, answer
    return int(found[1])


def over_tcp(server: Server, pki: Pki, name: str, source: str = "127.0.0.1") -> None:
    """Have a TLS connection of the TCP protocol with this certificate, and nothing more."""
    sock = socket.create_connection(("127.0.0.1", server.port()), WATCHDOG, (source, 0))
    with contextlib.closing(sock):
        body = b'{"feature_negotiation":true,"tls_v1":true}'
        sock.sendall(b"  V2IDENTIFY\n" + len(body).to_bytes(4, "big") + body)
        size = int.from_bytes(_read(sock, 4), "big")
        _read(sock, size)
        _shake(sock, pki, name)


def over_https(server: Server, pki: Pki, name: str, source: str = "127.0.0.1") -> None:
    """The same at the port of HTTPS."""
    where = ("127.0.0.1", server.port("https"))
    with contextlib.closing(socket.create_connection(where, WATCHDOG, (source, 0))) as sock:
        _shake(sock, pki, name)


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more
        data += more
    return data


def _shake(sock: socket.socket, pki: Pki, name: str) -> None:
    """The server's refusal comes with the first read: in TLS 1.3 the client is done before."""
    context = context_of(pki, name)
    with context.wrap_socket(sock, server_hostname="127.0.0.1") as secure:
        secure.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not secure.recv(1):
            raise ConnectionResetError


WAYS = pytest.mark.parametrize("way", [over_tcp, over_https])


@WAYS
def test_each_is_counted_and_an_address_is_logged_once(
    secured: Server, pki: Pki, way: Callable[..., None]
) -> None:
    way(secured, pki, "scanner")
    assert figure(secured, "handshakes_failed") == 0
    for source, name in (("127.0.0.1", "forged"), ("127.0.0.1", ""), ("127.0.0.2", "forged")):
        for _ in range(3):
            with pytest.raises((ssl.SSLError, OSError)):
                way(secured, pki, name, source)
    assert figure(secured, "handshakes_failed") == 9
    assert figure(secured, "handshakes_refused") == 0
    for source in ("127.0.0.1", "127.0.0.2"):
        assert secured.log.count(f"TLS: no handshake with {source}:") == 1
    assert "failed to verify certificate" in secured.log


@WAYS
def test_an_address_that_fails_without_end_is_refused_before_it_costs_anything(
    secured: Server, pki: Pki, way: Callable[..., None]
) -> None:
    attempts = 200
    for _ in range(attempts):
        with pytest.raises((ssl.SSLError, OSError)):
            way(secured, pki, "forged")
    failed, refused = (figure(secured, f"handshakes_{what}") for what in ("failed", "refused"))
    assert failed + refused == attempts
    assert refused > 0
    assert secured.log.count("TLS: no handshake with") == 1
    assert secured.log.count("is refused: too many of this address") <= 10 * attempts // 16
    for _ in range(40):  # an address that does not fail has no limit, and does not wait
        way(secured, pki, "scanner", "127.0.0.3")


def test_a_certificate_of_nobody_is_counted_and_logged_as_the_file_would_have_it(
    secured: Server, pki: Pki
) -> None:
    where = f"127.0.0.1:{secured.port()}"
    for _ in range(3):
        with pytest.raises(Unauthorized):
            shmq.connect(where, tls=context_of(pki, "other"))
    eventually(lambda: figure(secured, "identities_unknown") == 3, what="the third has left")
    line = "was not let in: certificate O=Acme,CN=other is no user"
    assert secured.log.count(line) == 1
    over_https(secured, pki, "other")  # /ping is everybody's
    assert figure(secured, "identities_unknown") == 3


def test_who_shows_a_token_is_not_asked_for_a_certificate_that_is_a_users(
    secured: Server, pki: Pki
) -> None:
    where = f"127.0.0.1:{secured.port()}"
    with shmq.connect(where, tls=context_of(pki, "other"), token=TOKEN) as remote:
        remote.producer("t").publish(b"x")
    assert figure(secured, "identities_unknown") == 0
