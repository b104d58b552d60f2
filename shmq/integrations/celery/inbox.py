"""The queues that a connection takes from: a consumer for each, and a wait for all of them."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from typing import Any, Final, Protocol

from kombu.utils.compat import detect_environment

#: With gevent, how long a wait sleeps between two looks, at first and at most.
_PAUSE: Final = 0.0005
_PAUSE_MOST: Final = 0.01


class Source(Protocol):
    """A queue that a channel consumes."""

    consumer: Any

    def wants(self) -> bool:
        """Whether its channel may be given a message now."""

    def deliver(self) -> bool:
        """Take a message and hand it on. Returns False if there is none."""


class Inbox:
    """The sources of one connection, behind one file descriptor that is readable while one of them
    that wants messages may have some.

    A forked child leaves all of it alone: the descriptor is shared with the parent.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pid = os.getpid()
        self._sources: dict[int, Source] = {}
        self._armed: dict[int, bool] = {}

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and the descriptor its parent's."""
        return self._pid != os.getpid()

    def fileno(self) -> int:
        """The descriptor."""
        return self._epoll.fileno()

    def add(self, source: Source) -> None:
        """Take from this queue too."""
        fd = source.consumer.fileno()
        self._sources[fd] = source
        self._armed[fd] = source.wants()
        self._epoll.register(fd, select.EPOLLIN if self._armed[fd] else 0)

    def remove(self, source: Source) -> None:
        """Take no more from this queue."""
        if self.is_inherited:
            return
        for fd, known in list(self._sources.items()):
            if known is source:
                del self._sources[fd], self._armed[fd]
                with contextlib.suppress(OSError):
                    self._epoll.unregister(fd)

    def arm(self) -> None:
        """Look again which sources want messages. Any thread may call it."""
        if self.is_inherited:
            return
        for fd, source in list(self._sources.items()):
            wants = source.wants()
            if wants != self._armed.get(fd):
                self._armed[fd] = wants
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.modify(fd, select.EPOLLIN if wants else 0)

    def deliver(self, timeout: float | None) -> bool:
        """Deliver one message. Returns False if none came within `timeout` s (None: no limit)."""
        for fd, _ in self._epoll.poll(timeout):
            source = self._sources.get(fd)
            if source is None:
                continue
            if not source.wants():
                self.arm()
            elif source.deliver():
                return True
        return False

    def close(self) -> None:
        """Close the descriptor."""
        self._sources.clear()
        self._epoll.close()


class GreenInbox:
    """The same for gevent and eventlet, whose threads cannot wait for shared memory: it looks, and
    sleeps for a moment between two looks."""

    def __init__(self) -> None:
        self._sources: list[Source] = []

    def add(self, source: Source) -> None:
        """Take from this queue too."""
        self._sources.append(source)

    def remove(self, source: Source) -> None:
        """Take no more from this queue."""
        with contextlib.suppress(ValueError):
            self._sources.remove(source)

    def arm(self) -> None:
        """Look again which sources want messages: each look does."""

    def deliver(self, timeout: float | None) -> bool:
        """Deliver one message. Returns False if none came within `timeout` s (None: no limit)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _PAUSE
        while True:
            if any(source.wants() and source.deliver() for source in self._turns()):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(pause)  # other greenlets run
            pause = min(2 * pause, _PAUSE_MOST)

    def _turns(self) -> Iterator[Source]:
        """The sources, another one first each time."""
        if self._sources:
            self._sources.append(self._sources.pop(0))
        yield from list(self._sources)

    def close(self) -> None:
        """Forget the sources."""
        self._sources.clear()


def is_green() -> bool:
    """Whether threads are greenlets in this process."""
    return bool(detect_environment() != "default")


def inbox() -> Inbox | GreenInbox:
    """A new inbox that fits this process."""
    return GreenInbox() if is_green() else Inbox()
