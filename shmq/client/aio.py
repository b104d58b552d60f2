"""Publishing and consuming in asyncio.

One thread waits for all consumers, and wakes the tasks that should look.

A task takes by itself, in its loop's thread, without waiting. If there is nothing to take it leaves
a future with the keeper of its process (one for each attachment). The keeper's thread sleeps on one
doorbell for all consumers and wakes one task of a consumer at a time, which looks again. A task
that took something, or that was cancelled after it was woken, has the next one woken. The thread
never holds a message, so neither a cancelled task nor a closed loop can lose one. A consumer of
many topics has a keeper of its own, because it has a doorbell of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from shmq import _native, arguments
from shmq.errors import Full, Gone, Rejected
from shmq.patience import Patience

T = TypeVar("T")
_Future = asyncio.Future[None]
_Consumer = _native.Consumer | _native.Lanes

#: How long the thread outlives the last task that waits.
_LINGER_SECONDS: Final = 1.0
#: How long it sleeps at most, and how long a task that was woken and does not look holds up the
#: other tasks of its consumer.
_SLICE_SECONDS: Final = 1.0


#: Seconds between two tries to publish to a full channel, which double up to the second number.
_FIRST_PAUSE: Final = 0.0005
_LAST_PAUSE: Final = 0.010


async def give_way() -> None:
    """Let the other tasks of the loop run."""
    await asyncio.sleep(0)


async def in_thread(call: Callable[[], None]) -> None:
    """Run a call that may block for long in a thread, so that the loop goes on."""
    await asyncio.to_thread(call)


async def take(
    consumer: _Consumer, look: Callable[[], T | None], timeout: float | None
) -> T | None:
    """Return the result of `look` as soon as it is not None; None after `timeout` seconds (None: no
    limit). Raises ValueError for a negative timeout, and whatever `look` raises.

    `look` takes from the consumer without waiting; the caller has just tried it in vain.
    """
    loop = asyncio.get_running_loop()
    timeout = arguments.limit("timeout", timeout)
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


async def publish(attempt: Callable[[], T], timeout: float | None) -> T:
    """Return the result of `attempt`, which publishes without waiting. While a channel is full it
    is tried again, for `timeout` seconds (None: no limit); the loop goes on meanwhile. Raises
    Full after them, and whatever else `attempt` raises.
    """
    loop = asyncio.get_running_loop()
    timeout = arguments.limit("timeout", timeout)
    deadline = None if timeout is None else loop.time() + timeout
    pause, patience = _FIRST_PAUSE, Patience()
    while True:
        try:
            return attempt()
        except Rejected:
            raise
        except Full as exc:
            if deadline is not None and loop.time() >= deadline:
                raise
            patience.refused(exc)
        await asyncio.sleep(pause if deadline is None else min(pause, deadline - loop.time()))
        pause = min(2 * pause, _LAST_PAUSE)


def _tell(future: _Future) -> None:
    """Wake the task that waits for the future. Called in its loop."""
    if not future.done():
        future.set_result(None)


class _Line:
    """The futures that wait for one consumer, first come first served."""

    __slots__ = ("called", "futures", "since")

    def __init__(self) -> None:
        self.futures: OrderedDict[_Future, None] = OrderedDict()
        self.called: _Future | None = None
        """The future that was called and whose task has not looked yet. Until it has, the thread
        does not watch the consumer, so that one message does not call every task."""
        self.since = 0.0


class _LanesWaiter:
    """A `_native.Waiter` for one consumer of many topics, which knows by itself how to wait."""

    def __init__(self, lanes: _native.Lanes) -> None:
        self._lanes = lanes
        self._woken = threading.Event()

    def wait(self, consumers: Sequence[_Consumer], deadline_ns: int) -> list[int]:
        if deadline_ns <= 0:
            return [0] if self._lanes.wait(0) else []
        if consumers:
            return [0] if self._lanes.wait(deadline_ns) else []
        self._woken.wait(max(0.0, (deadline_ns - _native.now()) / 1e9))
        self._woken.clear()
        return []

    def wake(self) -> None:
        self._woken.set()
        self._lanes.wake()

    def pass_on(self, consumer: _Consumer) -> None:
        self._lanes.pass_on()

    def close(self) -> None:
        """The doorbell stays the consumer's."""


