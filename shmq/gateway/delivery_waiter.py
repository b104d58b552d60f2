"""One thread that waits for messages in all channels to which the connections of a gateway process
are subscribed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final, Protocol

from shmq import _native
from shmq.errors import Gone

_SLICE_NS: Final = 10**9


class Subscriber(Protocol):
    """A connection that is subscribed to a channel."""

    def ring(self) -> None:
        """Take messages: there may be some in the channel."""


class DeliveryWaiter:
    """The thread, which starts with the first subscriber. Its methods are called in the event
    loop's thread."""

    def __init__(self, broker: _native.Broker) -> None:
        self._broker = broker
        self._waiter: _native.Waiter | None = None  # None: no subscriber yet
        self._lock = threading.Lock()
        self._watched: dict[Any, Subscriber] = {}
        self._seen: dict[Any, Subscriber] = {}  # the consumers for which the thread waits now
        self._closed = False

    def watch(self, consumer: Any, subscriber: Subscriber) -> None:
        """Call the subscriber's `ring` once, when the consumer may have a message."""
        if self._waiter is None:
            self._waiter = _native.Waiter(self._broker)
            arguments = (self._waiter, asyncio.get_running_loop())
            threading.Thread(target=self._run, args=arguments, name="delivery", daemon=True).start()
        with self._lock:
            self._watched[consumer] = subscriber
            new = consumer not in self._seen
        if new:
            self._waiter.wake()

    def unwatch(self, consumer: Any) -> None:
        """Stop waiting for a consumer whose connection has ended."""
        with self._lock:
            watched = self._watched.pop(consumer, None) is not None
        if watched and self._waiter is not None:
            self._waiter.wake()  # so that the thread drops its reference

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        if self._waiter is not None:
            self._waiter.wake()

    def _run(self, waiter: _native.Waiter, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self._closed:
                with self._lock:
                    self._seen = self._watched.copy()
                consumers = list(self._seen)
                ready = waiter.wait(consumers, _native.now() + _SLICE_NS)
                if not ready:
                    continue
                rung = []
                with self._lock:
                    for index in ready:
                        consumer = consumers[index]
                        subscriber = self._watched.pop(consumer, None)
                        if subscriber is not None:
                            rung.append(subscriber)
                        else:
                            waiter.pass_on(consumer)
                    self._seen = {}
                if rung:
                    loop.call_soon_threadsafe(_ring, rung)
        except (Gone, RuntimeError):  # the broker or the loop was closed
            pass


def _ring(subscribers: list[Subscriber]) -> None:
    for subscriber in subscribers:
        subscriber.ring()
