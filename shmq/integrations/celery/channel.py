"""kombu's channel: declares, publishes, consumes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from typing import Any, Final

from kombu.exceptions import ChannelError, OperationalError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import (
    NOT_EQUIVALENT_FMT,
    NotEquivalentError,
    queue_declare_ok_t,
)
from kombu.utils.uuid import uuid

import shmq
from shmq.integrations.celery import frame
from shmq.integrations.celery.deliveries import Deliveries
from shmq.integrations.celery.exchanges import Binding, Exchanges
from shmq.integrations.celery.queues import Queue, Queues
from shmq.integrations.celery.turns import ROUND_ROBIN
from shmq.seal import refuse

_STEPS: Final = (0, 3, 6, 9)
#: AMQP's largest priority.
_MOST_STEP: Final = 255
#: A task that is due in less than this is not deferred: the worker waits for it.
_SOON: Final = 0.001


@contextlib.contextmanager
def _for_good(queue: str) -> Iterator[None]:
    """Errors that another try does not mend: kombu would try again what is among the transport's
    own errors, without an end if its policy has none."""
    try:
        yield
    except (shmq.MessageTooBig, shmq.BadName, shmq.BadArgument, shmq.Full) as exc:
        raise OperationalError(f"queue {queue!r}: {exc}") from exc


def _checked(steps: Any) -> tuple[int, ...]:
    """The option priority_steps. Raises ValueError."""
    found = tuple(steps) if isinstance(steps, list | tuple | range) else ()
    if (
        not found
        or not all(type(step) is int and 0 <= step <= _MOST_STEP for step in found)
        or list(found) != sorted(set(found))
    ):
        raise ValueError(
            f"priority_steps of broker_transport_options must be a list of rising whole numbers "
            f"from 0 to {_MOST_STEP}, such as [0, 3, 6, 9], not {steps!r:.100}"
        )
    return found


class Source:
    """A queue that a channel consumes, or has consumed and still holds messages of."""

    def __init__(self, channel: Channel, queue: Queue) -> None:
        self.queue = queue
        self.name = queue.name
        self.channel = channel
        self.strategy = channel.queue_order_strategy
        self.consumer = queue.consumer(channel.priority_steps)
        self.tags: dict[str, tuple[Callable[[Any], Any], bool]] = {}
        """For each tag that consumes it the callback, and whether there are no acknowledgements.
        The last one gets the messages."""
        self._pid = os.getpid()

    @property
    def callback(self) -> Callable[[Any], Any] | None:
        """The function that gets the next message."""
        return self._last[0] if self.tags else None

    @property
    def no_ack(self) -> bool:
        """Whether the next message counts as acknowledged."""
        return bool(self.tags) and self._last[1]

    @property
    def _last(self) -> tuple[Callable[[Any], Any], bool]:
        return self.tags[next(reversed(self.tags))]

    def wants(self) -> bool:
        """Whether its channel may be given a message now."""
        return self.callback is not None and (self.no_ack or self.channel.qos.can_consume())

    def deliver(self) -> bool:
        """Take a message and hand it to the callback. Returns False if there is none."""
        callback = self.callback
        assert callback is not None
        message = self.channel.take(self)
        if message is None:
            return False
        callback(message)
        return True

    def close(self) -> None:
        """Give back the messages that it holds."""
        if self._pid == os.getpid():
            self.consumer.close()


class Channel(virtual.Channel):
    """A channel of a connection; see `kombu.transport.base.StdChannel`.

    Its options are `transport_options` of the connection: `priority_steps`,
    `queue_order_strategy`, `defer_eta`, `dead_letters` and `deadletter_queue`.
    """

    supports_fanout = True
    do_restore = False
    body_encoding = None
    from_transport_options = (
        "priority_steps",
        "queue_order_strategy",
        "defer_eta",
        "dead_letters",
        "deadletter_queue",
    )

    #: The priorities that have a topic of their own, the first one served first.
    priority_steps: tuple[int, ...] = _STEPS
    #: Which of the queues with messages is served next; see `Turns`.
    queue_order_strategy: Any = ROUND_ROBIN
    #: Whether a task with an `eta` or a `countdown` waits in its queue instead of in a worker.
    defer_eta: bool = True
    #: Whether a message that is rejected goes to its queue's dead letters.
    dead_letters: bool = False

    _tags = itertools.count(1)
    _qos: Deliveries | None

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.priority_steps = _checked(self.priority_steps)
        self._queues: Queues = connection.queues
        self._exchanges: Exchanges = self._queues.exchanges
        self._sources: dict[str, Source] = {}
        self._by_tag: dict[str, Source] = {}

    @property
    def qos(self) -> Deliveries:
        """The messages that were delivered and not acknowledged yet."""
        if self._qos is None:
            self._qos = Deliveries(self.connection.inbox_arm, self.dead_letters)
        return self._qos

    # ---- exchanges ----

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str = "direct",
        durable: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        """Declare an exchange."""
        type = type or "direct"
        exchange = exchange or f"amq.{type}"
        known = self._exchanges.exchange(exchange)
        if passive:
            if known is None:
                raise ChannelError(
                    f"NOT_FOUND - no exchange {exchange!r} on {self._queues.instance!r}",
                    (50, 10),
                    "Channel.exchange_declare",
                    "404",
                )
            return
        if known is not None:
            if not self.typeof(exchange).equivalent(
                known, exchange, type, durable, auto_delete, arguments
            ):
                raise NotEquivalentError(NOT_EQUIVALENT_FMT.format(exchange, self._queues.instance))
            return
        settings = {"durable": durable, "auto_delete": auto_delete, "arguments": arguments or {}}
        self._exchanges.declare_exchange(exchange, {"type": type, **settings})

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange with its bindings."""
        if not (if_unused and self._exchanges.bindings(exchange)):
            self._exchanges.delete_exchange(exchange)

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """The rules of an exchange."""
        known = self._exchanges.exchange(exchange)
        return self.exchange_types[default if known is None else known["type"]]

    def get_table(self, exchange: str) -> list[Any]:
        """The bindings of an exchange as its rules have them."""
        prepare = self.typeof(exchange).prepare_bind
        return [
            prepare(bound.queue, exchange, bound.key, bound.arguments)
            for bound in self._exchanges.bindings(exchange)
        ]

    def get_exchanges(self) -> list[str]:
        """The names of all exchanges."""
        return self._queues.exchanges.names()

    def list_bindings(self) -> list[tuple[str, str, str]]:
        """All bindings: (queue, exchange, routing key)."""
        return [
            (bound.queue, bound.exchange, bound.key)
            for exchange in self._exchanges.names()
            for bound in self._exchanges.bindings(exchange)
        ]

    # ---- queues ----

    def prepare_queue_arguments(
        self, arguments: dict[str, Any] | None, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments of a queue with what kombu's `Queue` has as keywords: `expires`,
        `message_ttl`, `max_length`."""
        found: dict[str, Any] = to_rabbitmq_queue_arguments(arguments or {}, **kwargs)
        return found

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        auto_delete: bool = False,
        exclusive: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Declare a queue. Returns its name, and how many messages and consumers it has."""
        queue = queue or f"amq.gen-{uuid()}"
        if passive:
            if not self._queues.exists(queue):
                raise ChannelError(
                    f"NOT_FOUND - no queue {queue!r} on {self._queues.instance!r}",
                    (50, 10),
                    "Channel.queue_declare",
                    "404",
                )
        else:
            with _for_good(queue):
                self._queues.declare(queue, auto_delete or exclusive, arguments)
        return queue_declare_ok_t(queue, self._size(queue), 0)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete a queue with its messages and bindings."""
        if if_empty and self._size(queue):
            return
        self._drop(queue)
        self._queues.delete(queue)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Have the queue get the exchange's messages with this routing key."""
        exchange = exchange or "amq.direct"
        self._exchanges.bind(Binding(exchange, routing_key or "", queue, arguments or None))

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """End a binding."""
        exchange = exchange or "amq.direct"
        self._exchanges.unbind(Binding(exchange, routing_key or "", queue))

    def _size(self, queue: str) -> int:
        return self._queues.get(queue).depth()

    def _purge(self, queue: str) -> int:
        return self._queues.get(queue).purge()

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self._queues.exists(queue)

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        self._queues.declare(queue, False, None)

    # ---- publishing ----

    def _inplace_augment_message(self, message: Any, exchange: str, routing_key: str) -> None:
        properties = message["properties"]
        properties["delivery_info"].update(exchange=exchange, routing_key=routing_key)

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **kwargs: Any) -> None:
        for queue in {bound.queue for bound in self._exchanges.bindings(exchange)}:
            self._put(queue, message)

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        properties = message["properties"]
        defer = None
        if self.defer_eta:
            at = frame.due(message)
            if at is not None and (left := at - time.time()) > _SOON:
                defer = left
        # A task that has expired is given to a worker, which says so in its result. If the broker
        # dropped it, nobody who waits for the result would ever hear of it.
        expires = (message.get("headers") or {}).get("expires")
        ttl = None if expires else frame.seconds(properties.get("expiration"))
        with _for_good(queue):
            self._queues.publish(
                queue,
                frame.pack(message),
                self._step(message),
                defer,
                ttl,
                frame.unpickles(message),
                bool(properties["delivery_info"].get("exchange")),
            )

    def _step(self, message: Any) -> int:
        steps = self.priority_steps
        priority = self._get_message_priority(message)
        return steps[max(bisect(steps, priority) - 1, 0)]

    # ---- consuming ----

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        consumer_tag: str,
        **kwargs: Any,
    ) -> None:
        """Have the callback called with the messages of the queue."""
        source = self._source(queue)
        source.tags[consumer_tag] = callback, no_ack
        self._by_tag[consumer_tag] = source
        self._consumers.add(consumer_tag)
        self.connection.inbox.add(source)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Consume no more. Messages that were delivered may still be acknowledged."""
        source = self._by_tag.pop(consumer_tag, None)
        self._consumers.discard(consumer_tag)
        if source is None:
            return
        source.tags.pop(consumer_tag, None)
        if source.tags:
            self.connection.inbox_arm()
            return
        self.connection.inbox.remove(source)
        if source.queue.ephemeral or not source.consumer.in_flight:
            self._drop(source.queue.name)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """The next message of a queue; None if there is none."""
        source = self._sources.get(queue)
        if source is None:
            if not self._queues.exists(queue):
                return None
            source = self._source(queue)
        return self.take(source, no_ack)

    def take(self, source: Source, no_ack: bool | None = None) -> Any:
        """The next message of a source; None if there is none."""
        while (message := source.consumer.take(0)) is not None:
            payload = frame.unpack(message.body)
            if frame.unpickles(payload) and not message.sealed:
                refuse(message)
                continue
            if self.defer_eta:
                at = frame.due(payload)
                if at is not None and (left := at - time.time()) > _SOON:
                    message.requeue(left, failed=False)
                    continue
            acked = source.no_ack if no_ack is None else no_ack
            if not acked:
                self._queues.crowded(source.queue, message.topic, len(self.qos) + 1)
            return self._delivered(message, payload, acked)
        return None

    def _delivered(self, message: shmq.Message, payload: frame.Payload, no_ack: bool) -> Any:
        tag = next(self._tags)
        properties = payload["properties"]
        properties["delivery_tag"] = tag
        properties["delivery_info"]["redelivered"] = message.attempts > 1
        if no_ack:
            message.finish()
        else:
            self.qos.hold(tag, message)
        return self.Message(payload, channel=self)

    def consumed(self) -> list[str]:
        """The queues that it consumes, but those that go with their last consumer."""
        return [name for name, source in self._sources.items() if not source.queue.ephemeral]

    def _source(self, queue: str) -> Source:
        source = self._sources.get(queue)
        if source is None:
            source = self._sources[queue] = Source(self, self._queues.get(queue))
        return source

    def _drop(self, queue: str) -> None:
        """Give back the messages that are held of a queue, and take no more."""
        source = self._sources.pop(queue, None)
        if source is not None:
            self.connection.inbox.remove(source)
            for tag in source.tags:
                self._by_tag.pop(tag, None)
                self._consumers.discard(tag)
            source.close()

    def close(self) -> None:
        """End the channel. Messages that were not acknowledged go back."""
        if not self.closed:
            if self._qos is not None:
                self._qos.restore_unacked_once()
            for queue in list(self._sources):
                self._drop(queue)
        super().close()
