"""Taking messages from one channel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self, TypeVar

from shmq import _native

if TYPE_CHECKING:
    from shmq.client.message import Batch, Message

T = TypeVar("T")

#: A coroutine that finds a message each time gives way to others after so many.
_TURN: Final = 32


class Consumer(_native.Consumer):
    """Takes from one channel; made by `Broker.consumer`. Any thread may use it.

    `take(timeout=None) -> Message | None`: the next message; None after `timeout` seconds (None:
    wait for ever, 0: do not wait).

    `take_many(n, timeout=None) -> Batch`: from 1 to n messages as soon as there are any, in one go;
    an empty Batch after the timeout.

    Iterating takes one after the other and ends when the consumer is closed. At most
    `max_in_flight` messages are out at a time; then `take` waits for a finish or requeue.

    What is not finished within the consumer's message timeout, and what is not finished when it
    is closed or its process dies, is handed out again. Raises Gone if the channel or topic is
    deleted or the consumer closed.

    `take_async`, `take_many_async` and `async for` do the same in asyncio, in any number of tasks
    and loops; one thread waits for all consumers of the process, and none while nobody waits.
    """

    _takes = 0

    async def take_async(self, timeout: float | None = None) -> Message | None:
        """As `take`, for asyncio. Cancelling it takes nothing."""
        if self._rushes():
            await self._give_way()
        message = self.take(0)
        if message is not None or timeout == 0:
            return message
        return await self._wait(functools.partial(self.take, 0), timeout)

    async def take_many_async(self, n: int, timeout: float | None = None) -> Batch:
        """As `take_many`, for asyncio. Cancelling it takes nothing."""
        if self._rushes():
            await self._give_way()
        batch: Batch = self.take_many(n, 0)
        if batch or timeout == 0:
            return batch
        return await self._wait(lambda: self.take_many(n, 0) or None, timeout) or batch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        try:
            message = await self.take_async()
        except _native.Gone:
            if self.closed or self._broker.closed:
                raise StopAsyncIteration from None
            raise
        assert message is not None
        return message

    def _rushes(self) -> bool:
        """Has it taken so often that the other tasks of the loop should have a turn?"""
        self._takes += 1
        return self._takes % _TURN == 0

    async def _give_way(self) -> None:
        from shmq.client import aio

        await aio.give_way()

    async def _wait(self, look: Callable[[], T | None], timeout: float | None) -> T | None:
        from shmq.client import aio

        return await aio.take(self, look, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
