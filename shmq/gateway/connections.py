"""The TCP connections of one gateway process, and their limits: how many there are, and how many
bytes their buffers hold."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import Counter
from typing import Any, Final, Protocol

from shmq.gateway.context import Context
from shmq.gateway.delivery_waiter import DeliveryWaiter

#: Descriptors that TCP connections leave free for other uses: an eighth of the limit, within these
#: bounds.
_RESERVE_LEAST: Final = 32
_RESERVE_MOST: Final = 256

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """One client's connection; `tcp.Connection` implements it."""

    session: Any
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
        self._addresses: Counter[str] = Counter()
        self._sheds = False
        self._refused = 0
        self._refused_at = -1.0

    def enter(self, connection: Connection) -> str:
        """Register an accepted connection. Returns the reason to refuse it, empty if it may
        stay."""
        ip, options = connection.session.ip, self._context.options
        most = self._most()
        each = options.max_connections_per_address
        reason = ""
        if len(self.all) >= most:
            reason = f"connections exceed limit of {most}"
        elif each and ip and self._addresses[ip] >= each:
            reason = f"connections of {ip} exceed limit of {each}"
        if not reason:
            self.all.add(connection)
            self._addresses[ip] += 1
            return ""
        self._refused += 1
        now = time.monotonic()
        if now - self._refused_at >= 1.0:  # many refused connections must not flood the log
            address = connection.session.address
            _log.warning("TCP: client(%s) refused (%d so far): %s", address, self._refused, reason)
            self._refused_at = now
        return reason

    def leave(self, connection: Connection) -> bool:
        """Forget a connection that has ended. Returns false if it had been refused."""
        if connection not in self.all:
            return False
        self.all.remove(connection)
        ip = connection.session.ip
        self._addresses[ip] -= 1
        if not self._addresses[ip]:
            del self._addresses[ip]
        return True

    def _most(self) -> int:
        """Return the configured limit, or less if there are not enough descriptors: HTTP, threads
        and mapped topics need some too. It is computed each time because the process's limit of
        descriptors may change."""
        configured = self._context.options.max_connections
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return configured or 1 << 30
        reserve = min(max(files // 8, _RESERVE_LEAST), _RESERVE_MOST)
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
