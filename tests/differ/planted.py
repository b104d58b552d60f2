"""Faults of shmq that the machine must find. Each changes the process from which the programs on
shmq are forked; only the tests use them."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

from differ import nsqd

import shmq
from shmq.queues import queue as queues


def stored_twice() -> None:
    """Each third item is in its queue twice."""
    put, count = shmq.Queue.put, [0]

    def twice(self: Any, *args: Any, **kwargs: Any) -> None:
        put(self, *args, **kwargs)
        count[0] += 1
        if count[0] % 3 == 0:
            put(self, *args, **kwargs)

    shmq.Queue.put = twice  # type: ignore[method-assign]


def starves() -> None:
    """The first item goes behind the others, as often as somebody asks for it."""
    get = shmq.Queue.get

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = get(self, *args, **kwargs)
        if self.qsize():
            first, before = get(self, False), first
            self.put(before)
        return first

    shmq.Queue.get = late  # type: ignore[method-assign]


def no_look() -> None:
    """A wait with a limit returns without a look."""
    look = queues._Ends._next

    def none(self: Any, take: Any, block: bool, deadline: float | None) -> Any:
        if deadline is not None:
            raise queue.Empty
        return look(self, take, block, deadline)

    queues._Ends._next = none  # type: ignore[method-assign]


def cut_in_silence() -> None:
    """Bytes of more than 64 KiB lose the rest."""
    get = shmq.Queue.get

    def cut(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = get(self, *args, **kwargs)
        return found[:65_536] if isinstance(found, bytes) else found

    shmq.Queue.get = cut  # type: ignore[method-assign]


def lock_inherited() -> None:
    """A child begins with a lock that its parent had when it forked."""
    lock, put = threading.Lock(), shmq.Queue.put
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release)

    def locked(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            put(self, *args, **kwargs)

    shmq.Queue.put = locked  # type: ignore[method-assign]


def smaller_limit() -> None:
    """The server refuses messages that are as long as they may be."""
    nsqd.FLAGS = (f"--max-msg-size={nsqd.LARGEST - 1}", *nsqd.FLAGS[1:])


def result_cut_in_silence() -> None:
    """Bytes of more than 64 KiB that a worker returns through joblib lose the rest."""
    from shmq.integrations import joblib

    arrived = joblib._arrived

    def cut(*args: Any) -> Any:
        found = arrived(*args)
        if isinstance(found, list):  # the results of a batch
            return [(index, _short(value)) for index, value in found]
        return found

    cut.__module__, cut.__qualname__ = arrived.__module__, arrived.__qualname__
    joblib._arrived = cut


def _short(value: Any) -> Any:
    return value[:65_536] if isinstance(value, bytes) else value


def queue_starves() -> None:
    """A worker of Celery serves the queue that it named first as long as that has a task."""
    os.environ["DIFFER_ORDER"] = "priority"


FAULTS = {
    each.__name__: each
    for each in (
        stored_twice,
        starves,
        no_look,
        cut_in_silence,
        lock_inherited,
        smaller_limit,
        result_cut_in_silence,
        queue_starves,
    )
}


def plant(name: str) -> None:
    """Plant a fault in this process."""
    FAULTS[name]()
