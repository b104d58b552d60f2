"""Reading one part of a lease: LREAD, again and again, from the message after the last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from shmq.errors import MemoryLost
from shmq.leased import READ_BYTES, READ_ROWS
from shmq.remote.connection import ERROR, Connection, Lost, document_of
from shmq.remote.connections import Connections
from shmq.remote.rows import MOST_ROWS, ROWS, RemoteBatch, decoded

#: Bytes that one LREAD asks for: several batches, so that the server is seldom idle.
_CREDIT: Final = 8 << 20

#: Bytes of bodies of one frame: the gateway sends this faster than larger ones.
_FRAME: Final = 512 << 10

_Window = tuple[list[RemoteBatch], int, bool]


class Reader:
    """Reads one part in windows: the answers to one LREAD each. The next window is asked for before
    the batches of the last one are yielded, so the server reads ahead by one window."""

    def __init__(
        self,
        connections: Connections,
        channel: tuple[str, str],
        lease: tuple[int, int],
        identity: str | None,
        rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
        properties: bool = False,
    ) -> None:
        """channel: topic and channel. lease: its id and the part. identity: of the channel; None:
        the present one."""
        if rows < 1 or max_bytes < 1:
            raise ValueError(f"rows and max_bytes must be 1 or more, not {rows} and {max_bytes}")
        self._connections = connections
        self._channel = channel
        self._tried = f"read part {lease[1]} of lease {lease[0]} of {'/'.join(channel)}"
        self._wish: dict[str, Any] = {
            "lease": lease[0],
            "part": lease[1],
            "rows": min(rows, MOST_ROWS),
            "bytes": min(max_bytes, _FRAME),
            "credit": _CREDIT,
            "properties": properties,
        }
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
            while not ended:
                batches, self._at, ended = self._connections.again(self._window, self._tried)
                if not ended and self._connection is not None:
                    self._ask_ahead(self._connection)
                yield from batches
        finally:
            if self._connection is not None:
                self._leave(clean=ended)

    def _ask(self, connection: Connection, deadline: float) -> None:
        wish = {**self._wish, "from": self._at, "identity": self._identity}
        connection.begin("LREAD", self._channel, wish, deadline)

    def _ask_ahead(self, connection: Connection) -> None:
        try:
            self._ask(connection, self._connections.deadline())
        except OSError:  # `_window` asks again
            self._leave(clean=False)

    def _leave(self, clean: bool) -> None:
        """Give the connection back. clean: nothing is on its way on it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if clean:
            self._connections.returned(connection)
        else:
            connection.close()

    def _window(self, deadline: float) -> _Window:
        """The answer to the LREAD that was sent ahead, or to one that is sent now; or the messages
        that came before the connection broke, which are as good, because the server has compared
        the identity and each frame has a checksum. Raises OSError if none came."""
        batches: list[RemoteBatch] = []
        done = ended = False
        try:
            if self._connection is None:
                self._connection = self._connections.lent(deadline)
                self._ask(self._connection, deadline)
            ended = self._receive(self._connection, batches, deadline)
            done = True
        except OSError:
            self._connections.drop_idle()
            if not batches:
                raise
        finally:
            if not done:
                self._leave(clean=False)
        return batches, self._at + sum(len(batch) for batch in batches), ended

    def _receive(self, connection: Connection, batches: list[RemoteBatch], deadline: float) -> bool:
        """Add the frames of one LREAD to `batches`. Returns True after the last of the part."""
        at = self._at
        while True:
            kind, data = connection.frame(deadline)
            if kind == ERROR:
                connection.refused(data, self._tried)
            if kind == ROWS:
                try:
                    index, batch = decoded(data)
                except ValueError as exc:
                    raise Lost(f"{self._tried}: {exc}") from None
                if index != at or not len(batch):
                    raise Lost(f"{self._tried}: message {at} was to come, not {index}")
                batches.append(batch)
                at += len(batch)
                continue
            answer = document_of(bytes(data), self._tried)
            if answer.get("next") != at or not isinstance(answer.get("end"), bool):
                raise Lost(f"{self._tried}: the answer is not as expected: {answer}")
            if answer.get("identity") != self._identity:
                raise MemoryLost(
                    f"{self._tried}: the channel was {self._identity}, and is now "
                    f"{answer.get('identity')}"
                )
            return bool(answer["end"])
