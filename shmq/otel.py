"""OpenTelemetry traces of messages, with the extra `otel`: W3C trace context in their properties.

    import shmq
    import shmq.otel

    with shmq.Broker() as broker:
        shmq.otel.instrument(broker)
        broker.producer("resize").publish(b"cat.png")
        with broker.consumer("resize", "workers").take() as message:
            print(message.body, shmq.otel.context_of(message))

From then on the producers and consumers that `broker` makes leave spans, with the names and
attributes of OpenTelemetry's conventions for messaging:

* publish and publish_many, and their asynchronous forms: a PRODUCER span `send TOPIC`, one for each
  call, however long it waits. Its context goes with the messages as the
  properties traceparent and tracestate. A message that has a traceparent already keeps it, and the
  span links to it.
* loan: a PRODUCER span `create TOPIC`, for the same purpose.
* take, take_many, their asynchronous forms and the iteration: a CONSUMER span `receive TOPIC` for
  what came, with a link to the context of each message. A call that took nothing leaves none.

`context_of(message)` is a message's context, to be the parent of spans of the work on it. Without
an SDK there are no spans, and nothing is added to messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar, overload

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as exc:
    raise ImportError(
        "shmq.otel needs opentelemetry-api: install shmq with the extra `otel`"
    ) from exc

import shmq
from shmq.client import aio
from shmq.client.consumer import Consumer
from shmq.client.producer import Producer
from shmq.client.properties import TRACEPARENT, Properties, pack
from shmq.errors import MessageTooBig, ShmqError

if TYPE_CHECKING:
    from shmq.client import Batch, Loan, Message

T = TypeVar("T")

_CONTEXT: Final = TraceContextTextMapPropagator()
_SYSTEM: Final = "shmq"
#: Bytes that properties take on disk beside their block.
_ENVELOPE: Final = 12


def instrument(broker: shmq.Broker, tracer_provider: trace.TracerProvider | None = None) -> None:
    """Trace the producers and consumers that this broker makes from now on, in this process and its
    forked children. tracer_provider: None for the global one. A second call replaces the first."""
    tracer = trace.get_tracer("shmq", shmq.__version__, tracer_provider)

    class TracedProducer(_TracedProducer):
        _tracer = tracer

    class TracedConsumer(_TracedConsumer):
        _tracer = tracer

    broker.producer_type, broker.consumer_type = TracedProducer, TracedConsumer


def uninstrument(broker: shmq.Broker) -> None:
    """Trace no more producers and consumers; those that are traced stay so."""
    broker.producer_type, broker.consumer_type = Producer, Consumer


def context_of(message: Message) -> Context:
    """The trace context that came with a message, to be the `context` of the span of the work on
    it. An empty context if the message has none, or none that is valid."""
    return _CONTEXT.extract(_texts(message.properties), Context())


def _texts(properties: Mapping[str, str | bytes]) -> dict[str, str]:
    """Properties as a carrier of trace context."""
    return {
        name: value if isinstance(value, str) else value.decode("ascii", "replace")
        for name, value in properties.items()
        if name in _CONTEXT.fields
    }


def _links(all_properties: Iterable[Mapping[str, str | bytes] | None]) -> list[trace.Link]:
    """A link to each context that messages carry."""
    found = []
    for properties in all_properties:
        if properties and TRACEPARENT in properties:
            carried = trace.get_current_span(_CONTEXT.extract(_texts(properties), Context()))
            context = carried.get_span_context()
            if context.is_valid:
                found.append(trace.Link(context))
    return found


def _attributes(operation: str, topic: str) -> dict[str, str | int]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


class _Given(NamedTuple):
    """The properties of a publish with its context, and without it."""

    traced: Any
    plain: Any

    def used(self, publish: Callable[[Any], T]) -> T:
        """Publish with the context, or without it if there is no room for it: tracing refuses
        nothing."""
        try:
            return publish(self.traced)
        except MessageTooBig:
            return publish(self.plain)


class _TracedProducer(Producer):
    __slots__ = ()
    _tracer: ClassVar[trace.Tracer]

    @contextmanager
    def _span(
        self, operation: str, links: Sequence[trace.Link], more: Mapping[str, str | int]
    ) -> Iterator[tuple[trace.Span, dict[str, str]]]:
        """A PRODUCER span around the block, and its context as properties."""
        attributes = {**_attributes(operation, self.topic), **more}
        name = f"{operation} {self.topic}"
        with self._tracer.start_as_current_span(
            name, kind=trace.SpanKind.PRODUCER, attributes=attributes, links=links
        ) as span:
            carrier: dict[str, str] = {}
            _CONTEXT.inject(carrier)
            try:
                yield span, carrier
            except Exception as exc:
                span.set_attribute("error.type", type(exc).__qualname__)
                raise

    def publish(
        self,
        body: Any,
        defer: float | None = None,
        timeout: float | None = None,
        properties: Properties | None = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> str:
        if priority is not None:  # another topic's producer, which leaves the span
            return self._lane(priority).publish(body, defer, timeout, properties, ttl)
        publish = super().publish
        with self._sends(body, properties) as (span, given):
            message_id = given.used(lambda its: publish(body, defer, timeout, its, ttl))
            span.set_attribute("messaging.message.id", message_id)
            return message_id

    async def publish_async(
        self,
        body: Any,
        defer: float | None = None,
        timeout: float | None = None,
        properties: Properties | None = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> str:
        if priority is not None:
            lane = self._lane(priority)
            return await lane.publish_async(body, defer, timeout, properties, ttl)
        publish = super().publish
        with self._sends(body, properties) as (span, given):  # one span for all tries
            message_id = await aio.publish(
                lambda: given.used(lambda its: publish(body, defer, 0, its, ttl)), timeout
            )
            span.set_attribute("messaging.message.id", message_id)
            return message_id

    @contextmanager
    def _sends(
        self, body: Any, properties: Properties | None
    ) -> Iterator[tuple[trace.Span, _Given]]:
        size = {"messaging.message.body.size": memoryview(body).nbytes}
        with self._span("send", _links([properties]), size) as (span, context):
            yield span, _Given(_with_context(properties, context), properties)

    def publish_many(
        self,
        bodies: Any,
        defer: float | None = None,
        timeout: float | None = None,
        properties: Properties | Iterable[Properties | None] | None = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> range:
        if priority is not None:
            return self._lane(priority).publish_many(bodies, defer, timeout, properties, ttl)
        batch = bodies if hasattr(bodies, "__len__") else list(bodies)
        publish = super().publish_many
        with self._sends_many(batch, properties) as given:
            return given.used(lambda its: publish(batch, defer, timeout, its, ttl))

    async def publish_many_async(
        self,
        bodies: Any,
        defer: float | None = None,
        timeout: float | None = None,
        properties: Properties | Iterable[Properties | None] | None = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> range:
        if priority is not None:
            lane = self._lane(priority)
            return await lane.publish_many_async(bodies, defer, timeout, properties, ttl)
        batch = bodies if hasattr(bodies, "__len__") else list(bodies)
        publish = super().publish_many
        with self._sends_many(batch, properties) as given:
            return await aio.publish(
                lambda: given.used(lambda its: publish(batch, defer, 0, its, ttl)), timeout
            )

    @contextmanager
    def _sends_many(
        self, bodies: Any, properties: Properties | Iterable[Properties | None] | None
    ) -> Iterator[_Given]:
        each: Any = properties
        if not (properties is None or isinstance(properties, Mapping)):
            each = list(properties)
        count = {"messaging.batch.message_count": len(bodies)}
        with self._span("send", _links(each if isinstance(each, list) else [each]), count) as (
            _,
            context,
        ):
            if isinstance(each, list):
                yield _Given([_with_context(one, context) for one in each], each)
            else:
                yield _Given(_with_context(each, context), each)

    def loan(
        self,
        nbytes: int,
        defer: float | None = None,
        timeout: float | None = None,
        zero: bool = True,
        properties: Properties | None = None,
    ) -> Loan:
        size = {"messaging.message.body.size": nbytes}
        with self._span("create", _links([properties]), size) as (_, context):
            given = _with_context(properties, context)
            if not self._fits(nbytes, given):
                given = properties
            return super().loan(nbytes, defer, timeout, zero, given)

    def _fits(self, nbytes: int, properties: Properties | None) -> bool:
        """Returns whether a body of this size may have these properties. Their faults are left to
        the loan itself."""
        if self._home is None:
            return False
        try:
            block = len(pack(properties))
        except MessageTooBig:
            return False
        except (ShmqError, TypeError):
            return True
        return nbytes + block + _ENVELOPE <= self._home.limit("max_msg_size")


def _with_context(properties: Properties | None, context: Mapping[str, str]) -> Properties | None:
    """The properties with the context, unless they have one."""
    if not context or (properties and TRACEPARENT in properties):
        return properties
    return {**(properties or {}), **context}


class _TracedConsumer(Consumer):
    __slots__ = ()
    _tracer: ClassVar[trace.Tracer]

    def _received(
        self, began: int, messages: Sequence[Message], more: Mapping[str, str | int]
    ) -> None:
        """Leave a CONSUMER span of a call that began at this time (ns since 1970)."""
        attributes = {
            **_attributes("receive", self.topic),
            "messaging.destination.subscription.name": self.channel,
            **more,
        }
        self._tracer.start_span(
            f"receive {self.topic}",
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=_links(message.properties for message in messages),
            start_time=began,
        ).end()

    def _received_one(self, began: int, message: Message) -> None:
        one: dict[str, str | int] = {
            "messaging.message.id": message.id,
            "messaging.message.body.size": len(message),
        }
        self._received(began, [message], one)

    @overload
    def take(self, timeout: None = None) -> Message: ...

    @overload
    def take(self, timeout: float | None) -> Message | None: ...

    def take(self, timeout: float | None = None) -> Message | None:
        began = time.time_ns()
        message = super().take(timeout)
        if message is not None:
            self._received_one(began, message)
        return message

    def take_many(self, n: int, timeout: float | None = None) -> Batch:
        began = time.time_ns()
        batch = super().take_many(n, timeout)
        if len(batch):
            count = {"messaging.batch.message_count": len(batch)}
            self._received(began, list(batch), count)
        return batch

    def __next__(self) -> Message:
        began = time.time_ns()
        message = super().__next__()
        self._received_one(began, message)
        return message
