"""A file descriptor that is readable while a consumer may have something to take."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

from shmq import _native
from shmq.errors import Gone

_SLICE_SECONDS: Final = 1.0


class _Consumer(Protocol):
    _beacon: Callable[[], None] | None

    @property
    def closed(self) -> bool: ...


class Beacon:
    """An eventfd, and the thread that makes it readable.

    The thread looks when it is armed: at first, and each time a call found nothing to take. That
    call makes the descriptor unreadable before it arms the thread, so a message that comes in
    between is seen. The thread keeps the consumer only while it waits for a moment.
    """

    def __init__(self, consumer: _Consumer) -> None:
        if consumer.closed:
            raise Gone("fileno: the consumer was closed")
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._generation = _native.fork_generation()
        self._armed = threading.Event()
        self._armed.set()
        self._lock = threading.Lock()
        self._closed = False
        weakref.finalize(consumer, self.close).atexit = False
        consumer._beacon = self._clear
        arguments = (weakref.ref(consumer),)
        threading.Thread(target=self._run, args=arguments, name="shmq-fileno", daemon=True).start()

    @property
    def is_inherited(self) -> bool:
        """Whether the descriptor is the parent process's, whose thread feeds it."""
        return self._generation != _native.fork_generation()

    def close(self) -> None:
        """Close the descriptor. The thread ends within a second."""
        if self.is_inherited:
            return  # a thread of the parent may have had the lock at the fork
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
        self._armed.set()

    def _clear(self) -> None:
        """There was nothing to take: not readable, until there is."""
        if self.is_inherited:
            return
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.fd)
        self._armed.set()

    def _light(self) -> None:
        self._armed.clear()  # first: a call that clears the descriptor now arms the thread again
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def _run(self, reference: weakref.ref[Any]) -> None:
        waiter: _native.Waiter | None = None
        try:
            while not self._closed:
                if not self._armed.wait(_SLICE_SECONDS):
                    continue
                consumer = reference()
                if consumer is None:
                    return
                deadline = _native.now() + int(_SLICE_SECONDS * 1e9)
                if isinstance(consumer, _native.Lanes):
                    found = consumer.wait(deadline)
                else:
                    waiter = waiter or _native.Waiter(consumer._broker)
                    found = bool(waiter.wait((consumer,), deadline))
                del consumer
                if found:
                    self._light()
        except Gone:
            self._light()  # whoever looks gets the error
        finally:
            if waiter is not None:
                waiter.close()
