"""Waiting for results in asyncio: one thread for each store wakes the tasks that should look.

A task leaves a future with the store's keeper, looks by itself, and looks again when the future is
set. The keeper's thread sleeps on one doorbell for the stripes of all keys that are waited for. It
never takes a value, so neither a cancelled task nor a closed loop can lose one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from shmq import _native
from shmq.errors import ShmqError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Future = asyncio.Future[None]
_Key = TypeVar("_Key", bound="str | Buffer")

#: How long the thread outlives the last task that waits, and how long it sleeps at most.
_LINGER_SECONDS: Final = 1.0
_SLICE_NS: Final = 1_000_000_000


async def wait_any(
    store: _native.Store, keys: Sequence[_Key], timeout: float | None, delete: bool
) -> tuple[_Key, bytes] | None:
    """(key, value) of the first key that is there; None after `timeout` s (None: no limit)."""
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    stripes = {store.stripe(key) for key in keys}
    while True:
        future: _Future = loop.create_future()
        keeper = _enter(store, future, stripes)
        timer = None if deadline is None else loop.call_at(deadline, _tell, future)
        try:
            found = store.wait_any(keys, 0, delete)
            if found is not None or (deadline is not None and loop.time() >= deadline):
                return found
            await future
        finally:
            if timer is not None:
                timer.cancel()
            keeper.leave(future, stripes)


def _tell(future: _Future) -> None:
    """Wake the task that waits for the future. Called in its loop."""
    if not future.done():
        future.set_result(None)


class _Keeper:
    """The futures that wait for keys of one store, by stripe, and the thread that watches.

    The lock is an RLock because the garbage collector may close a waiting task in the middle of a
    method of this class, and the task then calls `leave` in the same thread.
    """

    def __init__(self, store: _native.Store) -> None:
        self._store = store
        # Before any task looks: what is stored after its look is news to the thread, however late
        # that begins.
        self._seen = store.seen()
        self._generation = _native.fork_generation()
        self._waiter = _native.Waiter(store._broker)
        self._lock = threading.RLock()
        self._futures: dict[int, dict[_Future, None]] = {}
        self._watched = 0
        self._started = self._ended = False

    def enter(self, future: _Future, stripes: set[int]) -> bool:
        """Have the future set when a key of these stripes is stored. False: this keeper has
        ended."""
        with self._lock:
            if self._ended:
                return False
            for stripe in stripes:
                self._futures.setdefault(stripe, {})[future] = None
                if not self._watched >> stripe & 1:
                    self._waiter.wake()
            if not self._started:
                threading.Thread(target=self._run, name="shmq-results", daemon=True).start()
                self._started = True
        return True

    def leave(self, future: _Future, stripes: set[int]) -> None:
        """The future no longer waits."""
        if self._generation != _native.fork_generation():
            return  # a task of the parent process, whose thread may have had the lock at the fork
        with self._lock:
            for stripe in stripes:
                waiting = self._futures.get(stripe)
                if waiting is not None:
                    waiting.pop(future, None)
                    if not waiting:
                        del self._futures[stripe]

    def _run(self) -> None:
        idle = time.monotonic()
        try:
            while True:
                with self._lock:
                    self._watched = sum(1 << stripe for stripe in self._futures)
                    watched, before = self._watched, self._seen
                self._store.wait_news(self._waiter, watched, before, _native.now() + _SLICE_NS)
                seen = self._seen = self._store.seen()
                with self._lock:
                    for stripe, waiting in list(self._futures.items()):
                        if seen[stripe] != before[stripe]:
                            _tell_all(waiting)
                    if self._futures:
                        idle = time.monotonic()
                    elif time.monotonic() - idle >= _LINGER_SECONDS:
                        self._ended = True
                        return
        except ShmqError:
            pass  # the store was deleted, or the broker was closed
        finally:
            self._end()

    def _end(self) -> None:
        """Wake every task: each looks and gets the error itself."""
        with self._lock:
            self._ended = True
            for waiting in self._futures.values():
                _tell_all(waiting)
            self._futures.clear()
        self._waiter.close()
        if _keepers.get(self._store) is self:
            del _keepers[self._store]


def _tell_all(waiting: dict[_Future, None]) -> None:
    for future in list(waiting):
        if future.done():
            continue
        try:
            future.get_loop().call_soon_threadsafe(_tell, future)
        except RuntimeError:  # its loop is closed
            waiting.pop(future, None)


_keepers: dict[_native.Store, _Keeper] = {}

# These are the parent's futures and handles; the child's stores attach for themselves.
os.register_at_fork(after_in_child=_keepers.clear)


def _enter(store: _native.Store, future: _Future, stripes: set[int]) -> _Keeper:
    while True:
        keeper = _keepers.get(store)
        if keeper is None:
            keeper = _keepers.setdefault(store, _Keeper(store))
        if keeper.enter(future, stripes):
            return keeper
        with contextlib.suppress(KeyError):
            if _keepers[store] is keeper:
                del _keepers[store]
