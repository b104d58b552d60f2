"""Taking messages from one channel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self, TypeVar, overload

from shmq import _native
from shmq.client.handle import Reduction, Shown, home_of, reduction

if TYPE_CHECKING:
    from shmq.client.message import Batch, Message

T = TypeVar("T")

#: A coroutine that finds a message each time yields to other tasks after this number of them.
_TURN: Final = 32


class Consumer(_native.Consumer, metaclass=Shown):
    """Takes from one channel; returned by `Broker.consumer`. Any thread may use it.

    `take(timeout: float | None = None) -> Message | None`: the next message; None after `timeout`
    seconds (None: no limit; 0: do not wait).

    `take_many(n: int, timeout: float | None = None) -> Batch`: 1 to n messages at once, as soon as
    there are any; an empty Batch after the timeout.

    Iterating takes one message after the other. It ends when the consumer or its broker is closed
    or the instance is stopped, and raises Gone if the channel or topic was deleted. At most
    `max_in_flight` messages are in flight at a time; `take` then waits for a finish or requeue.

    A message that is not finished within the consumer's message timeout, or by the time the
    consumer is closed or its process dies, is delivered again. `take` raises Gone if the channel or
    topic was deleted, the instance stopped or the consumer closed; the text says which.

    `take_async`, `take_many_async` and `async for` do the same in asyncio, in any number of tasks
    and loops. One thread waits for all consumers of the process; it ends when no task waits.

    It can be pickled: the copy in another process is a consumer of its own of the same channel,
    with the same settings. The messages in flight to this one stay with it.
    """

    # not in __dict__, which stays empty: to look up a method is faster then
    __slots__ = ("__dict__", "__weakref__", "_home", "_timeout_ns")
    _internal = frozenset({"session"})
    _takes = 0

    def __init__(
        self,
        broker: _native.Broker,
        queue: int,
        serial: int,
        topic: str,
        channel: str,
        max_in_flight: int,
        msg_timeout: int,
        batch_type: type[_native.Batch],
        on_forked: Callable[[], tuple[_native.Broker, int, int]],
    ) -> None:
        super().__init__(
            broker, queue, serial, topic, channel, max_in_flight, msg_timeout, batch_type, on_forked
        )
        self._home = home_of(on_forked)
        self._timeout_ns = msg_timeout

    def __reduce__(self) -> Reduction:
        ns = self._timeout_ns
        seconds = "server" if ns == 0 else None if ns < 0 else ns / 1e9
        most = self.max_in_flight
        return reduction(self._home, "consumer", self.topic, self.channel, most, seconds)

    def __repr__(self) -> str:
        where = f" on {self._home.instance!r}" if self._home else ""
        state = (
            ", closed"
            if self.closed
            else f": {self.in_flight} of at most {self.max_in_flight} in flight"
        )
        return f"<shmq.Consumer of {f'{self.topic}/{self.channel}'!r}{where}{state}>"

    if TYPE_CHECKING:

        def take_many(self, n: int, timeout: float | None = None) -> Batch: ...

    @overload
    async def take_async(self, timeout: None = None) -> Message: ...

    @overload
    async def take_async(self, timeout: float | None) -> Message | None: ...

    async def take_async(self, timeout: float | None = None) -> Message | None:
        """Like `take`, for asyncio: return the next message; None after `timeout` seconds (None: no
        limit; 0: do not wait). A call that is cancelled takes nothing. Raises Gone."""
        if self._rushes():
            await self._give_way()
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
        batch = self.take_many(n, 0)
        if batch or timeout == 0:
            return batch
        return await self._wait(lambda: self.take_many(n, 0) or None, timeout) or batch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        try:
            message = await self.take_async()
        except _native.Gone:
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

        return await aio.take(self, look, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
