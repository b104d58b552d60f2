"""One thread that waits for messages in all channels to which the connections of a gateway process
are subscribed.

A message that a client of the same process publishes needs no thread: the publish names the queues
for which the thread would have been woken (`_native.Intake`), and their subscribers take at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, Final, Protocol, TypeAlias

from shmq import _native
from shmq.errors import Gone

_SLICE_NS: Final = 10**9


class Subscriber(Protocol):
    """A connection that is subscribed to a channel."""

    @property
    def gathers(self) -> bool:
        """Whether messages that were taken wait for more, so that another one is in no hurry."""

    def ring(self) -> None:
        """Take messages: there may be some in the channel."""


#: A subscriber and the number of its queue; -1 if the consumer was closed.
_Watched: TypeAlias = tuple[Subscriber, int]


class DeliveryWaiter:
    """The thread, which starts with the first subscriber. Its methods are called in the event
    loop's thread."""

    def __init__(self, broker: _native.Broker) -> None:
        self.waiter = _native.Waiter(broker)
        self._loop: asyncio.AbstractEventLoop | None = None  # None: no subscriber yet
        self._lock = threading.Lock()
        self._queues: dict[Any, int] = {}  # of all consumers that were watched
        self._watched: dict[Any, _Watched] = {}
        self._of_queue: dict[int, dict[Any, None]] = {}  # the keys of `_watched`
        self._seen: dict[Any, _Watched] = {}  # the consumers for which the thread waits now
        self._announced: dict[Any, None] = {}  # of these, the ones announced meanwhile
        self._closed = False

    def watch(self, consumer: Any, subscriber: Subscriber) -> None:
        """Call the subscriber's `ring` once, when the consumer may have a message."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            arguments = (self.waiter, self._loop)
            threading.Thread(target=self._run, args=arguments, name="delivery", daemon=True).start()
        ready = False
        queue = self._queues.get(consumer)
        if queue is None:
            session = consumer.session
            queue = self._queues[consumer] = -1 if session is None else session[0]
        with self._lock:
            self._watched[consumer] = subscriber, queue
            self._of_queue.setdefault(queue, {})[consumer] = None
            new = consumer not in self._seen
            if not new:
                ready = self._announce(consumer)
        if new:
            self.waiter.wake()
        elif ready:
            self._loop.call_soon(self._ring_one, consumer)

    def unwatch(self, consumer: Any) -> None:
        """Stop waiting for a consumer whose connection has ended."""
        with self._lock:
            watched = self._forget(consumer) is not None
        self._queues.pop(consumer, None)
        if watched:
            self.waiter.wake()  # so that the thread drops its reference

    def rung(self, queues: list[int]) -> bool:
        """Let the subscribers of these queues take what this process has published. Returns whether
        one of them is in no hurry: then let the thread do it for a while, which is late but finds
        more at once."""
        gathers = False
        with contextlib.suppress(Gone):  # the broker was closed
            for queue in queues:
                gathers = self._ring_all(queue) or gathers
        return gathers

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self.waiter.wake()

    # ---- with the lock ----

    def _announce(self, consumer: Any) -> bool:
        self._announced[consumer] = None
        try:
            return self.waiter.announce(consumer)
        except Gone:  # the broker was closed
            return False

    def _forget(self, consumer: Any) -> Subscriber | None:
        subscriber, queue = self._watched.pop(consumer, (None, -1))
        if subscriber is not None:
            consumers = self._of_queue[queue]
            del consumers[consumer]
            if not consumers:
                del self._of_queue[queue]
        return subscriber

    # ---- rings ----

    def _ring_one(self, consumer: Any) -> bool:
        """Returns whether its subscriber gathers messages."""
        with self._lock:
            subscriber = self._forget(consumer)
        if subscriber is None:
            return False
        subscriber.ring()
        return subscriber.gathers

    def _ring_all(self, queue: int) -> bool:
        """Returns whether one of the subscribers that were rung gathers messages."""
        with self._lock:
            left = list(self._of_queue.get(queue, ()))
        if len(left) == 1:  # it takes, or it announces the waiter again
            return self._ring_one(left[0])
        done: set[Any] = set()
        gathers = announced = False
        while left:
            ready = self.waiter.wait(left, 0)
            if ready:
                announced = False
                consumer = left[ready[0]]
                done.add(consumer)
                gathers = self._ring_one(consumer) or gathers
            elif announced:
                return gathers
            else:  # these wait on: the thread must be woken for them again
                with self._lock:
                    if left[0] not in self._seen:  # the thread does not sleep
                        return gathers
                    self._announce(left[0])
                announced = True
            with self._lock:
                left = [one for one in self._of_queue.get(queue, ()) if one not in done]
        if not done:
            self.waiter.wake()  # nobody here waits any more; the thread passes it on
        return gathers

    def _run(self, waiter: _native.Waiter, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self._closed:
                with self._lock:
                    self._seen = self._watched.copy()
                consumers = list(self._seen)
                ready = waiter.wait(consumers, _native.now() + _SLICE_NS)
                rung = []
                with self._lock:
                    found = {consumers[index]: None for index in ready}
                    for consumer in self._announced:  # after the wait has withdrawn it, perhaps
                        if waiter.withdraw(consumer):
                            found[consumer] = None
                    self._announced = {}
                    self._seen = {}
                    for consumer in found:
                        subscriber = self._forget(consumer)
                        if subscriber is not None:
                            rung.append(subscriber)
                        else:
                            waiter.pass_on(consumer)
                if rung:
                    loop.call_soon_threadsafe(_ring, rung)
        except (Gone, RuntimeError):  # the broker or the loop was closed
            pass


def _ring(subscribers: list[Subscriber]) -> None:
    for subscriber in subscribers:
        subscriber.ring()
