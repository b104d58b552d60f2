"""One process's attachment to an instance: its client entry, permit and views."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from shmq import _native, shm
from shmq.errors import Gone, NotRunning
from shmq.layout import ClientKind

if TYPE_CHECKING:
    from shmq.sources import NativeSource

#: How long the end of the interpreter waits for a lock that a stopped process holds.
_EXIT_PATIENCE_NS: Final = 1_000_000_000


def pauses() -> Iterator[float]:
    """Seconds to sleep between two looks at something that is starting."""
    yield from (0.002, 0.005, 0.01)
    yield from itertools.repeat(0.02)


class Attachment:
    """This process's client entry in an instance. A forked child takes its own at first use."""

    def __init__(
        self, instance: str, kind: ClientKind = ClientKind.CLIENT, owner: str | int | None = None
    ) -> None:
        self._instance = instance
        self._kind = kind
        self._owner = owner
        self._locks: dict[int, threading.Lock] = {}
        self._attached: _native.Broker | None = None
        self._permits: shm.Permits | None = None
        self._views: tuple[_native.Broker, NativeSource] | None = None
        self.closed = False
        self.native()

    def native(self) -> _native.Broker:
        """The extension's handle. Raises Gone after `close`."""
        attached = self._attached
        if attached is not None and not attached.forked:
            return attached
        with self._lock():
            if self.closed:
                raise Gone(f"the broker {self._instance!r} was closed in this process")
            if self._attached is None or self._attached.forked:
                self._attached, self._permits = _attach(self._instance, self._kind, self._owner)
            return self._attached

    def views(self) -> NativeSource:
        """Views of its segments. Raises Gone after `close`, or if the instance was stopped."""
        native = self.native()
        views = self._views
        if views is None or views[0] is not native:
            from shmq.sources import NativeSource

            views = self._views = (native, NativeSource(self._instance, native))
        if views[1].directory.closed:
            raise Gone(f"instance {self._instance!r} was stopped: attach again when it is running")
        return views[1]

    def close(self) -> None:
        """Give back the messages this process holds, and its entry. Idempotent."""
        self._close(None)

    def abandon(self) -> None:
        """Like `close`, with a bounded wait. If a stopped process holds a lock, the reaper gives
        the messages back after this process has ended."""
        with contextlib.suppress(_native.Busy):
            self._close(_EXIT_PATIENCE_NS)

    def _close(self, patience: int | None) -> None:
        with self._lock():
            attached, permits = self._attached, self._permits
            self.closed = True
            self._attached = self._permits = self._views = None
        if attached is None:
            return
        mine = not attached.forked
        try:
            with contextlib.nullcontext() if permits is None or not mine else permits.moving():
                attached.detach() if patience is None else attached.detach(patience)
                if permits is not None and mine:
                    permits.give()
        finally:
            if permits is not None:
                permits.close()

    def _lock(self) -> threading.Lock:
        """One lock per process: a thread of the parent may have held the parent's at the fork."""
        return self._locks.setdefault(_native.fork_generation(), threading.Lock())


def _attach(
    instance: str, kind: ClientKind, owner: str | int | None
) -> tuple[_native.Broker, shm.Permits]:
    fd = shm.open_directory(instance, owner=owner)
    try:
        owners = frozenset({os.fstat(fd).st_uid})  # the other objects must be the same user's
        try:
            permits = shm.Permits(instance, owners)
        except NotRunning:
            from shmq import sources

            sources.open_readonly(instance, owner)  # raises a better error for a foreign object
            raise
        try:
            return _claimed(fd, instance, kind, permits, owners), permits
        except BaseException:
            permits.close()
            raise
    finally:
        os.close(fd)


def _claimed(
    fd: int, instance: str, kind: ClientKind, permits: shm.Permits, owners: frozenset[int]
) -> _native.Broker:
    """An entry of the table of clients, with its permit. Raises TooManyClients."""
    opener = functools.partial(shm.open_queue, instance, owners=owners)
    with permits.moving():
        permits.take(0 if kind == ClientKind.GATEWAY else shm.reserve())
        try:
            return _native.Broker(fd, opener, int(kind), instance)
        except BaseException:
            permits.give()
            raise
