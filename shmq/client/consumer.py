"""Taking messages from one channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shmq import _native
from shmq.client.handle import Reduction, Shown, home_of, reduction
from shmq.client.waiting import Waiting

if TYPE_CHECKING:
    from shmq.client.message import Batch


class Consumer(_native.Consumer, Waiting, metaclass=Shown):
    """Takes from one channel; returned by `Broker.consumer`. Any thread may use it.

    `take(timeout: float | None = None) -> Message | None`: the next message; None after `timeout`
    seconds (None: no limit; 0: do not wait).

    `take_body(timeout: float | None = None) -> bytes | Message | None`: the body of the next
    message, which is finished in the same call; a body of more than 4096 bytes comes as the
    message, which is still in flight.

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
    `fileno()` is for other event loops.

    It can be pickled: the copy in another process is a consumer of its own of the same channel,
    with the same settings. The messages in flight to this one stay with it.
    """

    # not in __dict__, which stays empty: to look up a method is faster then
    __slots__ = ("__dict__", "__weakref__", "_home", "_timeout_ns")
    _internal = frozenset({"session"})

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

    def close(self) -> None:
        """Return the messages that are not settled to the channel, and wake the waiting threads.

        They, and every later call, raise Gone; an iteration ends. May be called again.
        """
        super().close()
        if self._fileno is not None:
            self._quench()
