"""A socket to which a job sends frames from its thread, without the event loop.

The event loop writes nothing to the connection meanwhile. Frames go from their pieces into the
socket, where the event loop would first copy them into a buffer of its own, and again each time
that the socket has taken some of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import Final

#: Milliseconds for which a thread waits until a client takes more.
_WAIT_MS: Final = 20
#: Threads of the process that wait so at the same time: fewer than its pool has, so that clients
#: that are slow keep no other waiting.
_WAITING: Final = 8

_places = threading.BoundedSemaphore(_WAITING)


class Outlet:
    """The socket of one connection, for one job. It has a descriptor of its own, so that the thread
    never sends to another connection."""

    def __init__(self, fd: int) -> None:
        """fd: the connection's, which does not block."""
        self._sock = socket.socket(fileno=os.dup(fd))

    def send(self, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Send bytes. Returns the rest if the client does not take them soon, or if the connection
        has ended: the event loop goes on with it."""
        left = list(pieces)
        while left:
            try:
                sent = self._sock.sendmsg(left)
            except BlockingIOError:
                sent = 0
            except OSError:
                break
            left = _behind(left, sent)
            if left and not self._has_room():
                break
        return b"".join(left)

    def _has_room(self) -> bool:
        """Wait until the socket takes bytes. Returns False if it does not soon."""
        if not _places.acquire(blocking=False):
            return False
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            return bool(poll.poll(_WAIT_MS))
        finally:
            _places.release()

    def end(self) -> None:
        """End the connection, also while a thread sends."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. Call it when no thread sends."""
        self._sock.close()


def _behind(pieces: list[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """The pieces without their first `count` bytes."""
    for number, piece in enumerate(pieces):
        if count < len(piece):
            return [memoryview(piece)[count:], *pieces[number + 1 :]]
        count -= len(piece)
    return []
