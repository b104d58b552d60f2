"""The broker of Dramatiq."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import dramatiq
from dramatiq.encoder import PickleEncoder
from dramatiq.errors import (
    ConnectionClosed,
    ConnectionFailed,
    QueueJoinTimeout,
    QueueNotFound,
)
from dramatiq.middleware import Middleware

import shmq
from shmq.integrations.dramatiq.consumer import Consumer
from shmq.integrations.dramatiq.topics import CHANNEL, topic_of
from shmq.integrations.lanes import check_max_priority, lane_number, lanes_of
from shmq.integrations.link import Link


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """Raise the errors that Dramatiq's worker waits out, in place of shmq's."""
    try:
        yield
    except shmq.NotRunning as exc:
        raise ConnectionFailed(str(exc)) from exc
    except shmq.Gone as exc:
        raise ConnectionClosed(str(exc)) from exc


class Broker(dramatiq.Broker):
    """A broker whose queues are topics of shmq.

    instance: the name of a running instance, None for SHMQ_INSTANCE or `default`, or an
    `shmq.Broker`. It is attached when the first message is sent or taken, so a program may be
    imported without it. A forked worker attaches by itself.
    middleware: as in `dramatiq.Broker`.
    namespace: the beginning of the topics' names: queue `default` is the topic `dramatiq.default`.
    max_priority: the highest `broker_priority` of messages, as in Dramatiq's RabbitmqBroker. A
    queue has then up to four lanes, and a message of a higher lane goes before all of a lower one.
    None: one lane. All programs of a namespace must say the same.
    owner: the user whose instance it may be, as in `shmq.attach`.
    timeout: seconds to wait for an instance that does not run.

    Messages that a worker has prefetched come back when it dies, and have no time-out while it
    lives. Messages with a delay wait in the instance, so there are no delay queues. A message that
    Dramatiq gives up is a dead letter of its topic (`shmq dead ls dramatiq.default workers`).

    Raises dramatiq's ConnectionFailed if no instance runs, and ConnectionClosed if it was stopped.
    """

    def __init__(
        self,
        instance: str | shmq.Broker | None = None,
        *,
        middleware: list[Middleware] | None = None,
        namespace: str = "dramatiq",
        max_priority: int | None = None,
        owner: str | int | None = None,
        timeout: float = 10.0,
    ) -> None:
        super().__init__(middleware=middleware)
        self.queues: set[str] = set()
        self.namespace = namespace
        self.max_priority = check_max_priority(max_priority)
        self._link = Link(instance, owner, timeout)
        self._link.unpickles = lambda: isinstance(dramatiq.get_encoder(), PickleEncoder)
        self._lanes: dict[str, list[str]] = {}

    @property
    def attachment(self) -> shmq.Broker:
        """The attachment, for `stats()`, `dead()` and everything else. Raises ConnectionFailed."""
        with connection_errors():
            return self._link.broker

    def topics(self, queue_name: str) -> list[str]:
        """The topics of a queue, that of the lowest priority first."""
        found = self._lanes.get(queue_name)
        if found is None:
            topic = topic_of(self.namespace, queue_name)
            found = self._lanes[queue_name] = lanes_of(topic, self.max_priority)
        return found

    # ---- queues ----

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue. Its topics are made with the first message or worker."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def get_declared_queues(self) -> set[str]:
        """The names of the queues that were declared."""
        return self.queues.copy()

    # ---- messages ----

    def enqueue(
        self, message: dramatiq.Message[Any], *, delay: int | None = None
    ) -> dramatiq.Message[Any]:
        """Send a message, to be delivered after `delay` milliseconds. Returns it.

        Raises ConnectionFailed, ConnectionClosed, and shmq's MessageTooBig and Full.
        """
        lane = 0
        if self.max_priority is not None:
            lane = lane_number(self._priority(message), self.max_priority)
        topic = self.topics(message.queue_name)[lane]
        self.emit_before("enqueue", message, delay)
        with connection_errors():
            self._link.publish(topic, CHANNEL, message.encode(), (delay or 0) / 1e3)
        self.emit_after("enqueue", message, delay)
        return message

    def _priority(self, message: dramatiq.Message[Any]) -> int:
        return int(message.options.get("broker_priority") or 0)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> Consumer:
        """A consumer of a queue, which holds up to `prefetch` messages at a time and waits up to
        `timeout` milliseconds for the next one. Raises QueueNotFound if the queue was not declared,
        ConnectionFailed and ConnectionClosed."""
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        with connection_errors():
            taker = self._link.consumer(self.topics(queue_name), CHANNEL, prefetch)
        return Consumer(taker, timeout, self._link.refuses)

    # ---- looking and cleaning ----

    def flush(self, queue_name: str) -> None:
        """Drop all messages of a queue: those that wait, the delayed and those in flight. Its dead
        letters stay. Raises ConnectionFailed and ConnectionClosed."""
        for topic in self.topics(queue_name):
            with connection_errors():
                self._link.retried(functools.partial(self._empty, topic))

    def _empty(self, topic: str) -> None:
        broker = self._link.broker
        broker.create_channel(topic, CHANNEL)
        broker.empty_channel(topic, CHANNEL)

    def flush_all(self) -> None:
        """Drop all messages of all declared queues."""
        for queue_name in self.get_declared_queues():
            self.flush(queue_name)

    def join(self, queue_name: str, *, interval: int = 10, timeout: int | None = None) -> None:
        """Wait until the queue has no message: none that waits, is delayed or in flight. For tests.

        interval: milliseconds between two looks. timeout: milliseconds to wait, None for no limit.
        Raises QueueNotFound if the queue was not declared, QueueJoinTimeout, ConnectionFailed and
        ConnectionClosed.
        """
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        deadline = None if timeout is None else time.monotonic() + timeout / 1e3
        while self.size(queue_name):
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)
            time.sleep(interval / 1e3)

    def size(self, queue_name: str) -> int:
        """The number of messages of a queue: those that wait, the delayed and those in flight."""
        with connection_errors():
            return sum(
                self._link.retried(functools.partial(self._count, topic))
                for topic in self.topics(queue_name)
            )

    def _count(self, topic: str) -> int:
        self._link.broker.create_channel(topic, CHANNEL)
        counts = self._link.broker.channel_stats(topic, CHANNEL)
        return counts.depth + counts.in_flight + counts.deferred

    def close(self) -> None:
        """Detach from the instance: messages in flight go back. The next use attaches again."""
        self._link.close()
