"""The outcomes of one executor's tasks, on their way from the results store to their futures.

A thread that calls `Future.result` waits for its key in the store itself, so that no other thread
stands between the worker and it. A thread that collects runs while a future is watched: one with
callbacks, one in `wait` or `as_completed`, or one that several threads wait for. A future is held
by one of the two, or by nobody.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from concurrent.futures._base import PENDING
from typing import TYPE_CHECKING, Any, Final

from shmq import _native
from shmq.errors import Full, Gone, ShmqError

if TYPE_CHECKING:
    from shmq.pool.future import Future
    from shmq.pool.site import Site

#: How long a sleep lasts at most: after it the sleeper looks whether the store is full.
_SLICE: Final = 1.0
#: How long the thread outlives the last future that it watched, seconds.
_LINGER: Final = 1.0
#: Outcomes that nobody wants which one `submit` looks for.
_AT_ONCE: Final = 4

_log = logging.getLogger(__name__)


class Inbox:
    """The outcomes of the tasks of one executor."""

    def __init__(self, site: Site) -> None:
        self.lock = threading.RLock()
        """Protects the states of the futures, and which of them are held or watched. A handler of a
        signal may need it while the thread that it interrupts has it."""
        self.dropped: deque[bytes] = deque()
        """Keys of tasks whose futures are gone."""
        self._site = site
        self._store = site.store
        self.outcomes = site.outcomes
        """Reads what is stored."""
        # the outcomes that were moved here: the store was full, or is gone
        self._moved: dict[bytes, bytes] = {}
        self._closed: bytes | None = None  # the outcome of everything that has none by now
        self._refused = 0
        self._news: deque[Future[Any]] = deque()
        self._collector: _Collector | None = None

    # ---- one future ----

    def fetch(self, future: Future[Any], timeout: float | None) -> None:
        """Wait until the future has an outcome. Raises TimeoutError."""
        me = threading.get_ident()
        with self.lock:
            if future._state != PENDING:
                return
            # A handler of a signal may wait for the future that the thread below it waits for.
            within = future._held == me
            direct = within or (future._bell is None and not future._held)
            if direct:
                future._held = me
        if not direct:
            bell = future._condition
            with bell:
                if not bell.wait_for(lambda: future._state != PENDING, timeout):
                    raise TimeoutError
            return
        stored = None
        try:
            stored = self._take(future, timeout)
        finally:
            self._release(future, stored, within)
        if future._state == PENDING:
            raise TimeoutError

    def poll(self, future: Future[Any]) -> bool:
        """Give the future its outcome if that is there and no other thread is about to. Returns
        whether it has one."""
        me = threading.get_ident()
        with self.lock:
            within = future._held == me
            others = future._bell is not None or future._held
            if future._state != PENDING or (others and not within):
                return future._state != PENDING
            future._held = me
        stored = None
        try:
            stored = self.look(future._key)
        finally:
            self._release(future, stored, within)
        return future._state != PENDING

    def watch(self, future: Future[Any]) -> threading.Condition:
        """Have the future collected by the thread from now on. Returns its condition."""
        with self.lock:
            if future._bell is None:
                future._waiters, future._done_callbacks = [], []
                future._bell = threading.Condition()
                # A handler of a signal gives it away: the thread below it waits for the handler.
                if future._state == PENDING and future._held in (0, threading.get_ident()):
                    self._give(future)
            return future._bell

    def wake(self, future: Future[Any]) -> None:
        """A future was cancelled: have the thread that waits for it in the store look at it."""
        with self.lock, contextlib.suppress(ShmqError):
            if future._held and not self._site.durable:  # a durable pool's workers do it
                self._store.set(future._key, self.outcomes.cancelled)

    def _release(self, future: Future[Any], stored: bytes | None, within: bool) -> None:
        """End the hold of a thread on a future: the thread has the outcome, or gives up. within:
        it goes on below the handler that had the future too."""
        if stored is not None:
            self.accept(future, stored)
        if within:
            return
        with self.lock:
            future._held = 0
            if stored is None and future._state != PENDING and not self._site.durable:
                with contextlib.suppress(ShmqError):
                    self._store.delete(future._key)  # what `wake` has put there
            if stored is None and future._bell is not None and future._state == PENDING:
                self._give(future)  # other threads began to wait meanwhile

    def _give(self, future: Future[Any]) -> None:
        """Hand a future to the thread that collects. The caller has the lock."""
        self._news.append(future)
        collector = self._collector
        if collector is None or not collector.call():
            collector = self._collector = _Collector(self, self._store, self._news)
            collector.start()

    def accept(self, future: Future[Any], stored: bytes) -> None:
        """Give a future its outcome. A durable pool's is deleted after that, so that a death in
        between loses nothing."""
        future._accept(stored)
        if self._site.durable:
            with contextlib.suppress(ShmqError):
                self._store.delete(future._key)

    # ---- the store ----

    def look(self, key: bytes) -> bytes | None:
        """The outcome that is there for a key, which the store loses unless it is durable."""
        try:
            stored = self._store.get(key) if self._site.durable else self._store.pop(key)
            if stored is None and self._site.broken is not None:
                stored = self._store.pop(key) or self._site.broken
        except Gone:
            return self._moved.pop(key, None) or self._ending()
        return stored or (self._moved.pop(key, None) if self._moved else None)

    def _take(self, future: Future[Any], timeout: float | None) -> bytes | None:
        """The stored outcome of a future; None after `timeout` seconds, or if it got one by another
        way meanwhile."""
        key = future._key
        stored = self.look(key)
        if stored is not None or timeout == 0:
            return stored
        end = None if timeout is None else time.monotonic() + timeout
        keys = (key,) if self._site.durable else (key, self._site.alarm)
        while stored is None and future._state == PENDING:
            left = _SLICE if end is None else min(end - time.monotonic(), _SLICE)
            if left <= 0:
                break
            with contextlib.suppress(Gone):
                found = self._store.wait_any(keys, left, delete=not self._site.durable)
                if found is not None and found[0] is key:
                    return found[1]
                if found is not None:
                    self._store.set(*found)  # the alarm, which all waiters must see
                self.make_room()
            stored = self.look(key)
        return stored

    def make_room(self) -> None:
        """Move all outcomes from a store that has refused one to the memory of this process. A
        worker may be waiting for room for the very outcome that a thread here waits for."""
        if not self._site.durable and self.has_refused():
            self._move()

    def has_refused(self) -> bool:
        """Whether the store had no room for an outcome since the last call."""
        refused = self._store.stats().refused
        before, self._refused = self._refused, refused
        return refused != before

    def _move(self) -> None:
        unwanted = set(self.dropped)
        for key in list(self._store.keys()):
            stored = None if key == self._site.alarm else self._store.pop(key)
            if stored is not None and key not in unwanted:
                self._moved[key] = stored

    def put(self, key: bytes, stored: bytes) -> None:
        """Give a task an outcome from this process, unless it has one. Raises ShmqError."""
        try:
            self._store.add(key, stored, self._site.ttl)
        except Full:
            if self._site.durable:
                raise
            self._moved.setdefault(key, stored)

    def sweep(self) -> None:
        """Delete outcomes that nobody can ask for any more. A durable pool has none of these: any
        process may ask for its outcomes."""
        if self._site.durable:
            self.dropped.clear()
            return
        for _ in range(min(_AT_ONCE, len(self.dropped))):
            key = self.dropped.popleft()
            if not self._store.delete(key):
                self.dropped.append(key)

    # ---- cancelling ----

    def is_running(self, key: bytes) -> bool:
        """Whether a worker has the task."""
        try:
            return self._site.holds(key)
        except ShmqError:
            return False

    def cancel(self, key: bytes) -> bool:
        """Cancel a task unless a worker has taken it. Returns whether nobody will run it.

        A mark in the store says so. A worker looks for it after it has taken the message, so either
        this call sees the message in flight or the worker sees the mark; if both do, the one that
        deletes the mark decides."""
        signs = self._site.signs
        try:
            signs.set(key, self.outcomes.cancelled)
            if not self._site.holds(key) and self._store.get(key) is None:
                return True
            return not signs.delete(key)
        except ShmqError:
            return False

    # ---- the end ----

    def close(self, why: str) -> None:
        """Take all outcomes that are in the store, which is about to be deleted. Tasks that have
        none get a BrokenProcessPool that says why."""
        with contextlib.suppress(Gone):
            self._move()
        self._closed = self.outcomes.broken(why)

    def _ending(self) -> bytes:
        return self._closed or self.outcomes.broken(
            "the results store of the pool was deleted, or its broker was stopped, before the task "
            "had an outcome"
        )


class _Collector(threading.Thread):
    """The thread that collects the outcomes of watched futures."""

    def __init__(self, inbox: Inbox, store: _native.Store, news: deque[Future[Any]]) -> None:
        super().__init__(name="shmq-pool-inbox", daemon=True)
        self._inbox = inbox
        self._store = store
        self._news = news
        self._waiter = _native.Waiter(store._broker)
        self._is_asleep = self._has_ended = False
        # the futures of each stripe, in the order of their tasks; those end in nearly this order
        self._watched: dict[int, dict[bytes, Future[Any]]] = {}

    def call(self) -> bool:
        """There is a new future to watch. Returns False if the thread has ended. The caller has
        the inbox's lock."""
        if self._is_asleep:
            self._is_asleep = False
            self._waiter.wake()
        return not self._has_ended

    def run(self) -> None:
        try:
            self._collect()
        except ShmqError as exc:
            _log.debug("the outcomes of a pool are read from its memory now: %s", exc)
            self._look_at_all()
        finally:
            with self._inbox.lock:
                self._has_ended = True
            self._waiter.close()

    def _collect(self) -> None:
        seen, idle = self._store.seen(), time.monotonic()
        while True:
            self._welcome()
            now = self._store.seen()
            if now != seen:
                for stripe, watched in list(self._watched.items()):
                    if now[stripe] != seen[stripe]:
                        self._look(watched, now[stripe] - seen[stripe])
                        if not watched:
                            del self._watched[stripe]
                seen = now
            if self._watched:
                idle = time.monotonic()
            with self._inbox.lock:
                if self._news:
                    continue
                if not self._watched and time.monotonic() - idle >= _LINGER:
                    self._has_ended = True
                    return
                self._is_asleep = True
            stripes = sum(1 << stripe for stripe in self._watched) | self._inbox._site.alarms
            rung = self._store.wait_news(
                self._waiter, stripes, seen, _native.now() + int(_SLICE * 1e9)
            )
            self._is_asleep = False
            if self._inbox._site.broken is not None:
                self._look_at_all()
            elif not rung:
                self._inbox.make_room()
                if self._inbox._moved:
                    self._look_at_all()

    def _welcome(self) -> None:
        """Begin to watch the new futures. Some may have an outcome by now."""
        while self._news:
            future = self._news.popleft()
            if not self._accept(future):
                stripe = self._store.stripe(future._key)
                self._watched.setdefault(stripe, {})[future._key] = future

    def _look(self, watched: dict[bytes, Future[Any]], most: int) -> None:
        """Collect up to `most` outcomes of a stripe, which are as many as were stored in it."""
        found = []
        for key, future in watched.items():
            if self._accept(future):
                found.append(key)
                if len(found) == most:
                    break
        for key in found:
            del watched[key]

    def _look_at_all(self) -> None:
        """Collect all that is there: the pool is broken, or its outcomes were moved."""
        with contextlib.suppress(ShmqError):
            self._welcome()
        for watched in self._watched.values():
            self._look(watched, len(watched) + 1)

    def _accept(self, future: Future[Any]) -> bool:
        stored = None if future._state != PENDING else self._inbox.look(future._key)
        if stored is not None:
            self._inbox.accept(future, stored)
        return future._state != PENDING
