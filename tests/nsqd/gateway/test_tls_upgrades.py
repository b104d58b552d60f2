"""From clear text to TLS: nothing that came before counts as if it had come inside. Somebody
between a client and a gateway adds frames, without any certificate."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.fake_auth_server import Authority, reply, rule
from support.hostile import Hostile, frame
from support.nsq_client import ERROR, OK, RESPONSE, Server, sized
from support.processes import WATCHDOG

import shmq
from shmq.errors import ShmqError

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def kind() -> str:
    """Only ours."""
    return "shmq"


@pytest.fixture
def secure(start: Start, certificate: tuple[str, str]) -> Server:
    cert, key = certificate
    return start(f"--tls-cert={cert}", f"--tls-key={key}")


class Between:
    """Passes on what both sides say, and adds `more` behind the server's answer number `behind`.
    answer: replaces the first answer."""

    def __init__(self, server: Server, more: bytes, behind: int = 1, answer: bytes = b"") -> None:
        self._port, self._more, self._behind, self._answer = server.port(), more, behind, answer
        self.said: list[bytes] = []
        """Sent by the client in clear text."""
        self.hostile = Hostile(self._serve)

    def _serve(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as server:
            up = threading.Thread(target=self._up, args=(client, server))
            up.start()
            count = 0
            while data := server.recv(65536):
                count += 1
                if count == 1 and self._answer:
                    data = self._answer
                client.sendall(data + (self._more if count == self._behind else b""))
            up.join()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                if data[:1] not in (b"\x16", b"\x14", b"\x17", b"\x15"):
                    self.said.append(data)
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
        except OSError:
            pass


FORGED_INFO = json.dumps(
    {"memory": "forged@1", "instance": "forged", "limits": {"max_msg_size": 1}, "version": 1}
).encode()
FORGED = {
    "an acknowledgement": frame(RESPONSE, b"OK"),
    "two acknowledgements and an instance": frame(RESPONSE, b"OK") * 2
    + frame(RESPONSE, FORGED_INFO),
    "a message": frame(RESPONSE, b"OK") * 2
    + frame(2, struct.pack(">qH16s", 1, 1, b"deadbeefdeadbeef") + b"FORGED ORDER"),
    "a heartbeat": frame(RESPONSE, b"_heartbeat_"),
    "an error": frame(ERROR, b"E_GONE x"),
    "a part of a frame": b"\x00",
}
OFFER = frame(RESPONSE, b'{"leases":true,"tls_v1":true,"max_rdy_count":1,"auth_required":false}')


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("behind", [1, 2])
def test_frames_from_between_are_no_answers(
    secure: Server, certificate: tuple[str, str], forged: str, behind: int
) -> None:
    """Behind the offer of TLS, in the same segment, and behind the first bytes of the handshake."""
    context = ssl.create_default_context(cafile=certificate[0])
    between = Between(secure, FORGED[forged], behind, OFFER if behind == 1 else b"")
    with between.hostile as way, pytest.raises((ShmqError, ssl.SSLError)):
        shmq.connect(way.address, tls=context, timeout=2)


def test_the_offer_before_tls_is_not_believed(secure: Server, certificate: tuple[str, str]) -> None:
    """It says one message at a time, and that there is no need of a secret. Inside the gateway says
    otherwise."""
    context = ssl.create_default_context(cafile=certificate[0])
    between = Between(secure, b"", 1, OFFER)
    with between.hostile as way, shmq.connect(way.address, tls=context, timeout=WATCHDOG) as broker:
        connection = broker._connections.lent(time.monotonic() + WATCHDOG)
        assert connection.server["max_rdy_count"] == 2500
        assert broker.instance == secure.instance
        broker._connections.returned(connection)


def test_a_secret_is_never_said_before_tls(
    start: Start, certificate: tuple[str, str], authority: Authority
) -> None:
    """Nor is the name of this host."""
    cert, key = certificate
    server = start(f"--tls-cert={cert}", f"--tls-key={key}", authority.flag)
    authority.reply = 200, reply(60, rule())
    context = ssl.create_default_context(cafile=cert)
    between = Between(server, b"")
    with (
        between.hostile as way,
        shmq.connect(way.address, tls=context, auth_secret="hidden", timeout=WATCHDOG),
    ):
        said = b"".join(between.said)
        assert b"hidden" not in said
        assert b"IDENTIFY" in said
        assert socket.gethostname().encode() not in said
    stripped = frame(RESPONSE, b'{"leases":true,"tls_v1":false,"auth_required":true}')
    between = Between(server, b"", 1, stripped)
    with between.hostile as way, pytest.raises(ShmqError, match="offers no TLS"):
        shmq.connect(way.address, tls=context, auth_secret="hidden", timeout=2)
    assert b"hidden" not in b"".join(between.said)


# ---- the gateway's side ----


def identify(**wishes: Any) -> bytes:
    body = json.dumps({"feature_negotiation": True, "heartbeat_interval": -1, **wishes}).encode()
    return b"IDENTIFY\n" + sized(body)


PIPELINED = {
    "a publish": b"PUB forged\n" + sized(b"x"),
    "many publishes": b"MPUB forged\n" + sized(struct.pack(">i", 1) + sized(b"x")),
    "a subscription": b"SUB forged c\nRDY 1\n",
    "a part of a publish": b"PUB forged\n",
    "a lease": b"LMAKE forged\n" + sized(b"{}"),
}


@pytest.mark.parametrize("sent", PIPELINED)
@pytest.mark.parametrize("layers", [{}, {"snappy": True}, {"deflate": True}])
def test_commands_that_came_before_tls_are_not_executed(
    secure: Server, sent: str, layers: dict[str, bool]
) -> None:
    """Neither in the segment of IDENTIFY, nor in one of its own before the ClientHello."""
    for pause in (0.0, 0.05):
        client = secure.connect()
        hello = identify(tls_v1=True, leases=True, **layers)
        if pause:
            client.send(hello)
            time.sleep(pause)
            client.send(PIPELINED[sent])
        else:
            client.send(hello + PIPELINED[sent])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        answer = client.frame()
        assert answer is not None
        assert json.loads(answer[1])["tls_v1"] is True
        with pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(client.sock)
    assert not secure.stats(topic="forged")["topics"]


def test_a_second_identify_inside_tls_is_answered(secure: Server) -> None:
    client = secure.connect()
    client.send(identify(tls_v1=True, client_id="forged"))
    client.frame()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client.sock = context.wrap_socket(client.sock)
    assert client.frame() == OK
    client.send(identify(client_id="mine", leases=True, heartbeat_interval=30000))
    answer = client.frame()
    assert answer is not None
    assert json.loads(answer[1])["leases"] is True
    client.sub("t", "c")
    assert [each["client_id"] for each in secure.channel("t", "c")["clients"]] == ["mine"]


def test_tls_below_compression_is_refused(secure: Server) -> None:
    """Its handshake would go through the compression in one direction only."""
    import zlib

    client = secure.connect()
    client.send(identify(deflate=True))
    client.frame()
    pack = zlib.compressobj(6, zlib.DEFLATED, -15)
    data = pack.compress(identify(tls_v1=True)) + pack.flush(zlib.Z_SYNC_FLUSH)
    unpack = zlib.decompressobj(-15)
    client.sock.sendall(data)
    plain = unpack.decompress(client.held())
    while found := client.sock.recv(65536):
        plain += unpack.decompress(found)
    assert b"E_INVALID cannot IDENTIFY with tls_v1 in current state (compressed)" in plain


def test_a_secret_from_before_tls_gives_no_rights_inside(
    start: Start, certificate: tuple[str, str], authority: Authority
) -> None:
    """Somebody between logs in as himself, and passes the rest on."""
    cert, key = certificate
    server = start(f"--tls-cert={cert}", f"--tls-key={key}", authority.flag)
    authority.reply = 200, reply(60, rule())
    client = server.connect()
    client.send(b"AUTH\n" + sized(b"his"))
    client.frame()
    client.send(identify(tls_v1=True))
    client.frame()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client.sock = context.wrap_socket(client.sock)
    assert client.frame() == OK
    client.send(b"PUB t\n" + sized(b"x"))
    answer = client.frame()
    assert answer is not None
    assert answer[1].startswith(b"E_AUTH_FIRST")


@pytest.fixture
def authority() -> Iterator[Authority]:
    """An authorisation server."""
    with Authority() as server:
        yield server
