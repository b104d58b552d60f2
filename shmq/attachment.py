"""One process's attachment to an instance: its client entry, permit and views."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from shmq import _native, shm
from shmq.errors import Busy, Gone, NotRunning, ShmqError
from shmq.layout import ClientKind

if TYPE_CHECKING:
    from shmq.sources import NativeSource

#: How long the end of the interpreter waits for a lock that a stopped process holds.
_EXIT_PATIENCE_NS: Final = 1_000_000_000


def pauses() -> Iterator[float]:
    """Seconds to sleep between two looks at something that is starting."""
    yield from (0.002, 0.005, 0.01)
    yield from itertools.repeat(0.02)


class Kept:
    """A descriptor of a segment, which is closed when the object goes."""

    __slots__ = ("__weakref__", "_file")

    def __init__(self, file: int) -> None:
        """file: it is taken over."""
        self._file = file

    def opened(self) -> int:
        """A new descriptor."""
        return os.dup(self._file)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """close: at the end of an interpreter the names of modules may be gone."""
        close(self._file)


class Attachment:
    """This process's client entry in an instance. A forked child takes its own at first use.

    A process of root may drop its rights (`setuid`), or its forked children may, and then nobody
    lets them open what they had. So it can keep descriptors, as of any file that it has opened.
    """

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
        self._directory: Kept | None = None
        self._queues: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
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
                self._attached, self._permits = self._attach()
            return self._attached

    def keep(self, serial: int) -> Kept | None:
        """Keep the right to open a queue's segment, here and in forked children, as long as the
        returned object lives. None if there is nothing to keep: only root can become somebody else;
        or if few descriptors are left. Raises FileNotFoundError if the queue was deleted."""
        if os.geteuid():
            return None
        from shmq import sources

        if self._directory is None:
            self._directory = Kept(shm.open_directory(self._instance, owner=self._owner))
        kept = self._queues.get(serial)
        if kept is None:
            file = shm.open_queue(self._instance, serial)
            kept = Kept(file)
            if not sources.may_keep(file):
                return None
            self._queues[serial] = kept
        return kept

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
        with contextlib.suppress(Busy):
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

    def _attach(self) -> tuple[_native.Broker, shm.Permits]:
        fd = self._open_directory()
        try:
            owners = frozenset({os.fstat(fd).st_uid})  # the other objects must be the same user's
            permits = self._open_permits(owners)
            try:
                return self._claimed(fd, permits, owners), permits
            except BaseException:
                permits.close()
                raise
        finally:
            os.close(fd)

    def _open_directory(self) -> int:
        try:
            return shm.open_directory(self._instance, owner=self._owner)
        except ShmqError as exc:
            if self._directory is None or not _is_forbidden(exc):
                raise
            return self._directory.opened()

    def _open_permits(self, owners: frozenset[int]) -> shm.Permits:
        try:
            return shm.Permits(self._instance, owners)
        except NotRunning:
            from shmq import sources

            # raises a better error for a foreign object
            sources.open_readonly(self._instance, self._owner)
            raise
        except ShmqError as exc:
            if self._directory is None or self._permits is None or not _is_forbidden(exc):
                raise
            return self._permits  # those of the process that forked this one, who shares them

    def _claimed(self, fd: int, permits: shm.Permits, owners: frozenset[int]) -> _native.Broker:
        """An entry of the table of clients, with its permit. Raises TooManyClients."""
        opener = functools.partial(_open_queue, self._instance, owners, self._queues)
        with permits.moving():
            permits.take(0 if self._kind == ClientKind.GATEWAY else shm.reserve())
            try:
                return _native.Broker(fd, opener, int(self._kind), self._instance)
            except BaseException:
                permits.give()
                raise

    def _lock(self) -> threading.Lock:
        """One lock per process: a thread of the parent may have held the parent's at the fork."""
        return self._locks.setdefault(_native.fork_generation(), threading.Lock())


@functools.cache
def leave_threads() -> None:
    """At the end of the interpreter print nothing of daemon threads that still wait for something:
    they end with the process, as those that wait for anything else. Call it after what ends the
    attachment there was registered, because the last that was registered runs first."""
    atexit.register(_be_quiet)


def _be_quiet() -> None:
    shown = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        waited = issubclass(args.exc_type, Gone) and args.thread is not None and args.thread.daemon
        if not waited:
            shown(args)

    threading.excepthook = hook


def _is_forbidden(exc: ShmqError) -> bool:
    return isinstance(exc.__cause__, PermissionError)


def _open_queue(
    instance: str,
    owners: frozenset[int],
    kept: weakref.WeakValueDictionary[int, Kept],
    serial: int,
) -> int:
    """A new descriptor of a queue's segment, if need be by one that is kept."""
    try:
        return shm.open_queue(instance, serial, owners=owners)
    except PermissionError:
        found = kept.get(serial)
        if found is None:
            raise
        return found.opened()
