"""NATS JetStream as a target: every message once.

The messages of a lease and the marker are one atomic batch (nats-server 2.12). The marker, its last
message, is stored only if the marker before it is the one that this forwarder has read or stored:
so neither a batch that is repeated nor one of a forwarder that was believed dead is stored twice.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shmq.errors import MessageTooBig, ShmqError
from shmq.forward.marker import Marker
from shmq.forward.nats_connection import NatsConnection, document_of
from shmq.forward.target import Away, Source

#: A batch has at most 1000 messages, and one of them is the marker.
_MOST: Final = 999
_MOST_BYTES: Final = 8 << 20
#: Room in a message for the headers of a batch.
_HEADERS: Final = 256
#: Batches between two purges of old markers.
_PURGE_EVERY: Final = 500

_NOT_FOUND: Final = 404
_WRONG_LAST_SEQUENCE: Final = 10071

_SUBJECT: Final = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")


class JetStream:
    """A stream."""

    most = _MOST
    most_bytes = _MOST_BYTES
    exact = True

    def __init__(
        self,
        where: tuple[str, int],
        login: dict[str, str],
        stream: str,
        source: Source,
        wishes: Mapping[str, str],
        create: bool = False,
    ) -> None:
        """login: for CONNECT. wishes: `subject` (default: the topic) and `marker`.
        Raises ValueError."""
        self._where, self._login = where, login
        self._stream, self._source, self._create = stream, source, create
        place = (source.host, source.instance, source.topic, source.channel)
        self._subject = wishes.get("subject", source.topic)
        self._marker = wishes.get("marker", ".".join(("shmq", stream, *place)))
        for subject in (self._subject, self._marker):
            if not _SUBJECT.fullmatch(subject):
                raise ValueError(f"{subject!r} is no subject to publish to")
        if self._subject == self._marker:
            raise ValueError("the marker needs a subject of its own")
        if not re.fullmatch(r"[^\s.*>/\\]+", stream):
            raise ValueError(f"{stream!r} is no name of a stream")
        self._connection: NatsConnection | None = None
        self._last = 0
        """The sequence of the last marker; 0: there is none."""
        self._sent = 0
        self._batches = 0

    def __str__(self) -> str:
        return f"nats://{self._where[0]}:{self._where[1]}/{self._stream}"

    # ---- connecting ----

    def open(self) -> Marker | None:
        """Connect, check the stream, and read the last marker."""
        self.close()
        self._connection = connection = NatsConnection(*self._where, self._login)
        self._batch = secrets.token_hex(8)
        found = self._ask("STREAM.INFO", {})
        if found is None and self._create:
            found = self._made()
        if found is None:
            raise ShmqError(
                f"forward to {self}: there is no such stream; make one with allow_atomic and the "
                f"subjects {self._subject} and {self._marker}, or give --create"
            )
        self._check(found["config"])
        self._limit = connection.max_payload - _HEADERS
        self._purge()
        return self._read_marker()

    def _ask(self, verb: str, document: dict[str, Any], absent: int = 0) -> dict[str, Any] | None:
        """Ask about the stream; None if it, or a message, does not exist."""
        assert self._connection is not None
        answer = self._connection.ask(f"$JS.API.{verb}.{self._stream}", document)
        error = answer.get("error")
        if error is None:
            return answer
        if error.get("code") == _NOT_FOUND:
            return None
        text = f"{verb} of {self}: {error.get('description')}"
        if error.get("code") == 503:
            raise Away(text)
        raise ShmqError(text)

    def _made(self) -> dict[str, Any] | None:
        markers = f"shmq.{self._stream}.>"
        if not _matches(markers, self._marker):
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
                f"forward to {self}: its retention is {config['retention']}, which removes "
                "markers; use a stream with retention limits, and source the other one from it"
            )
        for subject in (self._subject, self._marker):
            if not any(_matches(pattern, subject) for pattern in config.get("subjects") or ()):
                raise ShmqError(
                    f"forward to {self}: the stream does not have the subject {subject}; "
                    "add it, or name another with ?subject= and ?marker="
                )

    def _read_marker(self) -> Marker | None:
        answer = self._ask("STREAM.MSG.GET", {"last_by_subj": self._marker})
        if answer is None:
            self._last = 0
            return None
        message = answer["message"]
        self._last = int(message["seq"])
        where = f"{self}, subject {self._marker}"
        return Marker.decoded(base64.b64decode(message.get("data", "")), where)

    def _purge(self) -> None:
        """Remove all markers but the last; a stream that does not allow it keeps them."""
        assert self._connection is not None
        wish = {"filter": self._marker, "keep": 1}
        self._connection.ask(f"$JS.API.STREAM.PURGE.{self._stream}", wish)

    # ---- batches ----

    def send(self, bodies: Sequence[bytes], marker: Marker) -> None:
        """Begin to store the bodies and the marker. Raises MessageTooBig."""
        assert self._connection is not None
        self._batches += 1
        if self._batches % _PURGE_EVERY == 0:
            self._purge()
        self._sent = len(bodies)
        batch = f"{self._batch}{self._batches:x}".encode()
        self._connection.send(self._frames(bodies, batch, marker.encoded()))

    def _frames(self, bodies: Sequence[bytes], batch: bytes, marker: bytes) -> bytes:
        assert self._connection is not None
        largest = max(map(len, (*bodies, marker)))
        if largest > self._limit:
            raise MessageTooBig(
                f"forward to {self}: a message has {largest} bytes and the server takes "
                f"{self._limit}; raise its max_payload, or take the message out of the channel"
            )
        start = b"NATS/1.0\r\nNats-Batch-Id:%b\r\nNats-Batch-Sequence:" % batch
        verb = b"HPUB %b " % self._subject.encode()
        frames = []
        for number, body in enumerate(bodies, 1):
            head = b"%b%d\r\n\r\n" % (start, number)
            size = len(head)
            frames.append(b"%b%d %d\r\n%b%b\r\n" % (verb, size, size + len(body), head, body))
        head = b"%b%d\r\nNats-Batch-Commit:1\r\n%b\r\n" % (start, len(bodies) + 1, self._fence())
        size = len(head)
        reply = self._connection.reply_subject()
        verb = b"HPUB %b %b " % (self._marker.encode(), reply)
        frames.append(b"%b%d %d\r\n%b%b\r\n" % (verb, size, size + len(marker), head, marker))
        return b"".join(frames)

    def _fence(self) -> bytes:
        return b"Nats-Expected-Last-Subject-Sequence:%d\r\n" % self._last

    def confirm(self) -> None:
        """Wait until the batch is stored. Raises Away also if another marker came before it: the
        next `open` reads that."""
        assert self._connection is not None
        said = self._connection.answer()
        if said is None:
            raise Away(f"{self}: no stream takes the subject {self._marker}")
        answer = document_of(said, str(self))
        error = answer.get("error")
        if error is not None and error.get("err_code") == _WRONG_LAST_SEQUENCE:
            raise Away(f"{self}: another marker was stored in the meantime")
        if error is not None:
            raise Away(f"{self}: {error.get('description')}")
        if answer.get("count") != self._sent + 1:
            raise Away(f"{self}: the server stored {answer.get('count')} of {self._sent + 1}")
        self._last = int(answer["seq"])

    def idle(self) -> None:
        """Answer PINGs."""
        assert self._connection is not None
        self._connection.idle()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _matches(pattern: str, subject: str) -> bool:
    """Whether a stream's subject, which may have wildcards, takes this one."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > place
        if place >= len(tokens) or token not in ("*", tokens[place]):
            return False
    return len(wanted) == len(tokens)
