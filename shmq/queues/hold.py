"""The hold of processes on a queue without a name, which goes when no process can use it any more.

Each such queue has an open file, shared locked. Forked children inherit it, and children that are
being started are passed a duplicate, so the lock lasts as long as any process has the queue. The
broker finds the file by its name, and deletes the queue when nobody has the lock (`claims`). Where
this process may make no such file, as with a broker of another user, the process that made the
queue opens its file once more when it drops the queue; from then on it can tell by trying an
exclusive lock whether others still have it. It tries whenever it makes a queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, Self

from shmq.claims import claimed
from shmq.errors import ShmqError

#: Files of queues that this process made and dropped, and functions that delete the queues.
_dropped: list[tuple[int, Callable[[], None]]] = []


class Hold:
    """One process's hold on a queue; it ends with the object."""

    __slots__ = ("_delete", "_file", "_maker")

    def __init__(self, file: int, delete: Callable[[], None] | None = None) -> None:
        """file: a descriptor with the lock, which is taken over. delete: what to do when no process
        has the queue any more; None: another process made it."""
        self._file = file
        self._delete = delete
        self._maker = os.getpid()

    @classmethod
    def made(cls, delete: Callable[[], None], data_path: str, topic: str) -> Self:
        """The first hold on a new queue. data_path: the broker's."""
        file = claimed(data_path, [topic])
        if file is None:
            file = os.memfd_create("shmq-queue")
            fcntl.flock(file, fcntl.LOCK_SH)
        return cls(file, delete)

    def __reduce__(self) -> tuple[Any, ...]:
        return _passed, (reduction.DupFd(self._file),)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """close: at the end of an interpreter the names of modules may be gone."""
        if self._delete is not None and self._maker == os.getpid():
            with contextlib.suppress(OSError):  # none is free: the queue lasts with its broker
                again = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC)
                _dropped.append((again, self._delete))
        close(self._file)


def _passed(duplicate: Any) -> Hold:
    return Hold(duplicate.detach())


def delete_dropped() -> None:
    """Delete the queues that this process made and that no process has any more."""
    for entry in tuple(_dropped):
        file, delete = entry
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                _dropped.remove(entry)
            except ValueError:  # another thread does it
                continue
            os.close(file)
            with contextlib.suppress(ShmqError):
                delete()


def _in_child() -> None:
    for file, _ in _dropped:
        os.close(file)
    _dropped.clear()


os.register_at_fork(after_in_child=_in_child)
