"""The queues that a connection takes from: a consumer for each, and a wait for all of them."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Final

from kombu.utils.compat import detect_environment

from shmq.integrations.celery.turns import Source, Turns

#: With gevent, how long a wait sleeps between two looks, at first and at most.
_PAUSE: Final = 0.0005
_PAUSE_MOST: Final = 0.01


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
        self._turns: Turns[Source] = Turns()
        # Their descriptors say so a moment later.
        self._may_have: set[Source] = set()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and the descriptor its parent's."""
        return self._pid != os.getpid()

    def fileno(self) -> int:
        """The descriptor."""
        return self._epoll.fileno()

    def add(self, source: Source) -> None:
        """Take from this queue too. One that is there already stays."""
        fd = source.consumer.fileno()
        if self._sources.get(fd) is source:
            self.arm()
            return
        self._sources[fd] = source
        self._may_have.add(source)
        self._turns.add(source)
        self._armed[fd] = source.wants()
        self._epoll.register(fd, select.EPOLLIN if self._armed[fd] else 0)

    def remove(self, source: Source) -> None:
        """Take no more from this queue."""
        if self.is_inherited:
            return
        self._turns.remove(source)
        self._may_have.discard(source)
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
        # epoll begins with the same descriptor each time, so it does not say whose turn it is.
        ready = (self._sources.get(fd) for fd, _ in self._epoll.poll(timeout, self._most()))
        self._may_have.update(source for source in ready if source is not None)
        for source in list(self._turns) if self._may_have else ():
            if source not in self._may_have:
                continue
            if not source.wants():
                self.arm()
            elif source.deliver():
                self._turns.served(source)
                return True
            else:
                self._may_have.discard(source)
        return False

    def _most(self) -> int:
        return max(len(self._sources), 1)

    def close(self) -> None:
        """Close the descriptor."""
        self._sources.clear()
        self._turns.clear()
        self._may_have.clear()
        self._epoll.close()


class GreenInbox:
    """The same for gevent and eventlet, whose threads cannot wait for shared memory: it looks, and
    sleeps for a moment between two looks."""

    def __init__(self) -> None:
        self._turns: Turns[Source] = Turns()

    def add(self, source: Source) -> None:
        """Take from this queue too. One that is there already stays."""
        self._turns.add(source)

    def remove(self, source: Source) -> None:
        """Take no more from this queue."""
        self._turns.remove(source)

    def arm(self) -> None:
        """Look again which sources want messages: each look does."""

    def deliver(self, timeout: float | None) -> bool:
        """Deliver one message. Returns False if none came within `timeout` s (None: no limit)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _PAUSE
        while True:
            if self._delivered():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(pause)  # other greenlets run
            pause = min(2 * pause, _PAUSE_MOST)

    def _delivered(self) -> bool:
        for source in list(self._turns):
            if source.wants() and source.deliver():
                self._turns.served(source)
                return True
        return False

    def close(self) -> None:
        """Forget the sources."""
        self._turns.clear()


def is_green() -> bool:
    """Whether threads are greenlets in this process."""
    return bool(detect_environment() != "default")


def inbox() -> Inbox | GreenInbox:
    """A new inbox that fits this process."""
    return GreenInbox() if is_green() else Inbox()
