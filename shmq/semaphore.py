"""Named semaphores of POSIX: one that exists is opened, counted and changed, one is created.

posix_ipc has them. It does not say that it can do without the GIL, so a Python without the GIL
switches it on for the whole process when posix_ipc is imported. There the semaphores are those of
the standard library's multiprocessing, which says that it can. Both call sem_open of the C library
with the same name, so processes with and without the GIL share one semaphore.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

_MODE = 0o600  # as multiprocessing creates them


class Semaphore(Protocol):
    """A named semaphore that this process has open. No method waits."""

    @property
    def value(self) -> int:
        """How often it can be decremented now."""

    def decrement(self) -> bool:
        """Take one from the value. False if it is 0."""

    def increment(self) -> None:
        """Add one to the value."""

    def close(self) -> None:
        """Close it, and keep its value. Idempotent; no other method may be called afterwards."""


class _OfPosixIpc:
    """One of posix_ipc."""

    def __init__(self, name: str) -> None:
        import posix_ipc

        self._busy = posix_ipc.BusyError
        self._closed = posix_ipc.ExistentialError
        try:
            self._semaphore = posix_ipc.Semaphore(name)
        except posix_ipc.ExistentialError:
            raise FileNotFoundError(2, "no such semaphore", name) from None
        except posix_ipc.PermissionsError:
            raise PermissionError(13, "not allowed to open the semaphore", name) from None

    @staticmethod
    def create(name: str, value: int) -> None:
        import posix_ipc

        try:
            made = posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=_MODE, initial_value=value)
        except posix_ipc.ExistentialError:
            raise FileExistsError(17, "the semaphore exists", name) from None
        made.close()

    @property
    def value(self) -> int:
        return int(self._semaphore.value)

    def decrement(self) -> bool:
        try:
            self._semaphore.acquire(0)
        except self._busy:
            return False
        return True

    def increment(self) -> None:
        self._semaphore.release()

    def close(self) -> None:
        try:
            self._semaphore.close()
        except self._closed:
            return


class _OfMultiprocessing:
    """One of the standard library. It is closed when the object of multiprocessing goes."""

    _KIND = 1  # multiprocessing's number for a semaphore; 0 is a lock that knows its thread

    def __init__(self, name: str) -> None:
        from _multiprocessing import SemLock

        most = SemLock.SEM_VALUE_MAX
        self._semaphore: Any = SemLock._rebuild(0, self._KIND, most, name)

    @classmethod
    def create(cls, name: str, value: int) -> None:
        from _multiprocessing import SemLock

        SemLock(cls._KIND, value, SemLock.SEM_VALUE_MAX, name, False)  # False: it keeps its name

    def _open(self) -> Any:
        if self._semaphore is None:
            raise ValueError("this semaphore is closed")
        return self._semaphore

    @property
    def value(self) -> int:
        return int(self._open()._get_value())

    def decrement(self) -> bool:
        return bool(self._open().acquire(False))

    def increment(self) -> None:
        self._open().release()

    def close(self) -> None:
        self._semaphore = None


def gil_is_off() -> bool:
    """Whether this process runs without the GIL now."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()


def _kind() -> type[_OfPosixIpc | _OfMultiprocessing]:
    return _OfMultiprocessing if gil_is_off() else _OfPosixIpc


def open_semaphore(name: str) -> Semaphore:
    """Open a semaphore; the name begins with a slash. Raises FileNotFoundError, PermissionError."""
    return _kind()(name)


def create_semaphore(name: str, value: int) -> None:
    """Create a semaphore, for this user alone. Raises FileExistsError if the name is taken."""
    _kind().create(name, value)
