"""A stream of NATS JetStream as the origin, with a durable consumer that says how far it was read.

A consumer delivers again what was not acknowledged, but behind newer messages, so its order after a
death is not that of the stream. So each `open` makes a consumer anew, NAME-1, NAME-2, ..., which
begins behind what was acknowledged and published, and then removes the older ones. A death between
the two leaves both, and the later of what they say is right. A forwarder that was believed dead
finds its consumer gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shmq.errors import ShmqError
from shmq.forward.headers import of_nats, read
from shmq.forward.login import NatsLogin
from shmq.forward.nats_connection import Message, NatsConnection
from shmq.forward.nats_streams import asked, check_stream, stream_name
from shmq.forward.origin import Portion, Reached, Sink
from shmq.forward.target import Away
from shmq.peers.documents import inner, table, tables, text
from shmq.peers.documents import number as count_of
from shmq.printing import printable, said

#: Nanoseconds after which a message that is not acknowledged comes again. Messages that a forwarder
#: that died had taken do not wait for it: the next one makes a consumer of its own.
_PATIENCE: Final = 3600 * 10**9
_MOST_BYTES: Final = 8 << 20
#: Seconds in which the messages of one question must have come.
_PULL: Final = 60.0
_LONGEST_NAME: Final = 400
_LONGEST_REPLY: Final = 4096
_MOST_CONSUMERS: Final = 100_000
_COUNT: Final = re.compile(r"[0-9]{1,18}")
#: The key in a consumer's metadata.
_OWNER: Final = "shmq"


class JetStreamOrigin:
    """A stream."""

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        login: NatsLogin,
        stream: str,
        wishes: Mapping[str, str],
        sink: Sink,
        with_headers: bool = True,
    ) -> None:
        """wishes: `consumer`, its name, and `subject`, which may have wildcards (default: all).
        Raises ValueError."""
        self._servers, self._login = servers, login
        self._stream, self._sink, self._with_headers = stream, sink, with_headers
        self._name, self._filter = wishes["consumer"], wishes.get("subject", "")
        check_stream(stream)
        check_stream(self._name, "consumer")
        self._connection: NatsConnection | None = None
        self._consumer = self._lane = ""
        self._seen = 0
        """How many messages the consumer has delivered."""
        self._reply = b""
        """Where the last message is acknowledged."""
        self._drained = False

    def __str__(self) -> str:
        return stream_name(self._servers, self._stream)

    # ---- connecting ----

    def open(self, reached: Reached) -> None:
        """Connect, and make a consumer that begins behind what was acknowledged and published."""
        self.close()
        self._connection = NatsConnection(self._servers, self._login)
        found = self._ask(f"STREAM.INFO.{self._stream}", {})
        if found is None:
            raise ShmqError(f"forward from {self}: there is no such stream")
        retention = inner(found, "config").get("retention", "limits")
        if retention != "limits":
            raise ShmqError(
                f"forward from {self}: its retention is {printable(str(retention), 40)}, so its "
                "messages end with their consumers; source a stream with retention limits from it, "
                "and use that"
            )
        # A stream that is deleted and created again counts anew.
        self._lane = f"nats/{self._stream}/{text(found, 'created', most=100)}/{self._name}"
        number, done, older = self._earlier()
        published, last = reached(self._lane), count_of(inner(found, "state"), "last_seq")
        if max(published, done) > last:
            raise ShmqError(
                f"forward from {self}: it has {last} messages, and {max(published, done)} were "
                "read: the server has lost some; look at what is missing, and go on with another "
                "?consumer=NAME"
            )
        self._make(number, max(published, done) + 1)
        for name in older:
            self._ask(f"CONSUMER.DELETE.{self._stream}.{name}", {})

    def _ask(self, what: str, document: dict[str, Any]) -> dict[str, Any] | None:
        assert self._connection is not None
        return asked(self._connection, what, document, str(self))

    def _earlier(self) -> tuple[int, int, list[str]]:
        """The number of the next consumer, the last message that an earlier one has acknowledged,
        and their names."""
        number, done, names, offset = 0, 0, [], 0
        while True:
            page = self._ask(f"CONSUMER.LIST.{self._stream}", {"offset": offset})
            found = tables(page, "consumers") if page and page.get("consumers") else []
            for each in found:
                full = text(each, "name", most=_LONGEST_NAME)
                name, _, count = full.rpartition("-")
                if name != self._name or not _COUNT.fullmatch(count):
                    continue
                self._check_owner(each)
                config, floor = inner(each, "config"), inner(each, "ack_floor")
                first = count_of(config, "opt_start_seq") if "opt_start_seq" in config else 1
                done = max(done, count_of(floor, "stream_seq"), first - 1)
                number = max(number, int(count))
                names.append(full)
            offset += len(found)
            if page is None or not found or offset >= count_of(page, "total"):
                return number + 1, done, names
            if offset > _MOST_CONSUMERS:
                raise Away(f"{self}: the stream has more than {_MOST_CONSUMERS} consumers")

    def _check_owner(self, consumer: dict[str, Any]) -> None:
        metadata = inner(consumer, "config").get("metadata")
        owner = table(metadata, "metadata").get(_OWNER) if metadata else None
        if owner != str(self._sink):
            raise ShmqError(
                f"forward from {self}: the consumer {consumer['name']} belongs to "
                f"{printable(str(owner or 'somebody else'), 200)}, not to {self._sink}; give "
                "another ?consumer=NAME, or --host as it was"
            )

    def _make(self, number: int, first: int) -> None:
        self._consumer = f"{self._name}-{number}"
        config = {
            "durable_name": self._consumer,
            "ack_policy": "all",
            "ack_wait": _PATIENCE,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
            "max_ack_pending": -1,
            "metadata": {_OWNER: str(self._sink)},
        }
        if self._filter:
            config["filter_subject"] = self._filter
        wish = {"stream_name": self._stream, "config": config, "action": "create"}
        self._ask(f"CONSUMER.DURABLE.CREATE.{self._stream}.{self._consumer}", wish)
        self._seen, self._reply, self._drained = 0, b"", False

    # ---- messages ----

    def named(self, lane: str, number: int) -> str:
        """By its number in the stream."""
        return f"{number} of the stream {self._stream}"

    def take(self, most: int, timeout: float) -> Sequence[Portion]:
        """The next messages."""
        self._drained = False
        assert self._connection is not None
        size = max(_MOST_BYTES, 2 * self._connection.likely_payload)
        found = self._pull({"batch": most, "no_wait": True, "max_bytes": size})
        if not found:
            self._drained = True
            found = self._pull({"batch": 1, "expires": int(timeout * 1e9)})
        if not found:
            return ()
        numbers = [self._number(message) for message in found]
        self._reply = found[-1].reply
        bodies = [message.body for message in found]
        own = read(of_nats, [message.head for message in found]) if self._with_headers else None
        return (Portion(self._lane, numbers, bodies, own),)

    def _pull(self, wish: dict[str, Any]) -> list[Message]:
        assert self._connection is not None
        body, reply = json.dumps(wish).encode(), self._connection.reply_subject()
        where = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}".encode()
        self._connection.send(b"PUB %b %b %d\r\n%b\r\n" % (where, reply, len(body), body))
        self._connection.begin(_PULL)
        found: list[Message] = []
        while len(found) < wish["batch"]:
            message = self._connection.message()
            status = message.status
            if not status:
                found.append(message)
            elif status in (b"404", b"408") or (status == b"409" and found):
                break
            elif status != b"100":
                why = said(message.head.partition(b"\r\n")[0])
                raise Away(f"{self}: the consumer {self._consumer} is gone: {why}")
        return found

    def _number(self, message: Message) -> int:
        """The message's number in the stream. Raises Away if one before it did not arrive."""
        words = message.reply.split(b".")
        at = 5 if len(words) == 9 else 7
        if words[:2] != [b"$JS", b"ACK"] or len(words) < 9:
            raise Away(f"{self}: a message came that is not of the consumer")
        if not (words[at] + words[at + 1]).isdigit() or len(message.reply) > _LONGEST_REPLY:
            raise Away(f"{self}: a message came that is not of the consumer")
        number, count = int(words[at]), int(words[at + 1])
        if count != self._seen + 1:
            raise Away(f"{self}: delivery {self._seen + 1} is missing, {count} came")
        self._seen = count
        return number

    def done(self, portions: Sequence[Portion]) -> None:
        """Acknowledge all that was taken."""
        assert self._connection is not None
        reply = self._connection.reply_subject()
        self._connection.send(b"PUB %b %b 4\r\n+ACK\r\n" % (self._reply, reply))
        if self._connection.answer() is None:
            raise Away(f"{self}: the consumer {self._consumer} is gone")

    def drained(self) -> bool:
        """Whether the last question was answered with no message."""
        return self._drained

    def idle(self) -> None:
        """Answer PINGs."""
        assert self._connection is not None
        self._connection.idle()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
