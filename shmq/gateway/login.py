"""Requests to authorisation servers, in their own pool of threads, limited per client address.

A server may take seconds to answer, and a client without a valid secret may connect again and
again. So these requests do not delay other work, nor does other work delay them. No address has
more than its share of the threads, and the next free thread goes to the address that has the
fewest.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

#: The pool starts a thread when it needs one.
THREADS: Final = 64
PER_ADDRESS: Final = 16

_Waiting = deque[tuple[Callable[[], Any], "asyncio.Future[Any]"]]


class Logins:
    """The requests of one process; used in the event loop's thread only."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "login")
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def ask(self, address: str, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Return the future of `call`, which runs in a thread. address: the IP address of the
        client. If the future is cancelled before its turn, `call` does not run."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append((call, future))
        self._start()
        return future

    def close(self) -> None:
        """Drop the requests that have not begun, and accept no more."""
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._waiting and self._running.total() < THREADS:
            # the address with the fewest running; of several, the one that has waited longest
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
