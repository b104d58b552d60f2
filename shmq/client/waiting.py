"""The ways to wait for messages that consumers of one topic and of many share: asyncio, and a file
descriptor for other event loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast, overload

from shmq import _native, arguments
from shmq.errors import Gone

if TYPE_CHECKING:
    from shmq.client.beacon import Beacon
    from shmq.client.message import Batch, Message

T = TypeVar("T")

#: A coroutine that finds a message each time yields to other tasks after this number of them.
_TURN: Final = 32


class Waiting:
    """A consumer's methods for event loops."""

    _takes = 0
    _fileno: Beacon | None = None

    if TYPE_CHECKING:
        _beacon: Callable[[], None] | None

        @property
        def closed(self) -> bool: ...
        @property
        def _broker(self) -> _native.Broker: ...
        @overload
        def take(self, timeout: None = None) -> Message: ...
        @overload
        def take(self, timeout: float | None) -> Message | None: ...
        def take(self, timeout: float | None = None) -> Message | None: ...
        def take_many(self, n: int, timeout: float | None = None) -> Batch: ...
        def close(self) -> None: ...
    else:
        __slots__ = ()

    @overload
    async def take_async(self, timeout: None = None) -> Message: ...

    @overload
    async def take_async(self, timeout: float | None) -> Message | None: ...

    async def take_async(self, timeout: float | None = None) -> Message | None:
        """Like `take`, for asyncio: return the next message; None after `timeout` seconds (None: no
        limit; 0: do not wait). A call that is cancelled takes nothing. Raises Gone."""
        if self._rushes():
            await self._give_way()
        if timeout is not None:
            timeout = arguments.limit("timeout", timeout)
        message = self.take(0)
        if message is not None or timeout == 0:
            return message
        return await self._wait(functools.partial(self.take, 0), timeout)

    async def take_many_async(self, n: int, timeout: float | None = None) -> Batch:
        """Like `take_many`, for asyncio: return 1 to n messages as soon as there are any; an empty
        Batch after `timeout` seconds (None: no limit; 0: do not wait). A call that is cancelled
        takes nothing. Raises Gone."""
        if self._rushes():
            await self._give_way()
        if timeout is not None:
            timeout = arguments.limit("timeout", timeout)
        batch = self.take_many(n, 0)
        if batch or timeout == 0:
            return batch
        return await self._wait(lambda: self.take_many(n, 0) or None, timeout) or batch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        try:
            message = await self.take_async()
        except Gone:
            if self.closed or self._broker.closed or self._broker.stopped:
                raise StopAsyncIteration from None
            raise
        return message

    def _rushes(self) -> bool:
        """Returns True if the other tasks of the loop should have a turn before the next take."""
        self._takes += 1
        return self._takes % _TURN == 0

    async def _give_way(self) -> None:
        from shmq.client import aio

        await aio.give_way()

    async def _wait(self, look: Callable[[], T | None], timeout: float | None) -> T | None:
        from shmq.client import aio

        return await aio.take(cast(Any, self), look, timeout)

    def fileno(self) -> int:
        """Return a file descriptor that is readable while there may be something to take, for
        `selectors`, `loop.add_reader` and other event loops.

        Call `take(0)` when it is readable. It stays readable until a call has found nothing to
        take; only poll it, do not read it. A thread feeds it, which the first call starts. The
        descriptor is closed with the consumer, so unregister it before. A forked child gets another
        one. Raises Gone if the consumer was closed.
        """
        from shmq.client import beacon

        if self.closed or self._fileno is None or self._fileno.is_inherited:
            self._fileno = beacon.Beacon(self)
        return self._fileno.fd

    def _quench(self) -> None:
        if self._fileno is not None:
            self._fileno.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
