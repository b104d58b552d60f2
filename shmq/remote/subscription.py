"""The connection of a consumer, its thread, and the next connection when it breaks.

The thread has this, and not the consumer: a consumer that nobody has any more ends it.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections import deque
from typing import Final

from shmq.arguments import LONGEST
from shmq.errors import Gone, ShmqError, Unreachable
from shmq.remote.connection import ERROR, MESSAGE, RESPONSE, Connection, Lost, is_heartbeat
from shmq.remote.connections import Connections
from shmq.remote.rows import ROWS

#: Publish time (ns), attempts, id, body.
Delivery = tuple[int, int, str, bytes]

_HEAD: Final = struct.Struct(">qH16s")
_ID: Final = re.compile(rb"[0-9a-f]{16}")
#: Seconds between two of the broker's heartbeats.
_HEARTBEAT: Final = 10.0
#: Seconds between two looks whether it was closed.
_LOOK: Final = 0.5
#: Heartbeats in that time that are taken for one too many.
_MOST_BEATS: Final = 100
_FIRST_PAUSE: Final = 0.05
_MOST_PAUSE: Final = 2.0

#: Errors that answer FIN, REQ and TOUCH of messages that timed out.
_LATE: Final = (b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED")


class Arrivals:
    """The deliveries that have arrived and were not taken yet, each with the number of its
    connection."""

    def __init__(self, most: int) -> None:
        """most: the messages that the broker has on their way here at a time."""
        self._most = most
        self._deliveries: deque[tuple[int, Delivery]] = deque()
        self._changed = threading.Condition()
        self._error: ShmqError | None = None
        self._closed: str | None = None

    def deliver(self, of: int, deliveries: list[Delivery]) -> None:
        """Messages came on connection number `of`, or that one was made."""
        with self._changed:
            if self._deliveries and self._deliveries[-1][0] != of:
                self._deliveries.clear()  # of a connection that broke; they come again
            self._deliveries.extend((of, delivery) for delivery in deliveries)
            # Those before have timed out at the broker, and come again.
            while len(self._deliveries) > self._most:
                self._deliveries.popleft()
            self._error = None
            self._changed.notify_all()

    def fail(self, error: ShmqError) -> None:
        """No connection can be made: what a call that finds no message raises."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self, why: str) -> None:
        """Every call raises Gone with this sentence from now on. The first one stays."""
        with self._changed:
            self._closed = self._closed or why
            self._deliveries.clear()
            self._changed.notify_all()

    def take(
        self, n: int, timeout: float | None, subscription: Subscription
    ) -> list[tuple[int, Delivery]]:
        """1 to n deliveries of the present connection; none after `timeout` seconds."""
        end = time.monotonic() + (LONGEST if timeout is None else timeout)
        with self._changed:
            while True:
                if self._closed is not None:
                    raise Gone(self._closed)
                while self._deliveries and self._deliveries[0][0] != subscription.number:
                    self._deliveries.popleft()
                if self._deliveries:
                    count = min(n, len(self._deliveries))
                    return [self._deliveries.popleft() for _ in range(count)]
                if self._error is not None:
                    raise self._error
                left = end - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(min(left, 3600))


