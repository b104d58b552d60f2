"""The items that a process got from a JoinableQueue and has not called `task_done` for.

They stay in flight, so a death of the process gives them back. An end in order does not: to the
standard library such an item is gone from the queue, and many programs never call `task_done` for
the sentinel that ends a worker. So the end of the interpreter, that of a child of
`multiprocessing`, and the end of the queue in this process finish them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from multiprocessing import util

from shmq.client import Message
from shmq.errors import ShmqError

#: Finalizers below 0 run after `multiprocessing` has joined the children, and those of the tree's
#: broker after this one.
_BEFORE_THE_BROKER = -90


class Mine:
    """The items of one queue, by the threads that got them."""

    __slots__ = ("__weakref__", "_of")

    def __init__(self) -> None:
        self._of: dict[int, deque[Message]] = {}
        _all.add(self)

    def add(self, message: Message) -> None:
        """The calling thread got it."""
        if not _end.armed:
            _end.arm()
        self._of.setdefault(threading.get_ident(), deque()).append(message)
        if _end.over:  # a thread that outlives the end of its process's main thread
            _finish(message)

    def done(self) -> bool:
        """Finish the first item of the calling thread, or else one of another thread. Returns False
        if this process has none."""
        for thread in (threading.get_ident(), *self._of):
            with contextlib.suppress(KeyError, IndexError):
                _finish(self._of[thread].popleft())
                return True
        return False

    def finish(self) -> None:
        """Finish all of them. `done` may still be called for each."""
        for messages in tuple(self._of.values()):
            for message in tuple(messages):
                _finish(message)

    def wait(self) -> None:
        """Wait for the threads that have some, unless they are daemons. The interpreter of a child
        of `multiprocessing` would wait for them a little later."""
        for thread in threading.enumerate():
            left = self._of.get(thread.ident or 0)
            if left and not thread.daemon and thread is not threading.current_thread():
                thread.join()

    def forget(self) -> None:
        """They are those of the process that forked this one."""
        self._of = {}


def _finish(message: Message) -> None:
    with contextlib.suppress(ShmqError):  # the queue was shut down at once, or its broker ended
        message.finish()


class _End:
    """The end in order of this process."""

    armed = over = False

    def arm(self) -> None:
        """Have it noticed. `atexit` runs what was registered last first, so before the attachment
        gives everything back; a child of `multiprocessing` ends without `atexit`."""
        self.armed = True
        atexit.register(self.come)
        util.Finalize(None, self.come, exitpriority=_BEFORE_THE_BROKER)

    def come(self) -> None:
        for mine in tuple(_all):
            mine.wait()
        self.over = True
        for mine in tuple(_all):
            mine.finish()


_all: weakref.WeakSet[Mine] = weakref.WeakSet()
_end = _End()


def _in_child() -> None:
    global _end
    atexit.unregister(_end.come)
    _end = _End()
    for mine in _all:
        mine.forget()


os.register_at_fork(after_in_child=_in_child)
