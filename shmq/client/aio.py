"""Consumers in asyncio: one thread waits for all of them and tells the loops when to look.

A task takes by itself, in its loop's thread, without waiting. Only where there is nothing it leaves
a future with the keeper of its process (one for each attachment), whose thread sleeps on one
doorbell for all consumers and tells one task at a time: look again. A task that took something, or
was cancelled after it was told, sees to it that the next one is told. The thread never holds a
message, so neither a cancelled task nor a closed loop can lose one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from shmq import _native

T = TypeVar("T")
_Future = asyncio.Future[None]

#: How long the thread outlives the last task that waits.
_LINGER_SECONDS: Final = 1.0
#: How long it sleeps at most, and how long a task that was told to look keeps the others from it.
_SLICE_SECONDS: Final = 1.0


async def give_way() -> None:
    """Let the other tasks of the loop run."""
    await asyncio.sleep(0)


async def in_thread(call: Callable[[], None]) -> None:
    """What may wait long, without the loop."""
    await asyncio.to_thread(call)


async def take(
    consumer: _native.Consumer, look: Callable[[], T | None], timeout: float | None
) -> T | None:
    """What `look` finds as soon as it finds something; None after `timeout` seconds.

    `look` takes from the consumer without waiting; it has just found nothing.
    """
    loop = asyncio.get_running_loop()
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout must be None or seconds from 0 on, not {timeout}")
    deadline = None if timeout is None else loop.time() + timeout
    again = False
    while True:
        future: _Future = loop.create_future()
        keeper = _enter(consumer, future, again)
        timer = None if deadline is None else loop.call_at(deadline, _tell, future)
        found = None
        try:
            await future
            found = look()
        finally:
            if timer is not None:
                timer.cancel()
            keeper.leave(consumer, future, found is not None)
        if found is not None or (deadline is not None and loop.time() >= deadline):
            return found
        again = True


def _tell(future: _Future) -> None:
    """In its loop: whoever waits for it looks."""
    if not future.done():
        future.set_result(None)


class _Line:
    """Those who wait for one consumer, first come first served."""

    __slots__ = ("called", "futures", "since")

    def __init__(self) -> None:
        self.futures: OrderedDict[_Future, None] = OrderedDict()
        self.called: _Future | None = None
        """Who was told to look and has not looked yet; meanwhile the thread leaves the consumer
        alone, so that one message does not call everybody."""
        self.since = 0.0


class _Keeper:
    """The lines of one attachment, and the thread that waits for them.

    The lock is an RLock because a task that waits may be closed where its last reference goes, by
    the garbage collector too, and then leaves its line in the middle of what is done here.
    """

    def __init__(self, native: _native.Broker) -> None:
        self._native = native
        self._generation = _native_generation()
        self._waiter = _native.Waiter(native)
        self._lock = threading.RLock()
        self._lines: dict[_native.Consumer, _Line] = {}
        self._watched: dict[
            _native.Consumer, None
        ] = {}  # those of _lines from which none is called
        self._seen: dict[_native.Consumer, None] = {}  # those that the thread waits for just now
        self._started = self._ended = False

    # ---- called by tasks ----

    def enter(self, consumer: _native.Consumer, future: _Future, first: bool) -> bool:
        """Tell `future` when there may be something to take. False: this keeper has ended."""
        with self._lock:
            if self._ended:
                return False
            line = self._lines.get(consumer) or _Line()
            line.futures[future] = None
            if first:
                line.futures.move_to_end(future, last=False)
            self._lines[consumer] = line
            if line.called is None:
                self._watch(consumer)
            if not self._started:
                threading.Thread(target=self._run, name="shmq-waiter", daemon=True).start()
                self._started = True
        return True

    def leave(self, consumer: _native.Consumer, future: _Future, took: bool) -> None:
        """It does not wait any more. Its turn, if it was told, goes to the next one."""
        if self._generation != _native_generation():
            return  # a task of the parent process, whose thread may have had the lock at the fork
        with self._lock:
            line = self._lines.get(consumer)
            if line is not None and line.called is not future:
                line.futures.pop(future, None)
                if not line.futures and line.called is None:
                    self._drop(consumer)
            elif line is not None:
                line.called = None
                if not line.futures:
                    self._drop(consumer)
                elif self._may_take(consumer):
                    self._call(consumer, line)
                else:
                    self._watch(consumer)
            if not took and consumer not in self._lines:
                self._waiter.pass_on(consumer)  # for who waits in another process

    # ---- with the lock held ----

    def _watch(self, consumer: _native.Consumer) -> None:
        self._watched[consumer] = None
        if consumer not in self._seen:
            self._waiter.wake()

    def _drop(self, consumer: _native.Consumer) -> None:
        self._lines.pop(consumer, None)
        self._watched.pop(consumer, None)

    def _may_take(self, consumer: _native.Consumer) -> bool:
        try:
            return bool(self._waiter.wait((consumer,), 0))
        except _native.Gone:
            return True  # the broker is closed: each of them finds that out

    def _call(self, consumer: _native.Consumer, line: _Line) -> None:
        """Tell the first of the line whose loop still runs."""
        while line.futures:
            future, _ = line.futures.popitem(last=False)
            if _can_be_told(future):
                line.called, line.since = future, time.monotonic()
                self._watched.pop(consumer, None)
                return
        self._drop(consumer)
        self._waiter.pass_on(consumer)

    def _sweep(self, now: float) -> None:
        """Forget those whose loop was closed, and those who were told and do not come to look."""
        for consumer, line in list(self._lines.items()):
            futures, called = list(line.futures), line.called  # kept to the end of the round
            for future in futures:
                if future.get_loop().is_closed():
                    line.futures.pop(future, None)
            if called is not None and now - line.since >= _SLICE_SECONDS:
                line.called = None
                self._watched[consumer] = None
            if not line.futures and line.called is None:
                self._drop(consumer)
                self._waiter.pass_on(consumer)

    # ---- the thread ----

    def _run(self) -> None:
        idle = swept = time.monotonic()
        try:
            while True:
                with self._lock:
                    self._seen = self._watched.copy()
                    consumers = list(self._seen)
                ready = self._waiter.wait(consumers, _native.now() + int(_SLICE_SECONDS * 1e9))
                now = time.monotonic()
                with self._lock:
                    self._seen = {}
                    for index in ready:
                        self._ring(consumers[index])
                    if now - swept >= _SLICE_SECONDS:
                        self._sweep(now)
                        swept = now
                    if self._lines:
                        idle = now
                    elif now - idle >= _LINGER_SECONDS:
                        self._ended = True
                        return
        except _native.Gone:
            pass  # the broker was closed
        finally:
            self._end()

    def _ring(self, consumer: _native.Consumer) -> None:
        line = self._lines.get(consumer)
        if line is None:  # it was left meanwhile
            self._drop(consumer)
            self._waiter.pass_on(consumer)
        elif consumer in self._watched:
            self._call(consumer, line)

    def _end(self) -> None:
        """Everybody looks, and finds out by himself."""
        with self._lock:
            self._ended = True
            for line in list(self._lines.values()):
                for future in list(line.futures):
                    _can_be_told(future)
            self._lines.clear()
            self._watched.clear()
        self._waiter.close()
        if _keepers.get(self._native) is self:
            del _keepers[self._native]


def _can_be_told(future: _Future) -> bool:
    """Tell it, from another thread; False if nobody waits for it any more."""
    if not future.done():
        with contextlib.suppress(RuntimeError):  # its loop is closed
            future.get_loop().call_soon_threadsafe(_tell, future)
            return True
    return False


_keepers: dict[_native.Broker, _Keeper] = {}
_native_generation = _native.fork_generation

# the parent's lines and handles; the child's consumers attach anew, to a broker of their own
os.register_at_fork(after_in_child=_keepers.clear)


def _enter(consumer: _native.Consumer, future: _Future, first: bool) -> _Keeper:
    """Put the future into a line; the keeper that has it."""
    while True:
        native = consumer._broker
        keeper = _keepers.get(native)
        if keeper is None:
            keeper = _keepers.setdefault(native, _Keeper(native))
        if keeper.enter(consumer, future, first):
            return keeper
        if _keepers.get(native) is keeper:
            _keepers.pop(native, None)
