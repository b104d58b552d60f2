"""Questions to authorisation servers: in threads of their own, some at a time for each address.

A server may take seconds, and a client without a secret may ask as often as it connects. So those
questions wait for nobody else's work and nobody else's work for them; no address has more than its
share of the threads, and the next turn is the address's that has the fewest of them.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

#: Threads are made as they are needed.
THREADS: Final = 64
PER_ADDRESS: Final = 16

_Waiting = deque[tuple[Callable[[], Any], "asyncio.Future[Any]"]]


class Logins:
    """One per process, used in the event loop's thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "login")
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def ask(self, address: str, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """The future of what `call` returns or raises in a thread. address: who it is for, an IP
        address. Cancelled before its turn, it is not called."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append((call, future))
        self._start()
        return future

    def close(self) -> None:
        """Begin nothing more."""
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._waiting and self._running.total() < THREADS:
            # of those with as few under way, the one that has waited longest
            address = min(self._waiting, key=lambda name: self._running[name])
            if self._running[address] >= PER_ADDRESS:
                return
            waiting = self._waiting[address]
            call, future = waiting.popleft()
            if waiting:
                self._waiting.move_to_end(address)
            else:
                del self._waiting[address]
            if future.cancelled():
                continue
            self._running[address] += 1
            inner = future.get_loop().run_in_executor(self._pool, call)
            inner.add_done_callback(functools.partial(self._end, address, future))

    def _end(self, address: str, future: asyncio.Future[Any], inner: asyncio.Future[Any]) -> None:
        self._running[address] -= 1
        if not self._running[address]:
            del self._running[address]
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
