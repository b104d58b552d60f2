"""A gateway's session without a socket and without a process around it."""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from shmq import _native
from shmq.errors import Full, Gone, LeaseLost, MessageTooBig
from shmq.gateway import protocol
from shmq.gateway.host import Client
from shmq.gateway.session import Session
from shmq.options import Options

#: Small ones, so that little is too much. They are checked once.
_OPTIONS = Options(max_msg_size=2000, max_body_size=5000)


class Topic:
    """Keeps what is published, in order; as `_native.Producer` for a session."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.full = 0
        self.most = 1 << 30

    def publish_framed(
        self, data: bytearray, start: int, count: int, defer: float | None, timeout: float
    ) -> int:
        if self.full:
            self.full -= 1
            raise Full("full")
        if count > self.most:
            raise MessageTooBig("too big")
        for _ in range(count):
            size = int.from_bytes(data[start : start + 4], "big")
            self.host.published.append((bytes(data[start + 4 : start + 4 + size]), defer))
            start += 4 + size
        return start

    def publish_run(
        self, data: bytearray, start: int, end: int, line: bytes, most: int, most_body: int
    ) -> tuple[int, int, int]:
        if self.full:
            raise Full("full")
        if data.startswith(b"M", start):
            return self._batch(data, start, end, line, most, most_body)
        line = line[1:]
        count = 0
        while data.startswith(line, start):
            body = start + len(line) + 4
            size = int.from_bytes(data[body - 4 : body], "big", signed=True)
            if body > end or not 0 < size <= min(most, end - body):
                break
            self.host.published.append((bytes(data[body : body + size]), None))
            start, count = body + size, count + 1
        return start, count, count

    def _batch(
        self, data: bytearray, start: int, end: int, line: bytes, most: int, most_body: int
    ) -> tuple[int, int, int]:
        at = start + len(line) + 8
        if not data.startswith(line, start) or at > end:
            return start, 0, 0
        size, count = struct.unpack_from(">ii", data, at - 8)
        if not (0 < size <= most_body and 0 < count <= (most_body - 4) // 5):
            return start, 0, 0
        bodies: list[bytes] = []
        for _ in range(count):
            size = int.from_bytes(data[at : at + 4], "big", signed=True)
            if end - at < 4 or not 0 < size <= min(most, end - at - 4):
                return start, 0, 0
            bodies.append(bytes(data[at + 4 : at + 4 + size]))
            at += 4 + size
        self.host.published += [(body, None) for body in bodies]
        return at, count, 1


class Part:
    """A part of a lease, of frames that say their numbers."""

    identity = "1-2"

    def __init__(self, at: int) -> None:
        self.at = at

    def frame(self) -> tuple[list[bytes], int] | None:
        if self.at >= 9:
            return None
        self.at += 3
        data = protocol.frame(3, b"%d" % (self.at - 3) * 300)
        return [data[:20], data[20:]], 3


class Desk:
    """Answers lease requests without a broker. Lease 5 is lost; messages come to LEASE when it has
    looked twice."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, tuple[str, ...], dict[str, Any], bytes]] = []

    def answer(
        self,
        asker: Any,
        command: bytes,
        names: tuple[str, ...],
        values: dict[str, Any],
        rows: bytes,
    ) -> dict[str, Any]:
        self.asked.append((command, names, values, rows))
        if values.get("lease") == 5:
            raise LeaseLost("lease 5 was lost")
        if values.get("lease") == 6:
            raise Gone("the broker was stopped")
        looks = sum(each[0] == command for each in self.asked)
        found = looks % 3 == 0
        return {"identity": "1-2", "lease": [looks] if found else None, "ready": found}

    def is_over(self, error: BaseException) -> bool:
        return isinstance(error, Gone)

    def open_part(self, names: tuple[str, ...], values: dict[str, Any]) -> Part:
        self.asked.append((b"LREAD", names, values, b""))
        if values["lease"] == 5:
            raise LeaseLost("lease 5 was lost")
        return Part(values["from"])


