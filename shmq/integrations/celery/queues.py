"""AMQP's queues on an instance."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from typing import Any, Final

import shmq
from shmq.errors import BadArgument, Gone
from shmq.integrations.celery import frame, leftovers, names
from shmq.integrations.celery.exchanges import Exchanges
from shmq.settings import Settings

_log = logging.getLogger(__name__)

#: How many messages a consumer may hold. The channel's prefetch limit is what counts.
_MOST_HELD: Final = (1 << 32) - 1
#: Arguments of a queue that have an effect, or need none because shmq does it anyway.
_ARGUMENTS: Final = {"x-message-ttl", "x-max-length", "x-max-length-bytes", "x-max-priority"}
_EXPIRES: Final = "x-expires"
#: How often a declaration that is repeated is stored as the last use of its queue.
_USED_SECONDS: Final = 1.0
#: How often a channel that takes all in-flight slots looks how many are left.
_LOOKS: Final = 64
#: How often a publisher looks whether somebody has changed the settings.
_LOOK_SECONDS: Final = 1.0
_PLAIN: Final = Settings()


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
        self._followed: dict[int, Settings] = {}
        self._looked: dict[int, float] = {}
        self._most: int | None = None

    def make(self) -> None:
        """Create the queue if it is missing."""
        self._broker.create_channel(self.topic, self.channel)
        self._made.add(self.topic)

    def exists(self) -> bool:
        """Whether the queue is there."""
        return self._exists(self.topic)

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
        if step and not time.monotonic() - self._looked.get(step, -math.inf) < _LOOK_SECONDS:
            self.follow(step)
        producer = self._sealed if seal else self._producer
        if producer is None:
            producer = self._sealed = self._broker.producer(self.topic)
            producer.seal()
        producer.publish(body, defer, None, None, ttl, names.lane(step))
        if self._most is not None:
            self._shorten(self._most)

    # ---- settings, which are one channel's, for the channels of all priorities ----

    def configure(self, **settings: Any) -> None:
        """Change the settings of the queue."""
        self._broker.configure(self.topic, self.channel, **settings)
        for step in self._lower():
            self.follow(step)
        self._most = settings.get("max_messages", self._most)

    def follow(self, step: int) -> None:
        """Give the messages of this priority the settings of the queue's first channel, which are
        those that people change. A channel with settings of its own keeps them."""
        topic, was = self._lane(step), self._followed.get(step, _PLAIN)
        self._looked[step] = time.monotonic()
        try:
            base = self._broker.settings(self.topic, self.channel)
            now = self._broker.settings(topic, self.channel)
            if now != base and now in (_PLAIN, was):
                self._broker.configure(topic, self.channel, **_keywords(base))
            self._followed[step] = base
        except Gone:  # one of the two is not there yet
            self._followed.pop(step, None)
        except BadArgument as exc:
            self._followed[step] = base
            _log.warning("%s does not get the settings of %s: %s", topic, self.topic, exc)

    def follow_all(self) -> None:
        """Do so for all priorities that have a channel."""
        for step in self._lower():
            self.follow(step)

    def _lower(self) -> list[int]:
        return [step for step in range(1, names.PRIORITIES) if self._exists(self._lane(step))]

    def _exists(self, topic: str) -> bool:
        try:
            self._broker.channel_depth(topic, self.channel)
        except Gone:
            return False
        return True

    def _shorten(self, most: int) -> None:
        """Drop the oldest messages of the lowest priorities until `most` are left: a channel counts
        its own alone."""
        lowest = reversed(range(names.PRIORITIES)) if self._waiting() > most else ()
        for step in lowest:
            while self._waiting() > most and self._shortened(self._lane(step), most):
                pass

    def _shortened(self, topic: str, most: int) -> bool:
        if not self._exists(topic) or not self._broker.channel_depth(topic, self.channel):
            return False
        with contextlib.closing(self._broker.consumer(topic, self.channel, 1, None)) as consumer:
            message = consumer.take(0)
            if message is None:
                return False
            if self._waiting() >= most:
                message.finish()
                return True
            message.requeue(failed=False)  # others dropped some meanwhile
            return False

    # ---- looking and cleaning ----

    def _waiting(self) -> int:
        total = 0
        for topic in self._topics():
            with contextlib.suppress(Gone):
                total += self._broker.channel_depth(topic, self.channel)
        return total

    def depth(self) -> int:
        """How many messages wait, those for later included."""
        total = 0
        for topic in self._topics():
            with contextlib.suppress(Gone):
                counts = self._broker.channel_stats(topic, self.channel)
                total += counts.depth + counts.deferred
        return total

    def purge(self) -> int:
        """Drop all messages. Returns how many waited, those for later included."""
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
        self._slots = int(broker.limits["in_flight_slots"])
        self._told: set[str] = set()
        self._ignored: set[str] = set()
        self._known: dict[tuple[str, bool], Queue] = {}
        self._leftovers = leftovers.Leftovers(broker, self.exchanges)

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
        elif ephemeral:
            self.sweep()
        queue = self._queue(name, ephemeral)
        # Before it is made, so that nothing that nobody knows is left if this program is killed in
        # between; and after it, because a sweep may have forgotten one that was not there yet.
        self._note(queue, arguments or {})
        queue.make()
        self._note(queue, arguments or {})
        if arguments:
            self._configure(queue, arguments)

    def _note(self, queue: Queue, arguments: dict[str, Any]) -> None:
        """Store that a queue was declared. One that goes with its last consumer has the time of its
        last declaration."""
        known = self.exchanges.queue(queue.name)
        if not queue.ephemeral:
            if known is None:
                self.exchanges.declare_queue(queue.name, {"ephemeral": False})
        elif known is None or not leftovers.is_younger(known, _USED_SECONDS):
            settings = {**(known or {}), "ephemeral": True, "used": time.time()}
            if (expires := frame.seconds(arguments.get(_EXPIRES))) is not None:
                settings["expires"] = expires
            self.exchanges.declare_queue(queue.name, settings)

    def sweep(self) -> None:
        """Delete what programs that were killed left; see `Leftovers`."""
        for name in self._leftovers.sweep():
            self._known.pop((name, True), None)

    def follow(self, queues: set[str]) -> None:
        """Give the channels of these queues' priorities the settings of their first one."""
        for name in queues:
            self.get(name).follow_all()

    def crowded(self, queue: Queue, topic: str, held: int) -> None:
        """Say once that a queue has nearly as many messages in flight as the broker allows: beyond
        that no worker gets any. held: how many this channel holds."""
        if held % max(self._slots // _LOOKS, 1) or topic in self._told:
            return
        with contextlib.suppress(Gone):
            in_flight = self.broker.channel_stats(topic, queue.channel).in_flight
            if in_flight < self._slots - self._slots // 8:
                return
            self._told.add(topic)
            _log.warning(
                "queue %r: its workers hold %d messages, and the broker allows %d in flight; "
                "beyond that none is delivered until one is acknowledged. Leave `defer_eta` on, so "
                "that tasks wait in the broker, or start it with a larger --in-flight-slots",
                queue.name,
                in_flight,
                self._slots,
            )

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
        bound: bool = False,
    ) -> None:
        """Publish to a queue. bound: a binding said which one. A message for a queue that has gone
        with its last consumer is dropped, and so are the queue's bindings."""
        queue = self.get(name)
        if bound and not self.exchanges.is_known(name):
            return  # it was deleted since, with its bindings
        try:
            queue.publish(body, step, defer, ttl, seal)
            return
        except Gone:
            if self.broker.ended:
                raise
        # Another process has deleted it, and may have declared it again: a program that asks a
        # worker deletes its queue of replies after each, and its next question declares it.
        self._known.pop((name, queue.ephemeral), None)
        known = self.exchanges.queue(name)
        if known is None and queue.ephemeral:
            return
        queue = self.get(name)
        try:
            queue.publish(body, step, defer, ttl, seal)
        except Gone:
            if not queue.ephemeral or self.broker.ended:
                raise
            self._known.pop((name, True), None)
            self._leftovers.forget(name, known or {})

    def _configure(self, queue: Queue, arguments: dict[str, Any]) -> None:
        self._warn(queue, arguments)
        settings: dict[str, Any] = {}
        if (ttl := arguments.get("x-message-ttl")) is not None:
            settings["message_ttl"] = frame.seconds(ttl)
        if (most := arguments.get("x-max-length")) is not None:
            settings.update(max_messages=most, overflow="drop-oldest")
        if (size := arguments.get("x-max-length-bytes")) is not None:
            settings.update(max_bytes=size, overflow="drop-oldest")
        if settings:
            queue.configure(**settings)

    def _warn(self, queue: Queue, arguments: dict[str, Any]) -> None:
        """Say once which arguments of a queue have no effect."""
        known = _ARGUMENTS | {_EXPIRES} if queue.ephemeral else _ARGUMENTS
        ignored = sorted(set(arguments) - known)
        if ignored and queue.name not in self._ignored:
            self._ignored.add(queue.name)
            _log.warning(
                "queue %r: shmq ignores %s; settings of the channel (`shmq channel set %s %s`) may "
                "do it",
                queue.name,
                ", ".join(ignored),
                queue.topic,
                queue.channel,
            )


def _keywords(settings: Settings) -> dict[str, Any]:
    """The settings as keywords of `Broker.configure`."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
