"""Sources of views: through an attachment, or read-only without a client entry."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import stat
import time
from collections.abc import Collection, Iterator
from typing import Final, Protocol, Self

from shmq import _native, procfs, shm
from shmq.errors import Gone, LayoutMismatch, NotReady, ShmqError
from shmq.layout import SegmentKind, dtype
from shmq.views import (
    DirectoryView,
    QueueEntry,
    QueueView,
    StoreEntry,
    StoreView,
    check_segment,
)

#: A supervisor stores its heartbeat four times a second; one that is older than this is dead.
_SILENT_NS: Final = 5 * 10**9


class Source(Protocol):
    """The directory of an instance and its queues, however they were mapped."""

    @property
    def instance(self) -> str:
        """Name of the instance."""

    @property
    def directory(self) -> DirectoryView:
        """View of the directory segment."""

    def queue(self, entry: QueueEntry) -> QueueView:
        """View of a queue's segment. Raises Gone if it was deleted since `entry` was read."""


class NativeSource:
    """Views through an attachment: a segment that is mapped already costs nothing more."""

    def __init__(self, instance: str, native: _native.Broker) -> None:
        self.instance = instance
        self._native = native
        self.directory = DirectoryView(native.view(), f"instance {instance!r}")

    def queue(self, entry: QueueEntry) -> QueueView:
        """View of a queue's segment. Raises Gone if it was deleted since `entry` was read."""
        view = QueueView(self._native.view(entry.index), f"queue {entry.serial}")
        if int(view.header["segment"]["serial"]) != entry.serial:
            raise Gone(f"queue {entry.serial} of instance {self.instance!r} was deleted")
        return view

    def queue_at(self, index: int, serial: int) -> QueueView:
        """View of the segment of the queue at a place. Raises Gone if it was deleted."""
        return self.queue(QueueEntry(index, serial, 0, None, False))


class ReadOnlySource:
    """An instance's segments mapped read-only, without a client entry: for `shmq stat` and `shmq
    peek`.

    It works while the supervisor is dead. It is a context manager; arrays taken from its views stay
    valid after it is closed.
    """

    def __init__(
        self, instance: str, buffer: mmap.mmap, owners: Collection[int] | None = None
    ) -> None:
        """buffer: the mapped directory. owners: the uids whose queues are trusted; None: as
        `shm.open_segment`."""
        self.instance = instance
        self._owners = owners
        self.directory = DirectoryView(buffer, f"instance {instance!r}")
        self._queues: dict[int, QueueView] = {}

    def queue(self, entry: QueueEntry) -> QueueView:
        """View of a queue's segment, mapped once while descriptors are many. Raises Gone if it was
        deleted since `entry` was read."""
        view = self._queues.get(entry.serial)
        if view is None or view.closed:
            self.forget(entry)
            fd, what = self._open_queue(entry)
            kept = may_keep(fd)  # a mapping of Python has a descriptor of its own
            view = QueueView(map_readonly(fd, what), what)
            if kept:
                self._queues[entry.serial] = view
        return view

    def descriptor(self, entry: QueueEntry) -> int:
        """A new descriptor of a queue's segment, whose header was checked, for a reader of very
        many queues that maps none of them. Raises as `queue`."""
        fd, what = self._open_queue(entry)
        try:
            header = os.pread(fd, dtype("queue").itemsize, 0)
            check_segment(header, SegmentKind.QUEUE, what, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def forget(self, entry: QueueEntry) -> None:
        """Forget a queue's view, until `queue` maps it again."""
        self._queues.pop(entry.serial, None)

    def _open_queue(self, entry: QueueEntry) -> tuple[int, str]:
        """(descriptor, name in errors) of a queue's segment."""
        what = f"queue {entry.serial} of instance {self.instance!r}"
        try:
            serial, owners = entry.serial, self._owners
            return shm.open_queue(self.instance, serial, read_only=True, owners=owners), what
        except FileNotFoundError:
            raise Gone(f"{what} was deleted") from None

    def store(self, entry: StoreEntry) -> StoreView:
        """View of a results store's segment, mapped anew. Raises Gone if it was deleted since
        `entry` was read."""
        what = f"results store {entry.name!r} of instance {self.instance!r}"
        try:
            fd = shm.open_queue(self.instance, entry.serial, read_only=True, owners=self._owners)
        except FileNotFoundError:
            raise Gone(f"{what} was deleted") from None
        return StoreView(map_readonly(fd, what), what)

    def close(self) -> None:
        """Forget the views. Pages are unmapped when no array of them is left."""
        self._queues.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def may_keep(fd: int) -> bool:
    """Whether a descriptor that only saves work may stay open. A new descriptor has the lowest free
    number, so those who keep numbers of the lower half alone leave the other half to what cannot do
    without: connections, and files that are open for a moment."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or fd < limit // 2


def open_readonly(instance: str | None = None, owner: str | int | None = None) -> ReadOnlySource:
    """Map an instance's directory read-only. Raises NotRunning if there is none, NotReady if it is
    being made, LayoutMismatch, and ShmqError if it belongs neither to this user nor to root nor to
    `owner` (None: SHMQ_OWNER)."""
    instance = instance or shm.default_instance()
    fd = shm.open_directory(instance, read_only=True, owner=owner)
    owners = frozenset({os.fstat(fd).st_uid})
    return ReadOnlySource(instance, map_readonly(fd, f"instance {instance!r}"), owners)


def map_readonly(fd: int, what: str) -> mmap.mmap:
    """Map the whole segment that `fd` refers to, and close `fd`."""
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise NotReady(f"{what}: empty, its making was not finished; try again")
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except OSError as exc:
        if exc.errno != errno.ENOMEM:
            raise
        raise ShmqError(
            f"{what}: mapping {size} bytes was refused: raise the address space limit of this "
            "process (RLIMIT_AS, `ulimit -v`)"
        ) from exc
    finally:
        os.close(fd)


def data_path_left(instance: str) -> str:
    """The directory where an instance whose supervisor is dead has its files; "" if there is no
    such instance, or the directory is not known or not readable.

    Every client can write the field. So only a directory that belongs to this user or root is
    accepted: another user could plant links there, and this process would write through them.
    """
    with contextlib.suppress(ShmqError, OSError), open_readonly(instance) as source:
        path = source.directory.data_path
        if path and not supervisor_alive(source.directory):
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0):
                return path
    return ""


def supervisor_alive(directory: DirectoryView) -> bool:
    """Returns True if the supervisor's process lives, judged by pid and start time. (An attachment
    knows exactly.) For one in another PID namespace it returns True if its heartbeat is recent;
    that does not suffice to take anything over from it."""
    if directory.is_foreign:
        silent = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - directory.read("heartbeat")
        return silent < _SILENT_NS and not directory.closed
    pid = directory.read("supervisor_pid")
    return pid > 0 and procfs.start_time(pid) == directory.read("supervisor_start_time")


def live_queues(
    source: Source, topics: set[int] | None = None
) -> Iterator[tuple[QueueEntry, QueueView]]:
    """Yield every queue with its view, but for those that are deleted meanwhile. topics: only those
    of these topics, by index."""
    for entry in source.directory.live_queues():
        if topics is not None and entry.topic not in topics:
            continue
        with contextlib.suppress(Gone, LayoutMismatch):
            yield entry, source.queue(entry)