class _Keeper:
    """The lines of one attachment, or of one consumer of many topics, and the thread that waits for
    them.

    The lock is an RLock because the garbage collector may close a waiting task at any point, also
    in the middle of a method of this class, and the task then calls `leave` in the same thread.
    """

    def __init__(self, key: _native.Broker | _native.Lanes) -> None:
        self._key = key
        self._generation = _native_generation()
        # both take what this keeper has lines for: consumers of the one kind or the other
        self._waiter: Any = (
            _LanesWaiter(key) if isinstance(key, _native.Lanes) else _native.Waiter(key)
        )
        self._lock = threading.RLock()
        self._lines: dict[_Consumer, _Line] = {}
        self._watched: dict[_Consumer, None] = {}  # those of _lines from which none is called
        self._seen: dict[_Consumer, None] = {}  # those that the thread waits for just now
        self._started = self._ended = False

    # ---- called by tasks ----

    def enter(self, consumer: _Consumer, future: _Future, first: bool) -> bool:
        """Have `future` called when there may be something to take. first: before those that wait
        already. Returns False if this keeper has ended."""
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

    def leave(self, consumer: _Consumer, future: _Future, took: bool) -> None:
        """The future no longer waits. If it was called, its turn goes to the next one."""
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
                self._waiter.pass_on(consumer)  # a consumer in another process may wait

    # ---- with the lock held ----

    def _watch(self, consumer: _Consumer) -> None:
        self._watched[consumer] = None
        if consumer not in self._seen:
            self._waiter.wake()

    def _drop(self, consumer: _Consumer) -> None:
        self._lines.pop(consumer, None)
        self._watched.pop(consumer, None)

    def _may_take(self, consumer: _Consumer) -> bool:
        try:
            return bool(self._waiter.wait((consumer,), 0))
        except Gone:
            return True  # the broker is closed: each task finds that out when it looks

    def _call(self, consumer: _Consumer, line: _Line) -> None:
        """Call the first future of the line whose loop still runs."""
        while line.futures:
            future, _ = line.futures.popitem(last=False)
            if _can_be_told(future):
                line.called, line.since = future, time.monotonic()
                self._watched.pop(consumer, None)
                return
        self._drop(consumer)
        self._waiter.pass_on(consumer)

    def _sweep(self, now: float) -> None:
        """Forget futures whose loop was closed, and those that were called but whose task does not
        look."""
        for consumer, line in list(self._lines.items()):
            futures, called = list(line.futures), line.called  # references kept for the round
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
        except Gone:
            pass  # the broker was closed
        finally:
            self._end()

    def _ring(self, consumer: _Consumer) -> None:
        line = self._lines.get(consumer)
        if line is None:  # every task left it since the thread began to wait
            self._drop(consumer)
            self._waiter.pass_on(consumer)
        elif consumer in self._watched:
            self._call(consumer, line)

    def _end(self) -> None:
        """Wake every task: each looks and gets the error itself."""
        with self._lock:
            self._ended = True
            for line in list(self._lines.values()):
                for future in list(line.futures):
                    _can_be_told(future)
            self._lines.clear()
            self._watched.clear()
        self._waiter.close()
        if _keepers.get(self._key) is self:
            del _keepers[self._key]


def _can_be_told(future: _Future) -> bool:
    """Wake its task, from another thread. Returns False if no task waits for it any more."""
    if not future.done():
        with contextlib.suppress(RuntimeError):  # its loop is closed
            future.get_loop().call_soon_threadsafe(_tell, future)
            return True
    return False


_keepers: dict[_native.Broker | _native.Lanes, _Keeper] = {}
_native_generation = _native.fork_generation

# These are the parent's lines and handles; the child's consumers attach for themselves.
os.register_at_fork(after_in_child=_keepers.clear)


def _enter(consumer: _Consumer, future: _Future, first: bool) -> _Keeper:
    """Put the future into the line of its consumer. Returns the keeper of that line."""
    while True:
        key = consumer if isinstance(consumer, _native.Lanes) else consumer._broker
        keeper = _keepers.get(key)
        if keeper is None:
            keeper = _keepers.setdefault(key, _Keeper(key))
        if keeper.enter(consumer, future, first):
            return keeper
        if _keepers.get(key) is keeper:
            _keepers.pop(key, None)
