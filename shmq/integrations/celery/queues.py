"""AMQP's queues on an instance."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import shmq
from shmq.errors import Gone
from shmq.integrations.celery import frame, names
from shmq.integrations.celery.exchanges import Exchanges

#: How many messages a consumer may hold. The channel's prefetch limit is what counts.
_MOST_HELD: Final = (1 << 32) - 1


class Queue:
    """One queue: a topic for each priority that was used, each with one channel."""

    def __init__(self, broker: shmq.Broker, name: str, ephemeral: bool) -> None:
        self._broker = broker
        self.name = name
        self.ephemeral = ephemeral
        self.topic = names.topic_of(name, ephemeral)
        self.channel = names.channel_of(ephemeral)
        self._producer: shmq.Producer | None = None
        self._sealed: shmq.Producer | None = None
        self._made: set[str] = set()

    def make(self) -> None:
        """Create the queue if it is missing."""
        self._broker.create_channel(self.topic, self.channel)
        self._made.add(self.topic)

    def exists(self) -> bool:
        """Whether the queue is there."""
        try:
            self._broker.channel_depth(self.topic, self.channel)
        except Gone:
            return False
        return True

    def consumer(self, steps: tuple[int, ...]) -> shmq.Consumer | shmq.MultiConsumer:
        """A consumer of its own of the queue. It holds a message until the message is answered or
        its process ends."""
        self.make()
        lanes = [names.pattern(self._lane(step)) if step else self.topic for step in steps]
        return self._broker.consumer(lanes, self.channel, _MOST_HELD, None, policy="strict")

    def publish(
        self, body: bytes, step: int, defer: float | None, ttl: float | None, seal: bool = False
    ) -> None:
        """Publish to it. seal: who takes the message unpickles it. A `defer` beyond the broker's
        limit is shortened: the consumer that takes the message defers it again. Raises Gone if an
        ephemeral queue is not there."""
        if defer is not None:
            defer = min(defer, self._broker.limits["max_req_timeout"] / 1e9)
        if self.ephemeral and not self.exists():
            raise Gone(f"queue {self.name!r} has gone with its last consumer")
        topic = self._lane(step)
        if topic not in self._made:
            self._broker.create_channel(topic, self.channel)
            self._made.add(topic)
        if self._producer is None:
            self._producer = self._broker.producer(self.topic)
        producer = self._sealed if seal else self._producer
        if producer is None:
            producer = self._sealed = self._broker.producer(self.topic)
            producer.seal()
        producer.publish(body, defer, None, None, ttl, names.lane(step))

    def depth(self) -> int:
        """How many messages wait."""
        total = 0
        for topic in self._topics():
            with contextlib.suppress(Gone):
                total += self._broker.channel_depth(topic, self.channel)
        return total

    def purge(self) -> int:
        """Drop all messages. Returns how many waited."""
        waited = self.depth()
        for topic in self._topics():
            with contextlib.suppress(Gone):
                self._broker.empty_channel(topic, self.channel)
        return waited

    def delete(self) -> None:
        """Delete it with its messages."""
        for topic in self._topics():
            with contextlib.suppress(Gone):
                self._broker.delete_topic(topic)

    def configure(self, **settings: Any) -> None:
        """Change the settings of its channels."""
        self._broker.configure(self.topic, self.channel, **settings)

    def _lane(self, step: int) -> str:
        return names.topic_of(self.name, self.ephemeral, step)

    def _topics(self) -> list[str]:
        return [self._lane(step) for step in range(names.PRIORITIES)]


class Queues:
    """The queues of one instance, for one process."""

    def __init__(self, broker: shmq.Broker) -> None:
        self.broker = broker
        self.instance = broker.instance
        self.exchanges = Exchanges(broker)
        self._known: dict[tuple[str, bool], Queue] = {}

    def get(self, name: str) -> Queue:
        """The queue of this name."""
        declared = self.exchanges.queue(name)
        return self._queue(name, bool(declared and declared["ephemeral"]))

    def _queue(self, name: str, ephemeral: bool) -> Queue:
        queue = self._known.get((name, ephemeral))
        if queue is None:
            queue = self._known[name, ephemeral] = Queue(self.broker, name, ephemeral)
        return queue

    def exists(self, name: str) -> bool:
        """Whether a queue is there."""
        return self.get(name).exists()

    def declare(self, name: str, ephemeral: bool, arguments: dict[str, Any] | None) -> None:
        """Create a queue if it is missing."""
        known = self.exchanges.queue(name)
        if known is not None:
            ephemeral = known["ephemeral"]
        queue = self._queue(name, ephemeral)
        queue.make()
        if known is None:  # after it was made: a queue that is not there is forgotten
            self.exchanges.declare_queue(name, {"ephemeral": ephemeral})
            if ephemeral:
                self._forget_gone()
        if arguments and not ephemeral:
            self._configure(queue, arguments)

    def _forget_gone(self) -> None:
        """Delete the bindings of queues that have gone with their consumer: a process that was
        killed could not."""
        for name in self.exchanges.ephemeral_queues():
            if not self._queue(name, True).exists():
                self.exchanges.delete_queue(name)
                self._known.pop((name, True), None)

    def delete(self, name: str) -> None:
        """Delete a queue with its bindings."""
        self.get(name).delete()
        self.exchanges.delete_queue(name)
        for ephemeral in (False, True):
            self._known.pop((name, ephemeral), None)

    def publish(
        self,
        name: str,
        body: bytes,
        step: int,
        defer: float | None,
        ttl: float | None,
        seal: bool,
    ) -> None:
        """Publish to a queue. A message for a queue that has gone with its last consumer is
        dropped, and so are the queue's bindings."""
        queue = self.get(name)
        try:
            queue.publish(body, step, defer, ttl, seal)
            return
        except Gone:
            if self.broker.ended:
                raise
        # Another process has deleted it, and may have declared it again: a program that asks a
        # worker deletes its queue of replies after each, and its next question declares it.
        self._known.pop((name, queue.ephemeral), None)
        queue = self.get(name)
        try:
            queue.publish(body, step, defer, ttl, seal)
        except Gone:
            if self.broker.ended or not queue.ephemeral:
                raise
            self._known.pop((name, True), None)
            self.exchanges.delete_queue(name)

    def _configure(self, queue: Queue, arguments: dict[str, Any]) -> None:
        settings: dict[str, Any] = {}
        if (ttl := arguments.get("x-message-ttl")) is not None:
            settings["message_ttl"] = frame.seconds(ttl)
        if (most := arguments.get("x-max-length")) is not None:
            settings.update(max_messages=most, overflow="drop-oldest")
        if settings:
            queue.configure(**settings)