class Subscription:
    """Keeps a channel subscribed until `close`, or until its consumer is forgotten."""

    def __init__(
        self,
        connections: Connections,
        channel: tuple[str, str],
        max_in_flight: int,
        msg_timeout: float | None,
    ) -> None:
        """channel: topic and channel. msg_timeout: seconds; None: the broker's. Subscribes before
        it returns. Raises Unreachable, Unauthorized, the broker's error, and Gone if the connection
        to the broker was closed."""
        self.number = 0
        """Number of the present connection; raised when it ends."""
        self.closed = False
        """Whether it has ended, or is about to."""
        self.arrivals = Arrivals(max_in_flight)
        self._connections = connections
        self._channel = channel
        self._ready = max_in_flight
        self._msg_timeout = msg_timeout
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._pid = os.getpid()
        tried = f"subscribe to {'/'.join(channel)}"
        self._connection: Connection | None = connections.again(self._subscribed, tried)
        try:
            connections.attend(self)
        except Gone:
            self._end()
            raise

    @property
    def inherited(self) -> bool:
        """Whether it is the parent's of this process, which has no thread for it."""
        return self._pid != os.getpid()

    def start(self) -> None:
        """Begin to deliver, in a thread."""
        name = f"shmq {'/'.join(self._channel)}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _subscribed(self, deadline: float) -> Connection:
        connections = self._connections
        connections.check_open()
        timeout = self._msg_timeout
        wishes = {} if timeout is None else {"msg_timeout": round(timeout * 1000)}
        connection = Connection(
            connections.address, connections.login, deadline, _HEARTBEAT, wishes
        )
        try:
            topic, channel = self._channel
            connection.send(f"SUB {topic} {channel}\n".encode(), deadline)
            connection.response(deadline, f"subscribe to {topic}/{channel}")
            most = int(connection.server.get("max_rdy_count", self._ready))
            connection.send(b"RDY %d\n" % min(self._ready, most), deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _run(self) -> None:
        try:
            self._keep_subscribed()
        except Exception as exc:  # the thread ends, so a call that waits must not wait on
            self.arrivals.fail(ShmqError(f"take from {'/'.join(self._channel)}: {exc!r}"))
            raise
        finally:
            self.closed = True
            self._end()

    def _keep_subscribed(self) -> None:
        pause = _FIRST_PAUSE
        lost_at: float | None = None
        began = time.monotonic()
        while not self.closed:
            try:
                with self._writing:
                    connection, number = self._connection, self.number
                if connection is None:
                    connection = self._subscribed(self._connections.deadline())
                    with self._writing:
                        self._connection = connection
                        self.number = number = self.number + 1
                    self.arrivals.deliver(number, [])
                lost_at, began = None, time.monotonic()
                self._read(connection, number)
            except OSError as exc:
                self._end()
                lost_at = lost_at or time.monotonic()
                where, timeout = self._connections.address, self._connections.timeout
                if time.monotonic() - lost_at > timeout:
                    tried = f"take from {'/'.join(self._channel)} at {where}"
                    self.arrivals.fail(Unreachable(f"{tried}: {exc}"))
            except ShmqError as exc:
                self._end()
                self.arrivals.fail(exc)
            if time.monotonic() - began > _MOST_PAUSE:  # it was a good connection
                pause = _FIRST_PAUSE
            self._over.wait(pause)
            pause = min(2 * pause, _MOST_PAUSE)

    def _read(self, connection: Connection, number: int) -> None:
        """Deliver what comes on connection `number` until it breaks. Raises OSError then, and the
        error with which the broker closes it."""
        heard = began = time.monotonic()
        beats = 0
        most = _HEAD.size + 4 + self._connections.most_body
        while not self.closed:
            frames = connection.arrived(_LOOK, self._writing, most)
            now = time.monotonic()
            if now - began > _HEARTBEAT:
                began, beats = now, 0
            if frames:
                heard = now
            elif now - heard > 3 * _HEARTBEAT:
                raise Lost("no heartbeat")
            deliveries: list[Delivery] = []
            for kind, data in frames:
                if kind == MESSAGE:
                    deliveries.append(_delivery(data))
                elif kind == ERROR and not bytes(data).startswith(_LATE):
                    connection.refused(data, f"take from {'/'.join(self._channel)}")
                elif kind == RESPONSE and is_heartbeat(data):
                    beats += 1
                    if beats > _MOST_BEATS:
                        raise Lost("the server sends heartbeats without end")
                    self.answer(number, b"NOP\n")
                elif kind == ROWS:
                    raise Lost("rows came that nobody asked for")
            if deliveries:
                self.arrivals.deliver(number, deliveries)

    def answer(self, of: int, line: bytes) -> bool:
        """Send a line on connection number `of`. Returns False if that one has ended."""
        if self.inherited:
            return False
        with self._writing:
            connection = self._connection
            if connection is None or of != self.number:
                return False
            try:
                connection.send_plain(line, self._connections.deadline())
            except OSError:
                self._forget()
                return False
        return True

    def _end(self) -> None:
        with self._writing:
            self._forget()

    def _forget(self) -> None:
        """Close the connection; its reader then makes another. Called with the lock held."""
        connection, self._connection = self._connection, None
        self.number += 1  # what has arrived comes again
        if connection is not None:
            connection.close()

    def close(self, why: str) -> None:
        """End the subscription: calls that wait, and later ones, raise Gone with the sentence
        `why`. In a forked child the parent's goes on. Idempotent."""
        self.closed = True
        if self.inherited:
            return
        self.arrivals.close(why)
        self._over.set()
        self._end()

    def let_go(self) -> None:
        """Have the thread end the subscription: nobody can take from it any more. It takes no lock,
        because the garbage collector calls it, in any thread and amid any call."""
        self.closed = True
        connection = self._connection
        if connection is not None and not self.inherited:
            connection.cut()


def _delivery(data: memoryview) -> Delivery:
    """The message in a frame. Raises Lost if it is none."""
    if len(data) <= _HEAD.size:
        raise Lost(f"a message has {len(data)} bytes")
    timestamp, attempts, name = _HEAD.unpack_from(data)
    if not _ID.fullmatch(name):  # it goes into a line of the answer
        raise Lost("a message has an id that no message has")
    return timestamp, attempts, name.decode("ascii"), bytes(data[_HEAD.size :])
