"""The connections of one gateway process, and their limits: how many there are of all kinds, and
how many bytes the buffers of TCP connections hold."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from typing import Any, Final, Protocol

from shmq.door.acceptor import AT_ONCE
from shmq.door.seats import RESERVE, Seats
from shmq.gateway.context import Context
from shmq.gateway.delivery_waiter import DeliveryWaiter

#: Descriptors that connections leave free for other uses: an eighth of the limit, within these
#: bounds.
_RESERVE_LEAST: Final = 32
_RESERVE_MOST: Final = 256
#: Those that may be taken beyond the places: the reserve's, and of connections that were accepted
#: or ended and have not given their descriptors back (so many of each listening socket, of which
#: there are three).
_BEYOND: Final = RESERVE + 3 * AT_ONCE
#: Seconds between two counts of the descriptors that are not connections; they are also counted
#: whenever there are so many connections more.
_COUNT_EVERY: Final = 1.0
_COUNT_GROWN: Final = 16


class Connection(Protocol):
    """One client's connection; `tcp.Connection` implements it."""

    session: Any
    peer: str
    held: int
    """Bytes in its buffers, as last reported."""

    def count(self) -> None:
        """Report the size of the buffers."""

    def trim(self) -> None:
        """Shrink an idle input buffer to its first size."""

    def shed(self, reason: str) -> bool:
        """Close the connection because the process's buffers exceed their limit. Returns true if
        that frees memory."""

    def changed(self) -> None:
        """The process's options have changed."""

    def describe(self) -> dict[str, Any]:
        """Return `Session.describe`."""

    @property
    def user(self) -> str:
        """The user of the access file; empty: there is none."""

    def published(self) -> dict[bytes, int]:
        """Topic -> messages that were published over this connection so far."""

    def stop(self) -> None:
        """Close the connection because the process ends."""


class Connections:
    """The connections of one process; used in the event loop's thread only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.all: set[Connection] = set()
        self.waiter = DeliveryWaiter(context.broker.native())
        self.held = 0
        """Bytes in the connections' buffers, by their last reports."""
        self._files = len(os.listdir("/proc/self/fd"))  # descriptors that are not connections
        self._counted_at = time.monotonic()
        self._count_from = 0  # connections
        self._sheds = False
        self.seats = Seats(self._most, lambda: context.options.max_connections_per_address)
        """The places of all connections of the process, HTTP's too."""

    def enter(self, connection: Connection) -> None:
        """Register a connection that has a seat."""
        self.all.add(connection)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        if connection in self.all:
            self.all.remove(connection)
            self._context.published.collect(connection, last=True)

    def _most(self) -> int:
        """Return the configured limit, or less if there are not enough descriptors: threads, mapped
        topics and the reserve need some too. It is computed each time because their number and the
        process's limit of descriptors may change."""
        configured = self._context.options.max_connections
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return configured or 1 << 30
        seats = self.seats
        taken = len(seats.taken) + len(seats.reserve) + len(seats.ending)
        now = time.monotonic()
        if taken * 2 > files - self._files and (
            now - self._counted_at >= _COUNT_EVERY or taken >= self._count_from
        ):
            self._counted_at, self._count_from = now, taken + max(taken // 4, _COUNT_GROWN)
            with contextlib.suppress(OSError):  # there is no descriptor for this either
                self._files = max(len(os.listdir("/proc/self/fd")) - taken, self._files)
        reserve = min(max(files // 8, _RESERVE_LEAST), _RESERVE_MOST) + _BEYOND
        reserve += max(len(seats.ending) - AT_ONCE, 0)
        allowed = max(files - self._files - reserve, 1)
        return min(configured, allowed) if configured else allowed

    def hold(self, more: int) -> None:
        """Add `more` bytes (negative: fewer) to the connections' buffers. While the sum exceeds the
        limit, the connection with the largest buffers is closed."""
        self.held += more
        most = self._context.options.max_buffered_bytes
        if self.held <= most or self._sheds:
            return
        self._sheds = True
        try:
            for connection in self.all:
                connection.count()
                if self.held > most:
                    connection.trim()
            while self.held > most and self.all:
                largest = max(self.all, key=lambda connection: connection.held)
                if not largest.shed(f"buffered bytes exceed limit of {most}"):
                    break  # to close it would free nothing
        finally:
            self._sheds = False

    def describe(self) -> list[dict[str, Any]]:
        """Return `Session.describe` of each connection, with this process's `pid`."""
        pid = os.getpid()
        return [{**connection.describe(), "pid": pid} for connection in self.all]

    def changed(self) -> None:
        """The process's options have changed."""
        for connection in list(self.all):
            connection.changed()

    def stop(self) -> None:
        """Close all connections because the process ends."""
        for connection in list(self.all):
            connection.stop()
