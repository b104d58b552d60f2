"""Threads for work that may take long: a pool for each kind of work, shared fairly.

A pool has threads of its own, so work of one kind never waits behind another: a COMMIT into a full
topic waits for room, an authorisation server or a nsqlookupd takes its time, and a client makes
many of these wait at once. Inside a pool no key (the client's address, or the server that is asked)
has more than its share of the threads, and the next free thread goes to the key that has the
fewest. A connection has one job at a time.
"""

from __future__ import annotations

import asyncio
import errno
import functools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

#: Kind -> threads of its pool, and of one key. A pool starts a thread when it needs one.
KINDS: Final = {
    "general": (16, 12),  # SUB, channels, operators: what waits for the broker alone
    "topic": (32, 16),  # topics that are missing: nsqlookupds are asked, too
    "look": (4, 4),  # statistics
    "close": (4, 4),  # consumers of connections that have ended
    "lease": (16, 12),  # the lease protocol, but for the next two
    "stage": (8, 6),
    "commit": (16, 8),
    "login": (64, 16),  # authorisation servers
    "password": (2, 1),  # of the access file; each takes some 50 ms of a core
    "lookup": (32, 8),  # nsqlookupds; the key is the one that is asked
}

_Waiting = deque[tuple[Callable[[], Any], "asyncio.Future[Any]"]]


class Pool:
    """The work of one kind; used in the event loop's thread only."""

    def __init__(self, name: str, threads: int, per_key: int) -> None:
        self._threads, self._per_key = threads, per_key
        self._pool = ThreadPoolExecutor(threads, name)
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._queued: set[asyncio.Future[Any]] = set()
        self._closed = False

    def ask(self, key: str, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Return the future of `call`, which runs in a thread. If the future is cancelled before
        its turn, `call` does not run. Its OSError may say that there is no thread. Raises
        RuntimeError after `close`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append((call, future))
        self._queued.add(future)
        self._start()
        return future

    def forget(self, future: asyncio.Future[Any]) -> None:
        """Cancel the future if its call has not begun."""
        if future in self._queued:
            future.cancel()

    def close(self) -> None:
        """Drop the calls that have not begun, and accept no more."""
        self._closed = True
        self._waiting.clear()
        self._queued.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._waiting and self._running.total() < self._threads:
            # the key with the fewest running; of several, the one that has waited longest
            key = min(self._waiting, key=lambda name: self._running[name])
            if self._running[key] >= self._per_key:
                return
            waiting = self._waiting[key]
            call, future = waiting.popleft()
            self._queued.discard(future)
            if waiting:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            if future.cancelled():
                continue
            self._running[key] += 1
            once = _Once(call)
            try:
                inner = future.get_loop().run_in_executor(self._pool, once)
            except RuntimeError as exc:
                if self._closed:
                    raise
                once.call = _nothing  # a thread of the pool may still come to it
                self._give_back(key)
                future.set_exception(OSError(errno.ENOMEM, str(exc)))
                continue
            inner.add_done_callback(functools.partial(self._end, key, future))

    def _give_back(self, key: str) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def _end(self, key: str, future: asyncio.Future[Any], inner: asyncio.Future[Any]) -> None:
        self._give_back(key)
        if inner.cancelled():
            future.cancel()
        else:
            error = inner.exception()
            if not future.cancelled():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(inner.result())
        self._start()


class _Once:
    """A call that a thread makes, if nobody has replaced it before."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __call__(self) -> Any:
        return self.call()


def _nothing() -> None:
    pass


class Pools:
    """The pools of one process."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}

    def of(self, kind: str) -> Pool:
        """The pool of a kind."""
        found = self._pools.get(kind)
        if found is None:
            found = self._pools[kind] = Pool(kind, *KINDS[kind])
        return found

    def close(self) -> None:
        """Close all pools."""
        for pool in self._pools.values():
            pool.close()
