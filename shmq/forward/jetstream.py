"""NATS JetStream as a target: every message once.

The messages of a lease and the marker are one atomic batch (nats-server 2.12). The marker, its last
message, is stored only if the marker before it is the one that this forwarder has read or stored:
so neither a batch that is repeated nor one of a forwarder that was believed dead is stored twice.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shmq.errors import MessageTooBig, ShmqError
from shmq.forward.headers import nats_lines
from shmq.forward.login import NatsLogin
from shmq.forward.marker import Marker
from shmq.forward.nats_connection import NatsConnection, document_of
from shmq.forward.nats_streams import SUBJECT, asked, check_stream, matches, stream_name
from shmq.forward.target import Away, Source
from shmq.peers.documents import BadAnswer, inner, listed, number, text
from shmq.printing import LONGEST, printable

#: A batch has at most 1000 messages, and one of them is the marker.
_MOST: Final = 999
_MOST_BYTES: Final = 8 << 20
#: The most bytes of the headers of a batch, in any message but the marker.
_HEADERS: Final = 96
#: The most bytes of the headers of a marker.
_MARKER_HEADERS: Final = 256
#: The most bytes of a marker but for its ids and the names of its source.
_MARKER: Final = 256
#: Batches between two purges of old markers.
_PURGE_EVERY: Final = 500

_WRONG_LAST_SEQUENCE: Final = 10071


class JetStream:
    """A stream."""

    most = _MOST
    most_bytes = _MOST_BYTES
    exact = True
    has_headers = True

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        login: NatsLogin,
        stream: str,
        source: Source,
        wishes: Mapping[str, str],
        create: bool = False,
    ) -> None:
        """servers: of a cluster. wishes: `subject` (default: the topic) and `marker`.
        Raises ValueError."""
        self._servers, self._login = servers, login
        self._stream, self._source, self._create = stream, source, create
        place = (source.host, source.instance, source.topic, source.channel)
        self._subject = wishes.get("subject", source.topic)
        self._marker = wishes.get("marker", ".".join(("shmq", stream, *place)))
        for subject, name in ((self._subject, "subject"), (self._marker, "marker")):
            if not SUBJECT.fullmatch(subject):
                raise ValueError(f"{subject!r} is no subject to publish to; give ?{name}=SUBJECT")
        if self._subject == self._marker:
            raise ValueError("the marker needs a subject of its own")
        check_stream(stream)
        self._connection: NatsConnection | None = None
        self._last = 0
        """The sequence of the last marker; 0: there is none."""
        self._sent = 0
        self._batches = 0

    def __str__(self) -> str:
        return stream_name(self._servers, self._stream)

    # ---- connecting ----

    def open(self) -> Marker | None:
        """Connect, check the stream, and read the last marker."""
        self.close()
        self._connection = connection = NatsConnection(self._servers, self._login)
        self._batch = secrets.token_hex(8)
        found = self._ask("STREAM.INFO", {})
        if found is None and self._create:
            found = self._made()
        if found is None:
            raise ShmqError(
                f"forward to {self}: there is no such stream; make one with allow_atomic and the "
                f"subjects {self._subject} and {self._marker}, or give --create"
            )
        config = inner(found, "config")
        self._check(config)
        self._learn(connection.max_payload, config)
        self._purge()
        return self._read_marker()

    def _ask(self, verb: str, document: dict[str, Any]) -> dict[str, Any] | None:
        """Ask about the stream; None if it, or a message, does not exist."""
        assert self._connection is not None
        return asked(self._connection, f"{verb}.{self._stream}", document, str(self))

    def _made(self) -> dict[str, Any] | None:
        markers = f"shmq.{self._stream}.>"
        if not matches(markers, self._marker):
            markers = self._marker
        config = {
            "name": self._stream,
            "subjects": [self._subject, markers],
            "storage": "file",
            "retention": "limits",
            "num_replicas": 1,
            "allow_atomic": True,
        }
        return self._ask("STREAM.CREATE", config)

    def _check(self, config: dict[str, Any]) -> None:
        """Raise ShmqError if the stream cannot take atomic batches or does not keep the marker."""
        if not config.get("allow_atomic"):
            raise ShmqError(
                f"forward to {self}: the stream takes no atomic batches; set allow_atomic "
                "(it needs nats-server 2.12 or newer)"
            )
        if config.get("retention") not in (None, "limits"):
            raise ShmqError(
                f"forward to {self}: its retention is {printable(str(config['retention']), 40)}, "
                "which removes markers; use a stream with retention limits, and source the other "
                "one from it"
            )
        for subject in (self._subject, self._marker):
            if not any(matches(str(pattern), subject) for pattern in listed(config, "subjects")):
                raise ShmqError(
                    f"forward to {self}: the stream does not have the subject {subject}; "
                    "add it, or name another with ?subject= and ?marker="
                )

    def _learn(self, payload: int, config: dict[str, Any]) -> None:
        """Learn how large a message may be, with its headers, and how many ids a marker has room
        for. Raises ShmqError if there is none."""
        self._limit, self._limited = payload, f"the server's max_payload is {payload} bytes"
        for name in ("max_msg_size", "max_bytes"):
            most = config.get(name, -1)
            if type(most) is int and 0 < most < self._limit:
                self._limit, self._limited = most, f"the stream's {name} is {most} bytes"
        room = self._limit - _MARKER_HEADERS - _MARKER - 2 * len(str(self._source))
        self.most = min(_MOST, room // 16)  # as many may be in doubt
        if self.most < 1:
            raise ShmqError(
                f"forward to {self}: {self._limited}, which has no room for a marker; raise it"
            )

    def _read_marker(self) -> Marker | None:
        answer = self._ask("STREAM.MSG.GET", {"last_by_subj": self._marker})
        if answer is None:
            self._last = 0
            return None
        message = inner(answer, "message")
        self._last = number(message, "seq")
        where = f"{self}, subject {self._marker}"
        try:
            body = base64.b64decode(text(message, "data") if "data" in message else "")
        except ValueError as exc:
            raise BadAnswer(f"message.data is no base64: {exc}") from None
        return Marker.decoded(body, where)

    def _purge(self) -> None:
        """Remove all markers but the last; a stream that does not allow it keeps them."""
        assert self._connection is not None
        wish = {"filter": self._marker, "keep": 1}
        self._connection.ask(f"$JS.API.STREAM.PURGE.{self._stream}", wish)

    # ---- batches ----

    def too_big(
        self, bodies: Sequence[bytes], properties: Sequence[Mapping[str, bytes]] | None
    ) -> Mapping[int, str]:
        """The messages that are too big with their headers."""
        room = self._limit - _HEADERS
        if properties is None:
            sizes = list(map(len, bodies))
        else:
            pairs = zip(bodies, properties, strict=True)
            sizes = [len(body) + len(nats_lines(own)) for body, own in pairs]
        if max(sizes) <= room:
            return {}
        why = f"{self._limited}, of which {_HEADERS} are for the headers of a batch"
        return {place: why for place, size in enumerate(sizes) if size > room}

    def send(
        self,
        bodies: Sequence[bytes],
        marker: Marker,
        properties: Sequence[Mapping[str, bytes]] | None = None,
    ) -> None:
        """Begin to store the bodies and the marker. Raises Refused, and MessageTooBig for the
        marker."""
        assert self._connection is not None
        frames = self._frames(bodies, properties)
        if self._batches % _PURGE_EVERY == _PURGE_EVERY - 1:
            self._purge()
        last = self._last_frame(len(bodies), marker.encoded())
        self._batches += 1
        self._sent = len(bodies)
        self._connection.send(frames + last)

    def _head(self) -> bytes:
        """The headers of every message of the next batch, as far as they are the same."""
        batch = f"{self._batch}{self._batches:x}".encode()
        return b"NATS/1.0\r\nNats-Batch-Id:%b\r\nNats-Batch-Sequence:" % batch

    def _frames(
        self, bodies: Sequence[bytes], properties: Sequence[Mapping[str, bytes]] | None
    ) -> bytes:
        start = self._head()
        verb = b"HPUB %b " % self._subject.encode()
        frames = []
        for place, body in enumerate(bodies, 1):
            own = b"" if properties is None else nats_lines(properties[place - 1])
            head = b"%b%d\r\n%b\r\n" % (start, place, own)
            size = len(head)
            frames.append(b"%b%d %d\r\n%b%b\r\n" % (verb, size, size + len(body), head, body))
        return b"".join(frames)

    def _last_frame(self, count: int, marker: bytes) -> bytes:
        """Of the marker, which ends a batch behind `count` messages."""
        assert self._connection is not None
        if len(marker) + _MARKER_HEADERS > self._limit:
            raise MessageTooBig(
                f"forward to {self}: the marker of a batch has {len(marker)} bytes, and "
                f"{self._limited}; raise it, or give a lower --batch"
            )
        fence = self._fence()
        head = b"%b%d\r\nNats-Batch-Commit:1\r\n%b\r\n" % (self._head(), count + 1, fence)
        size = len(head)
        words = self._marker.encode(), self._connection.reply_subject(), size, size + len(marker)
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (*words, head, marker)

    def _fence(self) -> bytes:
        return b"Nats-Expected-Last-Subject-Sequence:%d\r\n" % self._last

    def confirm(self) -> None:
        """Wait until the batch is stored. Raises Away also if another marker came before it: the
        next `open` reads that."""
        assert self._connection is not None
        found = self._connection.answer()
        if found is None:
            raise Away(f"{self}: no stream takes the subject {self._marker}")
        answer = document_of(found, str(self))
        error = None if answer.get("error") is None else inner(answer, "error")
        if error is not None and error.get("err_code") == _WRONG_LAST_SEQUENCE:
            raise Away(f"{self}: another marker was stored in the meantime")
        if error is not None:
            raise Away(f"{self}: {printable(str(error.get('description')), LONGEST)}")
        stored = number(answer, "count")
        if stored != self._sent + 1:
            raise Away(f"{self}: the server stored {stored} of {self._sent + 1}")
        self._last = number(answer, "seq")

    def idle(self) -> None:
        """Answer PINGs."""
        assert self._connection is not None
        self._connection.idle()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
