"""Anything that speaks nsqd's protocol as a target: every message at least once.

It keeps no markers: a batch whose answer got lost is published again.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final

from shmq import __version__
from shmq.errors import ShmqError
from shmq.forward.marker import Marker
from shmq.forward.refusal import Refused
from shmq.forward.target import Away
from shmq.names import check_name
from shmq.peers.sockets import connected, left, received, seconds_for, sent
from shmq.printing import said

#: Seconds within which the server answers.
_TIMEOUT: Final = 10.0
_HEAD: Final = struct.Struct(">ii")
_SIZE: Final = struct.Struct(">i")
_RESPONSE: Final = 0
_ERROR: Final = 1
_MOST_FRAME: Final = 64 << 10
_HEARTBEAT: Final = b"_heartbeat_"
#: nsqd refuses an MPUB of more than max_body_size, 5 MiB by default.
_MOST_BODY: Final = 5 << 20
_MOST_BYTES: Final = 2 << 20
#: Errors that the same batch gets again.
_LASTING: Final = ("E_BAD", "E_INVALID", "E_AUTH", "E_UNAUTHORIZED")
#: Errors that may say that a message is too big, or a batch.
_REFUSALS: Final = ("E_BAD_MESSAGE", "E_BAD_BODY", "E_MPUB_FAILED")
#: Seconds for which a limit that nsqd has said is believed: it may be started with another.
_REMEMBERED: Final = 10.0
_LIMIT: Final = re.compile(r"(message|body) too big [0-9]{1,12} > ([0-9]{1,12})\b")


class Nsqd:
    """A topic of an nsqd, or of another shmq's gateway."""

    most = 999
    most_bytes = _MOST_BYTES
    exact = False
    has_headers = False

    def __init__(self, host: str, port: int, topic: str) -> None:
        """Raises BadName."""
        self._where = (host, port)
        self._topic = check_name(topic, "topic")
        self._sock: socket.socket | None = None
        self._deadline = 0.0
        self._limit: int | None = None
        self._body_limit: int | None = None
        """The sizes of a message and of a batch that it has said, when it refused one."""
        self._said_at = 0.0

    def __str__(self) -> str:
        return f"nsq://{self._where[0]}:{self._where[1]}/{self._topic}"

    def open(self) -> Marker | None:
        """Connect; there are no markers. The limits that nsqd has just said hold on."""
        self.close()
        if time.monotonic() - self._said_at > _REMEMBERED:
            self._limit = self._body_limit = None
        self.most_bytes = min(_MOST_BYTES, max((self._body_limit or _MOST_BODY) // 2, 1))
        wishes = {
            "client_id": socket.gethostname(),
            "hostname": socket.gethostname(),
            "user_agent": f"shmq-forward/{__version__}",
            "heartbeat_interval": -1,
        }
        body = json.dumps(wishes).encode()
        try:
            self._deadline = time.monotonic() + _TIMEOUT
            self._sock = connected(*self._where, self._deadline)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._sock.sendall(b"  V2IDENTIFY\n" + _SIZE.pack(len(body)) + body)
        except (OSError, UnicodeError) as exc:
            raise Away(f"{self}: {exc}") from exc
        self._answer()
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        return None

    def too_big(
        self, bodies: Sequence[bytes], properties: Sequence[Mapping[str, bytes]] | None
    ) -> Mapping[int, str]:
        """The messages that are too big, if it has said what that is."""
        found = {}
        for place, body in enumerate(bodies):
            if self._limit is not None and len(body) > self._limit:
                found[place] = f"its max-msg-size is {self._limit} bytes"
            elif self._body_limit is not None and len(body) + 8 > self._body_limit:
                found[place] = f"its max-body-size is {self._body_limit} bytes"
        return found

    def send(
        self,
        bodies: Sequence[bytes],
        marker: Marker,
        properties: Sequence[Mapping[str, bytes]] | None = None,
    ) -> None:
        """Begin to publish the bodies; nsqd has no place for properties."""
        assert self._sock is not None
        parts = [_SIZE.pack(len(bodies))]
        for body in bodies:
            parts += (_SIZE.pack(len(body)), body)
        data = b"".join(parts)
        self.idle()
        self._deadline = time.monotonic() + seconds_for(len(data), _TIMEOUT)
        head = b"MPUB %b\n%b" % (self._topic.encode(), _SIZE.pack(len(data)))
        try:
            sent(self._sock, head + data, self._deadline, _TIMEOUT)
        except OSError as exc:
            try:  # the error that the server sent before it closed
                self.confirm()
            except Refused:
                raise
            except Away:
                pass
            raise Away(f"{self}: {exc}") from exc

    def confirm(self) -> None:
        """Wait for the answer."""
        self._deadline = max(self._deadline, time.monotonic() + _TIMEOUT)
        self._answer()

    def _answer(self) -> None:
        """Read the answer, all of it before the deadline."""
        while not self._is_answer():
            pass

    def _is_answer(self) -> bool:
        """Read a frame: whether it is OK, and not a heartbeat."""
        size, kind = _HEAD.unpack(self._exactly(_HEAD.size))
        if not 4 <= size <= _MOST_FRAME or kind not in (_RESPONSE, _ERROR):
            raise ShmqError(f"forward to {self}: the server there does not speak nsqd's protocol")
        found = self._exactly(size - 4)
        if kind == _ERROR:
            words = said(found)
            text = f"{self}: {words}"
            if words.startswith(_REFUSALS) and "too big" in words:
                self._learn(words)
                raise Refused(f"it refused: {words}")
            lasts = words.startswith(_LASTING)
            raise ShmqError(f"forward to {text}") if lasts else Away(text)
        if found == b"OK":
            return True
        if found != _HEARTBEAT:
            raise Away(f"{self}: the answer is {said(found, 80)!r}, not OK")
        self._send_nop()
        return False

    def _learn(self, words: str) -> None:
        """Learn a limit from the words of an error."""
        if (match := _LIMIT.search(words)) is None:
            return
        self._said_at = time.monotonic()
        if match[1] == "message":
            self._limit = int(match[2])
        else:
            self._body_limit = int(match[2])

    def _send_nop(self) -> None:
        assert self._sock is not None
        try:
            self._sock.settimeout(left(self._deadline))
            self._sock.sendall(b"NOP\n")
        except OSError as exc:
            raise Away(f"{self}: {exc}") from exc

    def _exactly(self, count: int) -> bytes:
        assert self._sock is not None
        data = bytearray()
        while len(data) < count:
            try:
                more = received(self._sock, count - len(data), self._deadline)
            except OSError as exc:
                raise Away(f"{self}: {exc}") from exc
            if not more:
                raise Away(f"{self}: the server closed the connection")
            data += more
        return bytes(data)

    def idle(self) -> None:
        """Read what came without a question: heartbeats. An OK among it would be taken for the
        answer to the next batch, which it cannot be about. Raises Away if the connection has
        ended, before a batch is sent into it."""
        assert self._sock is not None
        self._deadline = time.monotonic() + _TIMEOUT
        while self._poll.poll(0):
            if self._is_answer():
                raise Away(f"{self}: it answers what it was not asked")

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
