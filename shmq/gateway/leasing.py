"""The lease commands of one client: reading a request, the job that executes it, and its answer.

A request is executed in a thread. Until its answer is written no further command is read. LREAD
answers with several frames, and then a document that says how far it came. A job sends as many of
the frames as the client takes at once. If there is a layer below (TLS, compression) it makes one,
which the event loop sends. The next job begins only when the socket has taken the frames before
(`tcp` begins no job while the socket is full).
"""

from __future__ import annotations

import functools
import json
import logging
import struct
import time
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from shmq.door.shortage import shortage
from shmq.door.telling import told
from shmq.errors import ShmqError
from shmq.gateway import protocol
from shmq.gateway.asker import Asker
from shmq.gateway.host import Host, Job, Owner, Send
from shmq.gateway.lease_requests import COMMANDS, Values, parse
from shmq.gateway.protocol import ProtocolError
from shmq.names import valid_name
from shmq.remote.codes import code_of

#: Seconds between two looks for messages to lease, at first and at most.
_FIRST_LOOK: Final = 0.002
_LAST_LOOK: Final = 0.05

#: Seconds after which a job that sends frames lets other clients' jobs have its thread.
_TURN: Final = 0.1

#: Commands that wait for others' locks or for room.
_KINDS: Final = {b"STAGE": "stage", b"COMMIT": "commit", b"ABANDON": "commit"}

_SIZE = struct.Struct(">i")

_log = logging.getLogger(__name__)


@dataclass
class _Reading:
    """An LREAD that is answered, or whose part may be read on by the next one."""

    names: tuple[str, str]
    values: Values
    cursor: Any
    at: int
    """Index of the next message."""
    credit: int = 0
    """Bytes that may still be sent."""

    def goes_on_with(self, names: tuple[str, ...], values: Values) -> bool:
        """Whether an LREAD asks for the messages that come next."""
        keys = ("lease", "part", "rows", "bytes", "properties", "identity", "holder", "secret")
        return (
            self.names == names
            and self.at == values["from"]
            and all(self.values[key] == values[key] for key in keys)
        )


class _Done(NamedTuple):
    """The messages that a job of an LREAD has sent, or made."""

    messages: int
    size: int
    """Bytes of the frames with them."""
    unsent: bytes
    ended: bool
    """Whether these were the last messages of the part."""


