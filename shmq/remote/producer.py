"""Publishing to one topic of a broker on another host."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from typing import Any, Final, Self

from shmq import arguments, patience
from shmq.errors import BadArgument, Gone, Unconfirmed
from shmq.printing import said
from shmq.remote.connections import Connections

_SIZE: Final = struct.Struct(">i")
_OK: Final = b"OK"
#: The most likely reason why a broker is late.
_LATE: Final = (
    "; most likely a channel is full: add consumers there, wait longer (timeout=), or raise the "
    "limit of the channel (its log names it)"
)
#: Seconds to wait for room, if the caller sets no limit.
_ROOM: Final = 60.0


class RemoteProducer:
    """Publishes to one topic; returned by `RemoteBroker.producer`. Any thread may use it.

    A message is published when a call returns. A call that raises Unconfirmed may or may not have
    published: the connection broke, or the time was over, before the broker answered. It is never
    repeated by itself; `RemoteBroker.stage` and `commit` publish once.

    nsqd's protocol carries no properties and no times to live, and its answer names no id.
    """

    def __init__(self, connections: Connections, topic: str) -> None:
        self.topic = topic
        self.closed = False
        self._connections = connections

    def publish(self, body: Any, defer: float | None = None, timeout: float | None = None) -> None:
        """Publish one body (bytes or any buffer).

        defer: seconds before it may be delivered, at most max_req_timeout. timeout: seconds to wait
        for room, besides the client's timeout for the answer; None: 60. Raises BadArgument (the
        body is empty, or deferred for too long), MessageTooBig, Rejected, Unconfirmed,
        Unreachable, Unauthorized, ShmqError with the broker's reason, and TypeError and ValueError
        for what is no body and no number of seconds.
        """
        data = arguments.body(f"publish to {self.topic!r}", body)
        if defer is None:
            line = f"PUB {self.topic}\n".encode()
        else:
            line = f"DPUB {self.topic} {self._milliseconds(defer)}\n".encode()
        if not data:
            raise BadArgument(f"publish to {self.topic}: a message has 1 byte or more")
        self._publish(line + _SIZE.pack(len(data)) + data, timeout)

    def defer(self, body: Any, seconds: float, timeout: float | None = None) -> None:
        """Publish one body that may be delivered after `seconds`. Raises as `publish`."""
        self.publish(body, seconds, timeout)

    def publish_many(self, bodies: Iterable[Any], timeout: float | None = None) -> None:
        """Publish many bodies in order, all or none; nsqd's MPUB. All together may have
        max_body_size bytes. Raises as `publish`, and MessageTooBig also if the list as a whole can
        never fit in memory, or into a channel with `max_messages` or `max_bytes`."""
        parts: list[bytes] = []
        count = size = 0
        for body in arguments.bodies("publish_many", bodies):
            data = arguments.body(f"publish to {self.topic!r}", body, count)
            if not data:
                raise BadArgument(f"publish to {self.topic}: a message has 1 byte or more")
            parts += (_SIZE.pack(len(data)), data)
            count, size = count + 1, size + 4 + len(data)
        if not count:
            return
        head = f"MPUB {self.topic}\n".encode() + _SIZE.pack(size + 4) + _SIZE.pack(count)
        self._publish(head + b"".join(parts), timeout)

    def _publish(self, data: bytes, timeout: float | None) -> None:
        if self.closed:
            raise Gone(f"publish to {self.topic!r}: the producer was closed")
        tried = f"publish to {self.topic}"
        room = arguments.limit("timeout", timeout)
        room = _ROOM if room is None else room
        connections = self._connections
        # only to connect is repeated: from the first byte on the broker may have the message
        connection = connections.again(connections.lent, tried)
        deadline = connections.deadline(room)
        began = time.monotonic()
        try:
            connection.send(data, deadline, tried)
            if not connection.hears(patience.AFTER, deadline) and time.monotonic() < deadline:
                patience.say(
                    f"{tried}: the broker at {connections.address} has not answered, most likely "
                    "because a channel is full; add consumers there, or raise the limit of the "
                    "channel (its log names it)"
                )
            answer = connection.response(deadline, tried)
        except OSError as exc:
            connection.close()
            raise Unconfirmed(
                f"{tried}: the broker at {connections.address} has not answered within "
                f"{time.monotonic() - began:.1f} s ({exc}); the messages may or may not have been "
                f"published{_LATE if time.monotonic() >= deadline else ''}"
            ) from exc
        except BaseException:
            connection.close()
            raise
        if answer != _OK:
            connection.close()
            raise Unconfirmed(f"{tried}: the answer is {said(answer, 80)!r}; it may be published")
        connections.returned(connection)

    def _milliseconds(self, defer: float) -> int:
        """As DPUB has it. nsqd's numbers of 64 bits begin again at 0 when they are too large."""
        seconds = arguments.delay("defer", defer)
        if seconds > arguments.LONGEST:
            raise BadArgument(
                f"publish to {self.topic}: deferred for longer than any broker's max_req_timeout: "
                f"{seconds:.3g} s"
            )
        return round(seconds * 1000)

    def close(self) -> None:
        """Raise Gone from now on. Idempotent."""
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<shmq.RemoteProducer of {self.topic!r} on {self._connections.address}{state}>"
