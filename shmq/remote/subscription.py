"""The connection of a consumer, its thread, and the next connection when it breaks."""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from shmq.errors import ShmqError, Unreachable
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


class Subscription:
    """Keeps a channel subscribed until `close`."""

    def __init__(
        self,
        connections: Connections,
        channel: tuple[str, str],
        max_in_flight: int,
        msg_timeout: float | None,
    ) -> None:
        """channel: topic and channel. msg_timeout: seconds; None: the broker's. Subscribes before
        it returns. Raises Unreachable, Unauthorized and the broker's error."""
        self.number = 0
        """Number of the present connection; raised when it ends."""
        self._connections = connections
        self._channel = channel
        self._ready = self.most = max_in_flight
        self._msg_timeout = msg_timeout
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._pid = os.getpid()
        tried = f"subscribe to {'/'.join(channel)}"
        self._connection: Connection | None = connections.again(self._subscribed, tried)

    def start(
        self,
        deliver: Callable[[int, list[Delivery]], None],
        failed: Callable[[ShmqError], None],
    ) -> None:
        """Begin to deliver, in a thread."""
        name = f"shmq {'/'.join(self._channel)}"
        run = threading.Thread(target=self._run, args=(deliver, failed), name=name, daemon=True)
        run.start()

    def _subscribed(self, deadline: float) -> Connection:
        connections = self._connections
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

    def _run(
        self,
        deliver: Callable[[int, list[Delivery]], None],
        failed: Callable[[ShmqError], None],
    ) -> None:
        pause = _FIRST_PAUSE
        lost_at: float | None = None
        began = time.monotonic()
        while not self._closed.is_set():
            try:
                with self._writing:
                    connection, number = self._connection, self.number
                if connection is None:
                    connection = self._subscribed(self._connections.deadline())
                    with self._writing:
                        self._connection = connection
                        self.number = number = self.number + 1
                    if self._closed.is_set():
                        self._end()
                        return
                    deliver(number, [])
                lost_at, began = None, time.monotonic()
                self._read(connection, number, deliver)
            except OSError as exc:
                self._end()
                lost_at = lost_at or time.monotonic()
                where, timeout = self._connections.address, self._connections.timeout
                if time.monotonic() - lost_at > timeout:
                    failed(Unreachable(f"take from {'/'.join(self._channel)} at {where}: {exc}"))
            except ShmqError as exc:
                self._end()
                failed(exc)
            if time.monotonic() - began > _MOST_PAUSE:  # it was a good connection
                pause = _FIRST_PAUSE
            self._closed.wait(pause)
            pause = min(2 * pause, _MOST_PAUSE)

    def _read(
        self,
        connection: Connection,
        number: int,
        deliver: Callable[[int, list[Delivery]], None],
    ) -> None:
        """Deliver what comes on connection `number` until it breaks. Raises OSError then, and the
        error with which the broker closes it."""
        heard = began = time.monotonic()
        beats = 0
        most = _HEAD.size + 4 + self._connections.most_body
        while not self._closed.is_set():
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
                deliver(number, deliveries)

    def answer(self, of: int, line: bytes) -> bool:
        """Send a line on connection number `of`. Returns False if that one has ended."""
        with self._writing:
            connection = self._connection
            if connection is None or of != self.number or self._pid != os.getpid():
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

    def close(self) -> None:
        """End the subscription. Idempotent."""
        self._closed.set()
        self._end()


def _delivery(data: memoryview) -> Delivery:
    """The message in a frame. Raises Lost if it is none."""
    if len(data) <= _HEAD.size:
        raise Lost(f"a message has {len(data)} bytes")
    timestamp, attempts, name = _HEAD.unpack_from(data)
    if not _ID.fullmatch(name):  # it goes into a line of the answer
        raise Lost("a message has an id that no message has")
    return timestamp, attempts, name.decode("ascii"), bytes(data[_HEAD.size :])
