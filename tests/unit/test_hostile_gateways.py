"""`shmq.connect` to a server that means harm: each call ends with an error of shmq's within its
time, and takes no more memory than what was asked for may take."""

from __future__ import annotations

import array
import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hostile import EVIL, Hostile, drip, evil_in, flood, frame, wrong_texts
from support.processes import eventually

import shmq
from shmq.errors import ShmqError
from shmq.leased import LeasedBatch
from shmq.remote import connection as connection_module
from shmq.remote.connection import ERROR, MESSAGE, RESPONSE
from shmq.remote.rows import ROWS, framed

IDENTITY = {"leases": True, "max_rdy_count": 2500, "auth_required": False, "tls_v1": False}
INFO = {"memory": "m@1", "instance": "i", "limits": {"max_msg_size": 1 << 20}, "version": 1}
LEASE = [1, 0, 2, 20, 1, 0, 0]
#: Right answers to all commands.
ANSWERS: dict[str, Any] = {
    "IDENTIFY": IDENTITY,
    "LINFO": INFO,
    "LINFO/2": {
        "memory": "m@1",
        "identity": "m-1",
        "depth": 3,
        "stats": {"depth": 3, "paused": False, "oldest_age": 1.5},
    },
    "LMAKE": {"memory": "m@1"},
    "LHOLD": {"identity": "m-1", "holder": [0, "0" * 16]},
    "LEASE": {"identity": "m-1", "lease": LEASE},
    "LWAIT": {"identity": "m-1", "ready": True},
    "LLOOK": {"identity": "m-1", "lease": LEASE},
    "LLIST": {"identity": "m-1", "leases": [LEASE]},
    "LFIN": {"identity": "m-1", "messages": 2},
    "LRET": {"identity": "m-1", "messages": 2},
    "LKEEP": {"identity": "m-1"},
    "LCLOSE": {"identity": "m-1"},
    "STAGE": {"memory": "m@1", "size": 9},
    "COMMIT": {"memory": "m@1", "published": 1, "done": True},
    "ABANDON": {"memory": "m@1"},
}


class Gateway:
    """A gateway that answers rightly, but for one command. wrong: the bytes of the answer, or a
    function that is given the socket."""

    def __init__(self) -> None:
        self.command = ""
        self.wrong: bytes | Callable[[socket.socket], None] = b""
        self.server = Hostile(self._serve)

    def _serve(self, sock: socket.socket) -> None:
        file = sock.makefile("rb")
        file.read(4)
        while line := file.readline():
            words = line.decode().split()
            name = "LINFO/2" if words[0] == "LINFO" and len(words) == 3 else words[0]
            if words[0] not in ("SUB", "RDY", "NOP", "FIN", "REQ", "TOUCH"):
                file.read(struct.unpack(">i", file.read(4))[0])
            if name != self.command:
                if name in ANSWERS:
                    sock.sendall(frame(RESPONSE, json.dumps(ANSWERS[name]).encode()))
                elif name in ("SUB", "PUB", "AUTH"):
                    sock.sendall(frame(RESPONSE, b"OK"))
            elif isinstance(self.wrong, bytes):
                sock.sendall(self.wrong)
            else:
                self.wrong(sock)

    def connect(self, timeout: float = 0.3) -> shmq.RemoteBroker:
        return shmq.connect(self.server.address, timeout=timeout)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.server.close()


def _read(broker: shmq.RemoteBroker) -> object:
    return list(broker.read_lease("t", "c", 1, identity="m-1"))


def _hold(broker: shmq.RemoteBroker) -> Any:
    return broker.lease_holder("t", "c", "h")


#: A call for each command.
CALLS: dict[str, Callable[[shmq.RemoteBroker], object]] = {
    "LINFO/2": lambda broker: (
        broker.channel_identity("t", "c"),
        broker.channel_depth("t", "c"),
        broker.channel_stats("t", "c"),
    ),
    "LMAKE": lambda broker: broker.create_topic("t"),
    "LHOLD": _hold,
    "LEASE": lambda broker: _hold(broker).lease(2),
    "LWAIT": lambda broker: _hold(broker).wait(0),
    "LLOOK": lambda broker: _hold(broker).look(1),
    "LLIST": lambda broker: _hold(broker).leases(),
    "LFIN": lambda broker: _hold(broker).finish_lease(1),
    "LRET": lambda broker: _hold(broker).return_lease(1),
    "LKEEP": lambda broker: _hold(broker).touch(),
    "LCLOSE": lambda broker: _hold(broker).close(),
    "STAGE": lambda broker: broker.stage("t", "w", 1, [b"x"]),
    "COMMIT": lambda broker: broker.commit("t", "w", 1, []),
    "ABANDON": lambda broker: broker.abandon("t", "w", 1),
    "LREAD": _read,
}