class Host:
    """The parts of a process that a session needs, in memory."""

    def __init__(self, consumer: Any = None) -> None:
        """consumer: what everybody who subscribes gets; None: nobody can."""
        self._consumer = consumer
        self.options = _OPTIONS
        self.producers: dict[bytes, Any] = {}
        self.has_tls = self.auth_enabled = False
        self.published: list[tuple[bytes, float | None]] = []
        self.leases = Desk()

    def kind_of(self, topic: bytes) -> str:
        return "general"

    def open_producer(self, topic: bytes) -> Any:
        self.producers[topic] = Topic(self)
        return self.producers[topic]

    def open_consumer(self, topic: bytes, channel: bytes, msg_timeout: float) -> Any:
        if self._consumer is None:
            raise protocol.ProtocolError("E_SUB_FAILED", "SUB failed here")
        return self._consumer

    def query_auth(self, client: Client, secret: bytes) -> None:
        return None

    def no_room(self) -> str:
        return ""

    def is_in_flight(self, consumer: Any, message_id: bytes) -> bool:
        return False


class Direct:
    """The extension's way for a client that only publishes, as `tcp.Connection` takes it: into a
    real queue, whose messages are taken at once."""

    def __init__(self, producer: Any, consumer: Any) -> None:
        self._producer = producer
        self._consumer = consumer
        self._ours, self._theirs = socket.socketpair()
        self._intake = _native.Intake(_never, _never, _never)
        self.count = 0
        """Pieces of input that went this way."""

    def takes(self, session: Session, host: Host, piece: bytes) -> bytes | None:
        """Returns the answers; None if the session must read the piece."""
        run = session.run
        if run is None or not piece or not session.goes_on:
            return None
        room = memoryview(bytearray(piece) + b"?")
        options = host.options
        self._intake.begin(
            self._ours.fileno(),
            room,
            self._producer,
            run[1],
            options.max_msg_size,
            options.max_body_size,
        )
        taken = self._intake.publishes(len(piece))
        count, now = self._intake.end()
        assert taken == bool(count)
        if not taken:
            return None
        assert now > 0
        session.published(count, session.now)
        with self._consumer.take_many(count, 0) as batch:
            host.published += [(message.body, None) for message in batch]
        self.count += 1
        return self._theirs.recv(1 << 16)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def _sent(said: list[bytes], takes: int, pieces: Sequence[bytes | memoryview]) -> bytes:
    data = b"".join(pieces)
    said.append(data[:takes])
    return data[takes:]


def _never(_: Any) -> Any:
    raise AssertionError("this is not the connection's")


def drive(
    data: bytes,
    cuts: list[int],
    host: Host | None = None,
    direct: Direct | None = None,
    takes: int | None = None,
) -> SimpleNamespace:
    """Feed a session these bytes, cut at these places; returns its output and the bytes left
    unread. direct: pieces go this way first. takes: jobs may send frames themselves, and the client
    takes so many bytes of each; None: they may not."""
    host = host or Host()
    session = Session(host, "1.2.3.4:5", "1.2.3.4", 0.0, 0.0)
    held, said = bytearray(), []
    begin = 0
    for end in [*cuts, len(data)]:
        if session.closing or session.upgrades:
            break
        piece, begin = data[begin:end], end
        if direct is not None and not held:
            answers = direct.takes(session, host, piece)
            if answers is not None:
                said.append(answers)
                continue
        held += piece
        while True:
            start = session.receive(held, 0, len(held))
            assert 0 <= start <= len(held)
            if start:
                del held[:start]
            if session.output:
                said += session.output
                session.written()
            job = session.job
            if job is None:
                break
            result, error = None, None
            if job.call is None:
                session.now += job.seconds
            call = job.call
            if takes is not None and job.stream is not None:
                call = functools.partial(job.stream, functools.partial(_sent, said, takes))
            try:
                result = call() if call is not None else None
            except Exception as exc:
                error = exc
            session.done(result, error)
            if session.output:
                said += session.output
                session.written()
        assert session.need <= 5008 + protocol.MAX_LINE
        if not session.closing and not session.upgrades and session.need:
            assert len(held) < session.need
    if not session.closing and not session.upgrades:
        session.end()
        said += session.output
    return SimpleNamespace(said=b"".join(said), published=host.published, closing=session.closing)
