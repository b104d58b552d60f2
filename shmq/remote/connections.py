"""The connections of one client: each is lent to one thread at a time, and lent again."""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

from shmq.errors import Gone, ShmqError, Unreachable
from shmq.remote.address import Address
from shmq.remote.connection import MOST_BODY, Connection, Login

T = TypeVar("T")

#: Seconds between two attempts to connect, at first and at most.
_FIRST_PAUSE: Final = 0.01
_MOST_PAUSE: Final = 1.0
#: A request that is not answered is tried over another connection after this part of the timeout,
#: but not before so many seconds: a process that hangs must not take all of it.
_ATTEMPTS: Final = 3
_SHORTEST: Final = 2.0
#: Connections that are kept open while nobody uses them.
_IDLE: Final = 8


class Attendant(Protocol):
    """An object that ends with the connections, and has one of its own."""

    def close(self, why: str) -> None: ...


class Connections:
    """Connections to one gateway, made when they are needed. Any thread may use it; a forked child
    makes its own."""

    def __init__(self, address: Address, login: Login, timeout: float) -> None:
        """timeout: seconds within which a request is answered, or tried again."""
        self.address = address
        self.login = login
        self.timeout = timeout
        self.most_body = MOST_BODY
        """Bytes that the body of a message may have."""
        self._attempt = max(timeout / _ATTEMPTS, min(timeout, _SHORTEST))
        self.closed = False
        self._begin()

    def _begin(self) -> None:
        self._idle: list[Connection] = []
        self._attendants: weakref.WeakSet[Attendant] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _here(self) -> None:
        """In a forked child: leave the parent its connections, and begin with none."""
        if self._pid != os.getpid():
            self._begin()

    def check_open(self) -> None:
        """Raise Gone after `close`."""
        if self.closed:
            raise Gone(self._why_closed())

    def _why_closed(self) -> str:
        return f"the connection to {self.address} was closed; connect again"

    def attend(self, attendant: Attendant) -> None:
        """Close it with the connections. Raises Gone if they are closed."""
        self._here()
        with self._lock:
            self.check_open()
            self._attendants.add(attendant)

    def deadline(self, more: float = 0.0) -> float:
        """When a request that begins now, and that the server may answer after `more` seconds, must
        be answered: of time.monotonic."""
        return time.monotonic() + self.timeout + more

    def lent(self, deadline: float) -> Connection:
        """A connection for this thread; pass it to `returned`, or close it. Raises OSError,
        Unauthorized, ShmqError, and Gone after `close`."""
        self._here()
        self.check_open()
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                break
            if not found.is_stale():
                return found
            found.close()
        return Connection(self.address, self.login, deadline)

    def returned(self, connection: Connection) -> None:
        """Take a connection back whose last answer was read."""
        with self._lock:
            if not self.closed and not connection.closed and len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.close()

    @contextlib.contextmanager
    def borrowed(self, deadline: float) -> Iterator[Connection]:
        """Lend a connection for the block. If the block raises an OSError, it is closed, and with
        it those that are idle: they broke too, most likely."""
        connection = self.lent(deadline)
        try:
            yield connection
        except OSError:
            connection.close()
            self.drop_idle()
            raise
        except BaseException as exc:
            if isinstance(exc, ShmqError):  # the answer was read
                self.returned(connection)
            else:
                connection.close()
            raise
        self.returned(connection)

    def drop_idle(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def again(self, call: Callable[[float], T], tried: str, more: float = 0.0) -> T:
        """Return call(deadline), which is called again after an OSError until the timeout is over.
        Use it for requests that may be repeated. Raises what `call` raises, Unreachable, and
        ssl.SSLCertVerificationError."""
        deadline = self.deadline(more)
        pause = _FIRST_PAUSE
        while True:
            try:
                return call(min(deadline, time.monotonic() + self._attempt + more))
            except ssl.SSLCertVerificationError:
                raise
            except OSError as exc:
                if time.monotonic() + pause >= deadline or self.closed:
                    raise Unreachable(
                        f"{tried}: {self.address} did not answer within {self.timeout:g} s "
                        f"({exc}); start `shmq serve` there, or raise timeout"
                    ) from exc
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)

    def ask(
        self,
        command: str,
        words: tuple[str, ...] = (),
        document: dict[str, Any] | None = None,
        more: float = 0.0,
    ) -> dict[str, Any]:
        """Send a request that may be repeated and return its answer. more: seconds that the server
        may wait. Raises the server's error, and Unreachable."""

        def once(deadline: float) -> dict[str, Any]:
            with self.borrowed(deadline) as connection:
                return connection.ask(command, words, document or {}, deadline)

        return self.again(once, f"{command} {'/'.join(words)}".rstrip(), more)

    def close(self) -> None:
        """Close all connections, and what attends them. Idempotent."""
        self._here()
        with self._lock:
            self.closed = True
            attendants = list(self._attendants)
        for attendant in attendants:
            attendant.close(self._why_closed())
        self.drop_idle()
