"""Reading one part of a lease: LREAD, again and again, from the message after the last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from shmq import arguments
from shmq.errors import MemoryLost
from shmq.leased import READ_BYTES, READ_ROWS
from shmq.remote.connection import ERROR, Connection, Lost, document_of
from shmq.remote.connections import Connections
from shmq.remote.rows import HEAD, MOST_PROPERTIES, MOST_ROWS, ROWS, RemoteBatch, decoded

#: Bytes that one LREAD asks for. The connection is idle for one way there and back after each.
_CREDIT: Final = 32 << 20

#: Bytes of bodies of one frame: it stays in the processor's caches on its way.
_FRAME: Final = 512 << 10


class Reader:
    """Reads one part. Each frame is yielded when it has arrived. Meanwhile the server sends the
    next ones, as many as the buffers of the sockets have room for."""

    def __init__(
        self,
        connections: Connections,
        channel: tuple[str, str],
        lease: tuple[int, int],
        identity: str | None,
        mine: dict[str, Any],
        rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
        properties: bool = False,
    ) -> None:
        """channel: topic and channel. lease: its id and the part. identity: of the channel; None:
        the present one. mine: `holder` or `secret`, which prove that the lease may be read."""
        lease = (arguments.lease("lease", lease[0]), lease[1])
        part, rows, max_bytes = arguments.reading(lease[1], rows, max_bytes)
        self._connections = connections
        self._channel = channel
        self._tried = f"read part {lease[1]} of lease {lease[0]} of {'/'.join(channel)}"
        self._wish: dict[str, Any] = {
            "lease": lease[0],
            "part": part,
            "rows": min(rows, MOST_ROWS),
            "bytes": min(max_bytes, _FRAME),
            "credit": _CREDIT,
            "properties": properties,
            **mine,
        }
        # the bodies, the columns beside them, and the properties
        of_row = 64 + (MOST_PROPERTIES if properties else 0)
        self._most_frame = (
            HEAD.size
            + 8
            + self._wish["bytes"]
            + connections.most_body
            + of_row * self._wish["rows"]
        )
        self._identity = identity
        self._at = 0
        """Index of the next message."""
        self._connection: Connection | None = None

    def batches(self) -> Iterator[RemoteBatch]:
        """Yield the messages in batches. Raises as `RemoteBroker.read_lease`."""
        ended = False
        if self._identity is None:
            answer = self._connections.ask("LINFO", self._channel)
            self._identity = str(answer["identity"])
        try:
            while (batch := self._connections.again(self._next, self._tried)) is not None:
                yield batch
            ended = True
        finally:
            self._leave(clean=ended)

    def _ask(self, connection: Connection, deadline: float) -> None:
        wish = {**self._wish, "from": self._at, "identity": self._identity}
        connection.begin("LREAD", self._channel, wish, deadline)

    def _leave(self, clean: bool) -> None:
        """Give the connection back. clean: nothing is on its way on it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if clean:
            self._connections.returned(connection)
        else:
            connection.close()

    def _next(self, deadline: float) -> RemoteBatch | None:
        """The next batch; None behind the last of the part. After an OSError the next call goes on
        over another connection, with the message after the last one that arrived: the server has
        compared the identity, and each frame has a checksum."""
        done = False
        try:
            if self._connection is None:
                self._connection = self._connections.lent(deadline)
                self._ask(self._connection, deadline)
            batch = self._receive(self._connection, deadline)
            done = True
            return batch
        except OSError:
            self._connections.drop_idle()
            raise
        finally:
            if not done:
                self._leave(clean=False)

    def _receive(self, connection: Connection, deadline: float) -> RemoteBatch | None:
        while True:
            kind, data = connection.frame(deadline, self._most_frame)
            if kind == ERROR:
                connection.refused(data, self._tried)
            if kind == ROWS:
                return self._batch(data)
            answer = document_of(bytes(data), self._tried)
            if answer.get("next") != self._at or not isinstance(answer.get("end"), bool):
                raise Lost(f"{self._tried}: the answer is not as expected: {answer}")
            if answer.get("identity") != self._identity:
                raise MemoryLost(
                    f"{self._tried}: the channel was {self._identity}, and is now "
                    f"{answer.get('identity')}"
                )
            if answer["end"]:
                return None
            self._ask(connection, deadline)

    def _batch(self, data: memoryview) -> RemoteBatch:
        try:
            index, batch = decoded(data)
        except ValueError as exc:
            raise Lost(f"{self._tried}: {exc}") from None
        if len(batch) > self._wish["rows"]:
            raise Lost(f"{self._tried}: {len(batch)} rows came, of at most {self._wish['rows']}")
        if index != self._at or not len(batch):
            raise Lost(f"{self._tried}: message {self._at} was to come, not {index}")
        self._at += len(batch)
        return batch