@pytest.mark.parametrize("command", ["IDENTIFY", "LINFO", *(CALLS.keys() - {"LREAD"})])
def test_answers_of_wrong_types_are_errors_of_shmq(gateway: Gateway, command: str) -> None:
    """Each value of each answer is replaced by each wrong one. The answer may be taken if the value
    does not matter, but no other error ever comes out."""
    for body in wrong_texts(ANSWERS[command]):
        if not body.startswith(b"{") and command != "LINFO":
            continue  # the reader of JSON is the same
        gateway.command, gateway.wrong = command, frame(RESPONSE, body)
        with contextlib.suppress(ShmqError), gateway.connect(timeout=0.05) as broker:
            broker.instance, broker.identity, broker.limits  # noqa: B018
            if command in CALLS:
                CALLS[command](broker)


def head(size: int, kind: int) -> bytes:
    return struct.pack(">ii", size, kind)


HARM: dict[str, Callable[[socket.socket], None]] = {
    "drips": lambda sock: drip(sock, struct.pack(">ii", 5000, 0) + b"x" * 4996, 0.01),
    "heartbeats": lambda sock: flood(sock, frame(RESPONSE, b"_heartbeat_")),
    "a frame of 2 GiB": lambda sock: flood(
        sock, struct.pack(">ii", (1 << 31) - 1, 0) + b"z" * 65536
    ),
    "an error of 2 GiB": lambda sock: flood(
        sock, struct.pack(">ii", (1 << 31) - 1, 1) + b"z" * 65536
    ),
    "rows that nobody asked for": lambda sock: flood(
        sock, struct.pack(">ii", 1 << 24, 3) + b"z" * 99
    ),
    "a message that nobody asked for": lambda sock: flood(sock, frame(MESSAGE, b"z" * 5000)),
    "a negative length": lambda sock: flood(sock, struct.pack(">ii", -5, 0)),
    "an unknown kind": lambda sock: flood(sock, frame(9, b"x")),
    "nothing": lambda sock: time.sleep(0.3),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("command", ["IDENTIFY", "LINFO", "LEASE", "LREAD"])
def test_a_server_that_does_harm_is_given_up(gateway: Gateway, command: str, harm: str) -> None:
    gateway.command, gateway.wrong = command, HARM[harm]
    with pytest.raises(ShmqError), gateway.connect() as broker:
        CALLS[command](broker)
    eventually(lambda: gateway.server.open == 0)


@pytest.mark.parametrize("command", ["PUB", "SUB", "IDENTIFY", "LINFO/2", "LREAD"])
def test_errors_are_told_in_printable_text(gateway: Gateway, command: str) -> None:
    said = b"E_FAILED " + EVIL.encode("utf-8", "surrogatepass") + b"\xff" + b"x" * 30_000
    gateway.command, gateway.wrong = command, frame(ERROR, said)
    calls: dict[str, Callable[[shmq.RemoteBroker], object]] = {
        "PUB": lambda broker: broker.producer("t").publish(b"x"),
        "SUB": lambda broker: broker.consumer("t", "c"),
        **CALLS,
    }
    with pytest.raises(ShmqError) as found, gateway.connect() as broker:
        calls[command](broker)
    assert not evil_in(str(found.value))
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 3000


# ---- rows ----


def rows(count: int = 3, *, offsets: list[int] | None = None) -> bytes:
    """A frame of rows. offsets: of their bodies, instead of the right ones."""
    numbers = [array.array(letter, range(count)).tobytes() for letter in "Qqi"]
    places = array.array("i", offsets or range(count + 1)).tobytes()
    return b"".join(framed(0, LeasedBatch(count, *numbers, places, b"x" * count, None)))


def ended(count: int) -> bytes:
    return frame(RESPONSE, json.dumps({"identity": "m-1", "next": count, "end": True}).encode())


def test_right_rows_are_read(gateway: Gateway) -> None:
    gateway.command, gateway.wrong = "LREAD", rows() + ended(3)
    with gateway.connect() as broker:
        (batch,) = broker.read_lease("t", "c", 1, identity="m-1")
        assert batch.bodies() == [b"x"] * 3


@pytest.mark.parametrize(
    "offsets", [[0, 1, 2, 2], [1, 1, 2, 3], [0, 2, 1, 3], [0, -5, 2, 3], [0, 1, 2**30, 3]]
)
def test_rows_outside_their_frame_are_not_read(gateway: Gateway, offsets: list[int]) -> None:
    """The checksum is right, and so are all lengths: readers of columns would read beyond them."""
    gateway.command, gateway.wrong = "LREAD", rows(offsets=offsets) + ended(3)
    with gateway.connect() as broker, pytest.raises(ShmqError):
        _read(broker)


def test_more_rows_than_were_asked_for_are_not_read(gateway: Gateway) -> None:
    gateway.command, gateway.wrong = "LREAD", rows(3) + ended(3)
    with gateway.connect() as broker, pytest.raises(ShmqError):
        list(broker.read_lease("t", "c", 1, identity="m-1", rows=2))


# ---- messages ----


def delivered(name: bytes = b"0123456789abcdef", body: bytes = b"x") -> bytes:
    return frame(MESSAGE, struct.pack(">qH16s", 1, 1, name) + body)


def subscribed(
    gateway: Gateway, wrong: Callable[[socket.socket], None] | bytes
) -> shmq.RemoteBroker:
    """The harm comes when the consumer is ready."""
    gateway.command, gateway.wrong = "RDY", wrong
    return gateway.connect()


def test_right_messages_are_taken(gateway: Gateway) -> None:
    broker = subscribed(gateway, delivered())
    with broker, broker.consumer("t", "c") as consumer:
        message = consumer.take(timeout=20)
        assert message is not None
        assert message.body == b"x"


@pytest.mark.parametrize(
    "wrong",
    [
        delivered(b"a\nTOUCH 1234567"),
        delivered(b"\x1b[31mred\x1b[0mxxx"),
        delivered(body=b""),
        frame(MESSAGE, b"short"),
        frame(ROWS, b"x" * 100),
        struct.pack(">ii", (1 << 31) - 1, 2) + b"z" * 70_000,
        frame(RESPONSE, b"_heartbeat_") * 2000,
        frame(RESPONSE, b"_heartbeat_") * 50 + struct.pack(">ii", 2 << 20, 0),
    ],
    ids=lambda wrong: repr(wrong[:20]),
)
def test_a_consumer_leaves_a_server_that_does_harm(gateway: Gateway, wrong: bytes) -> None:
    """It connects again, and takes none of that."""
    broker = subscribed(gateway, wrong)
    with broker, broker.consumer("t", "c") as consumer:
        before = gateway.server.met
        eventually(lambda: gateway.server.met > before)
        assert consumer.take(timeout=0) is None


def test_a_consumer_keeps_no_more_than_it_asked_for(gateway: Gateway) -> None:
    """A server may send without end: those that came first have timed out there, if it is honest.
    The last ones are kept."""
    many = b"".join(delivered(b"%016x" % number) for number in range(5000))
    broker = subscribed(gateway, many)
    with broker, broker.consumer("t", "c", max_in_flight=10) as consumer:
        kept = consumer._subscription.arrivals._deliveries
        eventually(lambda: kept and kept[-1][1][2] == f"{4999:016x}")
        assert len(kept) == 10


# ---- TLS ----


OFFER = frame(RESPONSE, json.dumps({**IDENTITY, "tls_v1": True}).encode())


@pytest.mark.parametrize(
    "more",
    [frame(RESPONSE, b"OK"), frame(RESPONSE, b"_heartbeat_"), b"x", frame(ERROR, b"E_X y")],
    ids=repr,
)
def test_bytes_behind_the_offer_of_tls_are_an_error(gateway: Gateway, more: bytes) -> None:
    gateway.command, gateway.wrong = "IDENTIFY", OFFER + more
    with pytest.raises(ShmqError, match="came before TLS"):
        shmq.connect(gateway.server.address, tls=ssl.create_default_context(), timeout=5)


@pytest.mark.parametrize(
    "answer", [{}, {"tls_v1": False}, {"tls_v1": "yes"}, {"tls_v1": 1}, [], None]
)
def test_a_server_without_tls_is_not_taken_where_it_was_asked_for(
    gateway: Gateway, answer: Any
) -> None:
    """Nor does it get the secret."""
    got: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        got.append(sock.recv(65536))
        sock.sendall(frame(RESPONSE, json.dumps(answer).encode()))
        while data := sock.recv(65536):
            got.append(data)

    gateway.server.serve = serve
    with pytest.raises(ShmqError, match="offers no TLS"):
        shmq.connect(gateway.server.address, tls=True, auth_secret="hidden", timeout=5)
    assert b"hidden" not in b"".join(got)


@pytest.mark.parametrize("more", [b"", b"\x15\x03\x03\x00\x02\x02\x28", b"HTTP/1.1 200 OK\r\n"])
def test_a_handshake_that_is_none_is_an_error(gateway: Gateway, more: bytes) -> None:
    def serve(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(OFFER)
        sock.recv(65536)
        sock.sendall(more)

    gateway.server.serve = serve
    with pytest.raises((ShmqError, ssl.SSLError)):
        shmq.connect(gateway.server.address, tls=True, auth_secret="hidden", timeout=0.5)


def test_the_bound_of_a_message_is_the_brokers_own(gateway: Gateway) -> None:
    """And that of this client, whatever the broker says."""
    with gateway.connect() as broker:
        assert broker._connections.most_body == 1 << 20
    info = {**INFO, "limits": {"max_msg_size": 2**31 - 30}}
    gateway.command, gateway.wrong = "LINFO", frame(RESPONSE, json.dumps(info).encode())
    with gateway.connect() as broker:
        assert broker._connections.most_body == connection_module.MOST_BODY