class Leasing:
    """The present request of a client that has negotiated leases."""

    def __init__(self, host: Host, asker: Asker) -> None:
        self._host = host
        self._names: tuple[str, ...] = ()
        self._reading: _Reading | None = None
        self.asker = asker

    @property
    def held(self) -> int:
        """Bytes of the frame that is being made, at most."""
        reading = self._reading
        return int(reading.values["bytes"]) if reading is not None and reading.credit > 0 else 0

    @property
    def where(self) -> tuple[bytes, bytes]:
        """Topic and channel of the present request; empty if it names none."""
        topic, channel = (*(text.encode() for text in self._names), b"", b"")[:2]
        return topic, channel

    # ---- input ----

    def begin(self, session: Owner, params: list[bytes]) -> None:
        """Execute a command line."""
        name, names = params[0], params[1:]
        what = name.decode()
        if len(names) not in COMMANDS[name].names:
            raise ProtocolError("E_INVALID", f"{what} invalid number of parameters")
        for kind, text in zip(("topic", "channel"), names, strict=False):
            if not valid_name(text.decode("latin-1")):
                code, shown = f"E_BAD_{kind.upper()}", protocol.quoted(text)
                raise ProtocolError(code, f"{what} {kind} name {shown} is not valid")
        self._names = tuple(text.decode() for text in names)
        session.expect(name, self._read)

    def _read(self, session: Owner, data: bytearray, start: int, end: int) -> int:
        if end - start < 4:
            return start
        name = session.command
        what, command = name.decode(), COMMANDS[name]
        (size,) = _SIZE.unpack_from(data, start)
        most = command.most or self._host.options.max_body_size
        if not 0 < size <= most:
            raise ProtocolError("E_BAD_BODY", f"{what} invalid body size {size}, of at most {most}")
        if end - start - 4 < size:
            session.need = size + 4
            return start
        if not session.authorised(name, *self.where):
            return start
        body = bytes(data[start + 4 : start + 4 + size])
        rows = b""
        if command.rows:
            body, rows = _split(what, body)
        values = parse(name, body)
        if command.rows:
            if pause := session.pause():
                session.job = Job(None, _nothing, pause)
                return start
            session.spend(values["rows"])
        session.reader = None
        self._execute(session, name, values, rows)
        return start + 4 + int(size)

    def _execute(self, session: Owner, name: bytes, values: Values, rows: bytes) -> None:
        desk, names = self._host.leases, self._names
        asker = self.asker
        asker.origin, asker.known = session.origin, session.known
        asker.address, asker.quota = session.address, session.quota
        if name == b"LREAD":
            self._read_part(session, values)
            return
        if name in (b"LEASE", b"LWAIT") and values["timeout"]:
            self._look(session, name, values, session.now + values["timeout"], _FIRST_LOOK)
            return
        call = functools.partial(desk.answer, asker, name, names, values, rows)
        session.job = Job(call, functools.partial(self._answer, session), kind=self._kind(name))

    def _kind(self, name: bytes) -> str:
        """The kind of the job of a command: none waits behind those that wait longer."""
        if name in _KINDS:
            return _KINDS[name]
        is_missing = bool(self._names) and self._host.kind_of(self._names[0].encode()) == "topic"
        return "topic" if name in (b"LMAKE", b"LHOLD") and is_missing else "lease"

    # ---- waiting ----

    def _look(
        self, session: Owner, name: bytes, values: Values, until: float, pause: float
    ) -> None:
        """Execute LEASE or LWAIT, and again after `pause` seconds if there is no message."""
        call = functools.partial(
            self._host.leases.answer, self.asker, name, self._names, values, b""
        )

        def after(found: Any, error: BaseException | None) -> None:
            nothing = error is None and not found.get("lease") and not found.get("ready")
            if not nothing or session.now >= until or session.closing:
                self._answer(session, found, error)
                return

            def again(_: Any, __: BaseException | None) -> None:
                self._look(session, name, values, until, min(2 * pause, _LAST_LOOK))

            session.job = Job(None, again, min(pause, max(until - session.now, 0.001)))

        session.job = Job(call, after, kind="lease")

    # ---- answers ----

    def _answer(self, session: Owner, found: Any, error: BaseException | None) -> None:
        if session.closing:
            return
        if error is not None and self._host.leases.is_over(error):
            session.abort()  # the client asks the next process of the gateway
            return
        if error is not None:
            session.say(_refusal(session.command, error))
        else:
            session.say(protocol.frame(protocol.RESPONSE, _json(found)))

    # ---- LREAD ----

    def _read_part(self, session: Owner, values: Values) -> None:
        reading, self._reading = self._reading, None
        assert len(self._names) == 2
        if reading is not None and reading.goes_on_with(self._names, values):
            reading.credit = values["credit"]
            self._begin_frame(session, reading)
            return
        call = functools.partial(self._host.leases.open_part, self._names, values)

        def opened(cursor: Any, error: BaseException | None) -> None:
            if error is not None:
                self._answer(session, None, error)
                return
            names = (self._names[0], self._names[1])
            begun = _Reading(names, values, cursor, values["from"], values["credit"])
            self._begin_frame(session, begun)

        session.job = Job(call, opened, kind="lease")

    def _begin_frame(self, session: Owner, reading: _Reading) -> None:
        self._reading = reading
        session.job = Job(
            functools.partial(_made, reading.cursor),
            functools.partial(self._sent, session, reading),
            kind="lease",
            stream=functools.partial(_streamed, reading.cursor, reading.credit),
        )

    def _sent(
        self,
        session: Owner,
        reading: _Reading,
        done: _Done | None,
        error: BaseException | None,
    ) -> None:
        if error is not None or session.closing:
            self._reading = None
            self._answer(session, None, error)
            return
        assert done is not None
        if done.unsent:
            session.say(done.unsent)
        reading.at += done.messages
        reading.credit -= done.size
        if done.ended:
            self._reading = None
        elif reading.credit > 0:
            self._begin_frame(session, reading)
            return
        answer = {"identity": reading.cursor.identity, "next": reading.at, "end": done.ended}
        self._answer(session, answer, None)


def _nothing(result: Any, error: BaseException | None) -> None:
    """The job was only a wait."""


def _made(cursor: Any) -> _Done:
    """Make the next frame."""
    found = cursor.frame()
    if found is None:
        return _Done(0, 0, b"", True)
    pieces, count = found
    data = b"".join(pieces)
    return _Done(count, len(data), data, False)


def _streamed(cursor: Any, credit: int, send: Send) -> _Done:
    """Send frames until the credit is used up, the client does not take them, or the turn ends."""
    until = time.monotonic() + _TURN
    messages = size = 0
    unsent, ended = b"", False
    while size < credit and not unsent and time.monotonic() < until:
        found = cursor.frame()
        if found is None:
            ended = True
            break
        pieces, count = found
        messages += count
        size += sum(map(len, pieces))
        unsent = send(pieces)
    return _Done(messages, size, unsent, ended)


def _split(what: str, body: bytes) -> tuple[bytes, bytes]:
    """The JSON object and the rows of a body that has both."""
    size = _SIZE.unpack_from(body)[0] if len(body) >= 4 else -1
    if not 0 < size <= len(body) - 4:
        raise ProtocolError("E_BAD_BODY", f"{what} invalid size of its JSON object {size}")
    return body[4 : 4 + size], body[4 + size :]


def _refusal(command: bytes, error: BaseException) -> bytes:
    """The error frame of a request that failed; the connection stays open."""
    if isinstance(error, ProtocolError):
        raise error
    text = told(error)
    if isinstance(error, ShmqError):
        code = code_of(error)
    elif isinstance(error, ValueError | TypeError):
        code = "E_BAD_ARGUMENT"
    elif isinstance(error, OSError) or shortage(error):
        raise protocol.no_means(error)
    else:
        _log.error("%s failed", command.decode(), exc_info=error)
        code, text = "E_FAILED", "the gateway failed; its log says why"
    return protocol.frame(protocol.ERROR, f"{code} {text}".encode())


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()
