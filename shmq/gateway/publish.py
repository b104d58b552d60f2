"""PUB, DPUB and MPUB of one client: reading and publishing the messages of a command.

The texts of errors and the order of checks are nsqd's (nsqd/protocol_v2.go). Complete commands to
the topic of the last one take a shorter way: `Session.publish_run`.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from shmq import _native
from shmq.door.telling import told
from shmq.errors import Full, Gone, MessageTooBig, Rejected, ShmqError
from shmq.gateway import protocol
from shmq.gateway.host import Host, Job, Owner, Reader
from shmq.gateway.identify import milliseconds
from shmq.gateway.protocol import MAX_LINE, ProtocolError
from shmq.names import valid_name
from shmq.patience import Patience
from shmq.remote.codes import code_of

#: Seconds between two attempts to publish to a full queue.
_ROOM_EVERY: Final = 0.002

_SIZE = struct.Struct(">i")


@dataclass
class _Batch:
    """The MPUB whose messages are being read. All its bytes, from the size on, stay in the input
    buffer until they are published; `at` and `sent_at` are distances from the size."""

    count: int
    piece: int
    """Messages to be published at once."""
    scanned: int = 0
    """Messages that have arrived."""
    sent: int = 0
    """Messages that were published."""
    at: int = 8
    """The end of the messages that have arrived."""
    sent_at: int = 8
    in_body: bool = False
    """The size of the next message has arrived, its body has not."""


class Publishing:
    """The present PUB, DPUB or MPUB of a client, and counts of its messages so far."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.counts: dict[bytes, int] = {}
        """Topic -> messages published."""
        self.run_line = b""
        """`MPUB <topic>\\n` with the last topic; empty: `publish_run` is not possible."""
        self.is_whole = False
        """The client is shmq's own: its lists are published whole or not at all, and it knows
        shmq's errors."""
        self._topic = b""
        self._patience: Patience | None = None  # None: the present message was not refused yet
        self._defer: float | None = None
        self._batch: _Batch | None = None  # None: its count has not been read

    # ---- command lines ----

    def pub(self, session: Owner, params: list[bytes]) -> None:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "PUB insufficient number of parameters")
        self._check_topic("PUB", params[1])
        self._begin(session, b"PUB", params[1], self._read_message)

    def dpub(self, session: Owner, params: list[bytes]) -> None:
        if len(params) < 3:
            raise ProtocolError("E_INVALID", "DPUB insufficient number of parameters")
        self._check_topic("DPUB", params[1])
        delay = protocol.number(params[2])
        if delay is None:
            raise ProtocolError("E_INVALID", b"DPUB could not parse timeout " + params[2])
        most = self._host.options.max_req_timeout
        delay_ns = protocol.signed(delay * 10**6 % 2**64)
        if not 0 <= delay_ns <= round(most * 1e9):
            raise ProtocolError(
                "E_INVALID", f"DPUB timeout {delay} out of range 0-{milliseconds(most)}"
            )
        self._begin(session, b"DPUB", params[1], self._read_message)
        self._defer = delay_ns / 1e9 or None

    def mpub(self, session: Owner, params: list[bytes]) -> None:
        if len(params) < 2:
            raise ProtocolError("E_INVALID", "MPUB insufficient number of parameters")
        self._check_topic("MPUB", params[1], "E_BAD_TOPIC ")
        self._begin(session, b"MPUB", params[1], self._read_batch)
        self._batch = None

    def _check_topic(self, command: str, topic: bytes, prefix: str = "") -> None:
        if topic not in self._host.producers and not valid_name(topic.decode("latin-1")):
            name = protocol.quoted(topic)
            raise ProtocolError("E_BAD_TOPIC", f"{prefix}{command} topic name {name} is not valid")

    def _begin(self, session: Owner, command: bytes, topic: bytes, reader: Reader) -> None:
        self._topic = topic
        self._defer = None
        session.expect(command, reader)

    # ---- one message ----

    def _read_message(self, session: Owner, data: bytearray, start: int, end: int) -> int:
        if end - start < 4:
            return start
        (size,) = _SIZE.unpack_from(data, start)
        if size <= 0:
            name = session.command.decode()
            raise ProtocolError("E_BAD_MESSAGE", f"{name} invalid message body size {size}")
        most = self._host.options.max_msg_size
        if size > most:
            name = session.command.decode()
            raise ProtocolError("E_BAD_MESSAGE", f"{name} message too big {size} > {most}")
        if end - start - 4 < size:
            session.need = size + 4
            return start
        if not session.authorised(session.command, self._topic, b""):
            return start
        if not self._publish(session, data, start, 1):
            return start
        self._published(session, 1)
        return start + 4 + int(size)

    def _publish(self, session: Owner, data: bytearray, start: int, count: int) -> bool:
        """Publish `count` bodies at `start`. Returns false if a job must be done first, or if they
        are too big for memory together; then there is no job."""
        topic = self._topic
        producer = self._host.producers.get(topic)
        if producer is None:
            self._open_producer(session)
            return False
        if pause := session.pause():
            session.job = Job(None, _nothing, pause)  # until then nothing is read
            return False
        try:
            producer.publish_framed(data, start, count, self._defer, 0)
        except Rejected as error:
            self._failed(session.command, error)
        except Full as error:
            reason = self._host.no_room()
            if reason:
                _refuse(session.command, reason)
            if self._patience is None:
                self._patience = Patience()
            self._patience.refused(error)
            session.job = Job(None, _nothing, _ROOM_EVERY)
            return False
        except MessageTooBig as error:
            if self.is_whole:
                self._failed(session.command, error)
            if count == 1:
                _refuse(session.command, "message too big for memory")
            return False
        except Gone:  # the topic was deleted; a publish creates it again
            self._host.producers.pop(topic, None)
            return self._publish(session, data, start, count)
        except (ShmqError, OSError) as error:
            _refuse(session.command, told(error))
        if self._patience is not None:
            self._patience = None
        session.spend(count)
        return True

    def _failed(self, command: bytes, error: ShmqError) -> NoReturn:
        """Refuse what the broker has refused."""
        if self.is_whole:
            raise ProtocolError(code_of(error), told(error))
        _refuse(command, told(error))

    def _open_producer(self, session: Owner) -> None:
        call = functools.partial(self._host.open_producer, self._topic)
        after = functools.partial(_check_producer, session.command)
        session.job = Job(call, after, kind=self._host.kind_of(self._topic))

    def _published(self, session: Owner, count: int) -> None:
        """Answer a command whose messages were all published."""
        self.counts[self._topic] = self.counts.get(self._topic, 0) + count
        if session.may_run:
            self.run_line = b"MPUB %b\n" % self._topic
        session.reader = None
        session.say(protocol.OK)

    # ---- a batch ----

    def _read_batch(self, session: Owner, data: bytearray, start: int, end: int) -> int:
        batch = self._batch
        if batch is None:
            if not session.authorised(b"MPUB", self._topic, b""):
                return start
            if self._topic not in self._host.producers:
                self._open_producer(session)
                return start
            batch = self._batch = self._read_count(session, data, start, end)
            if batch is None:
                return start
        if not self._scan(session, batch, data, start, end):
            return start
        while batch.sent < batch.count:
            if not self._publish_some(session, batch, data, start):
                return start
        self._published(session, batch.count)
        return start + batch.at

    def _read_count(self, session: Owner, data: bytearray, start: int, end: int) -> _Batch | None:
        """Read the size and the count of a batch. Returns None if some of it is missing."""
        if end - start < 4:
            return None
        (size,) = _SIZE.unpack_from(data, start)
        most = self._host.options.max_body_size
        if size <= 0:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid body size {size}")
        if size > most:
            raise ProtocolError("E_BAD_BODY", f"MPUB body too big {size} > {most}")
        if end - start < 8:
            session.need = 8
            return None
        (count,) = _SIZE.unpack_from(data, start + 4)
        if not 0 < count <= (most - 4) // 5:
            raise ProtocolError("E_BAD_BODY", f"MPUB invalid message count {count}")
        return _Batch(count, count)

    def _scan(self, session: Owner, batch: _Batch, data: bytearray, start: int, end: int) -> bool:
        """Returns true if all messages of the batch have arrived."""
        left = batch.count - batch.scanned
        if not left:
            return True
        options = self._host.options
        at, whole, bad = _native.scan_bodies(
            data, start + batch.at, end, left, options.max_msg_size
        )
        batch.at = at - start
        batch.scanned += whole
        if bad is not None and bad <= 0:
            raise ProtocolError(
                "E_BAD_MESSAGE", f"MPUB invalid message({batch.scanned}) body size {bad}"
            )
        if bad is not None:
            raise ProtocolError(
                "E_BAD_MESSAGE", f"MPUB message too big {bad} > {options.max_msg_size}"
            )
        if whole == left:
            return True
        batch.in_body = end - at >= 4
        missing = _SIZE.unpack_from(data, at)[0] if batch.in_body else 0
        need = batch.at + 4 + missing
        if need > options.max_body_size + 8 + MAX_LINE:
            # as in nsqd, the declared size does not end the batch; this limits the memory it takes
            raise ProtocolError(
                "E_BAD_BODY", f"MPUB body too big {need - 4} > {options.max_body_size}"
            )
        session.need = need
        return False

    def _publish_some(self, session: Owner, batch: _Batch, data: bytearray, start: int) -> bool:
        """Publish the next piece of the batch; halve the piece if it can never fit into memory.
        Returns false if a job must be done first."""
        count = min(batch.piece, batch.count - batch.sent)
        first = start + batch.sent_at
        if self._publish(session, data, first, count):
            batch.sent += count
            if batch.sent < batch.count:
                most = self._host.options.max_msg_size
                at, _, _ = _native.scan_bodies(data, first, start + batch.at, count, most)
                batch.sent_at = at - start
            return True
        if session.job is not None:
            return False
        batch.piece = max(count // 2, 1)
        return True

    def unread(self, need: int) -> ProtocolError | None:
        """Return nsqd's error for an MPUB that does not arrive completely; None: its size is
        missing. need: the bytes that the session needs."""
        batch = self._batch
        if batch is None:
            if need < 8:
                return None
            return ProtocolError("E_BAD_BODY", "MPUB failed to read message count")
        if batch.in_body:
            return ProtocolError("E_BAD_MESSAGE", "MPUB failed to read message body")
        which = f"message({batch.scanned})"
        return ProtocolError("E_BAD_MESSAGE", f"MPUB failed to read {which} body size")


PUBLISH_COMMANDS: Final = {
    b"PUB": Publishing.pub,
    b"MPUB": Publishing.mpub,
    b"DPUB": Publishing.dpub,
}


def _nothing(result: Any, error: BaseException | None) -> None:
    """The job was only a wait."""


def _check_producer(command: bytes, result: Any, error: BaseException | None) -> None:
    if isinstance(error, Gone):
        _refuse(command, "exiting")
    if error is not None:
        _refuse(command, told(error))


def _refuse(command: bytes, reason: str) -> NoReturn:
    name = command.decode()
    raise ProtocolError(f"E_{name}_FAILED", f"{name} failed {reason}")
