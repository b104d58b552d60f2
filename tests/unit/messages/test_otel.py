"""Traces of messages, as an in-memory exporter of OpenTelemetry's SDK gets them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.processes import WATCHDOG

import shmq
import shmq.otel
from shmq.client import properties

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Bench:
    """A broker that is instrumented, and the spans of it."""

    def __init__(self, broker: shmq.Broker, topic: str) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        shmq.otel.instrument(broker, self.provider)
        self.topic = topic
        self.producer = broker.producer(topic)
        self.consumer = broker.consumer(topic, "channel")

    def spans(self) -> list[ReadableSpan]:
        """Those since the last call."""
        found = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return found


@pytest.fixture
def bench(broker: shmq.Broker, topic: str) -> Iterator[Bench]:
    bench = Bench(broker, topic)
    yield bench
    bench.consumer.close()
    shmq.otel.uninstrument(broker)


def parent_of(context: trace.SpanContext | None) -> bytes:
    """The traceparent of a context."""
    assert context is not None
    numbers = f"{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return f"00-{numbers}".encode()


def carried(span: ReadableSpan) -> bytes:
    return parent_of(span.context)


def linked(span: ReadableSpan) -> list[bytes]:
    return [parent_of(link.context) for link in span.links]


def taken(bench: Bench) -> shmq.Message:
    message = bench.consumer.take(timeout=WATCHDOG)
    assert message is not None
    message.finish()
    return message


def test_a_message_carries_the_context_of_its_send_span(bench: Bench) -> None:
    message_id = bench.producer.publish(b"cat.png", properties={"key": "17"})
    message = taken(bench)
    send, receive = bench.spans()
    assert message.properties == {"key": b"17", "traceparent": carried(send)}

    assert (send.name, send.kind) == (f"send {bench.topic}", trace.SpanKind.PRODUCER)
    assert dict(send.attributes or {}) == {
        "messaging.system": "shmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": bench.topic,
        "messaging.message.id": message_id,
        "messaging.message.body.size": 7,
    }
    assert (receive.name, receive.kind) == (f"receive {bench.topic}", trace.SpanKind.CONSUMER)
    assert dict(receive.attributes or {}) == {
        "messaging.system": "shmq",
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.destination.name": bench.topic,
        "messaging.destination.subscription.name": "channel",
        "messaging.message.id": message_id,
        "messaging.message.body.size": 7,
    }
    assert linked(receive) == [carried(send)]
    assert receive.start_time is not None
    assert receive.end_time is not None
    assert receive.start_time <= receive.end_time


def test_a_send_span_is_a_child_of_the_callers(bench: Bench) -> None:
    tracer = bench.provider.get_tracer("application")
    with tracer.start_as_current_span("request") as request:
        bench.producer.publish(b"x")
    send, outer = bench.spans()
    assert outer.name == "request"
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    taken(bench)


def test_work_on_a_message_continues_its_trace(bench: Bench) -> None:
    bench.producer.publish(b"x")
    message = taken(bench)
    send = bench.spans()[0]
    tracer = bench.provider.get_tracer("application")
    with tracer.start_as_current_span("resize", context=shmq.otel.context_of(message)):
        pass
    (work,) = bench.spans()
    assert work.parent is not None
    assert send.context is not None
    assert (work.parent.trace_id, work.parent.span_id) == (
        send.context.trace_id,
        send.context.span_id,
    )


def test_a_batch_is_one_span_with_a_link_to_each_context(bench: Bench) -> None:
    bench.producer.publish_many([b"a", b"b"], properties=[{"n": "1"}, {"traceparent": PARENT}])
    bench.producer.publish_many(iter([b"c", b"d"]), properties={"all": "yes"})
    first, second = bench.spans()
    assert (first.attributes or {})["messaging.batch.message_count"] == 2
    assert linked(first) == [PARENT.encode()]
    batch = bench.consumer.take_many(10, timeout=WATCHDOG)
    batch.finish()
    assert [dict(one) for one in batch.properties] == [
        {"n": b"1", "traceparent": carried(first)},
        {"traceparent": PARENT.encode()},
        {"all": b"yes", "traceparent": carried(second)},
        {"all": b"yes", "traceparent": carried(second)},
    ]
    (receive,) = bench.spans()
    assert (receive.attributes or {})["messaging.batch.message_count"] == 4
    assert linked(receive) == [carried(first), PARENT.encode(), carried(second), carried(second)]


def test_a_context_of_the_publishers_own_stays(bench: Bench) -> None:
    own = {"traceparent": PARENT, "tracestate": "vendor=1"}
    bench.producer.publish(b"x", properties=own)
    message = taken(bench)
    send, receive = bench.spans()
    assert message.properties == {name: value.encode() for name, value in own.items()}
    assert linked(send) == linked(receive) == [PARENT.encode()]


def test_a_loan_carries_the_context_of_its_create_span(bench: Bench) -> None:
    with bench.producer.loan(3) as buffer:
        buffer[:] = b"abc"
    message = taken(bench)
    create, receive = bench.spans()
    assert (create.name, create.kind) == (f"create {bench.topic}", trace.SpanKind.PRODUCER)
    assert message.properties == {"traceparent": carried(create)}
    assert linked(receive) == [carried(create)]


def test_iterations_and_tasks_leave_spans_too(bench: Bench) -> None:
    bench.producer.publish_many([b"a", b"b", b"c"])
    bench.spans()
    message = next(iter(bench.consumer))
    message.finish()

    async def take_two() -> None:
        one = await bench.consumer.take_async(WATCHDOG)
        assert one is not None
        one.finish()
        async for other in bench.consumer:
            other.finish()
            return

    asyncio.run(take_two())
    assert [span.name for span in bench.spans()] == [f"receive {bench.topic}"] * 3


def test_a_call_that_took_nothing_leaves_no_span(bench: Bench) -> None:
    assert bench.consumer.take(0) is None
    assert len(bench.consumer.take_many(5, 0)) == 0
    assert bench.spans() == []


def test_a_message_without_context_has_no_link(
    bench: Bench, broker: shmq.Broker, topic: str
) -> None:
    shmq.otel.uninstrument(broker)
    plain = broker.producer(topic)
    assert type(plain) is shmq.Producer
    plain.publish(b"x")
    plain.publish(b"y", properties={"traceparent": "nonsense"})
    for _ in range(2):
        message = taken(bench)
        context = shmq.otel.context_of(message)
        assert not trace.get_current_span(context).get_span_context().is_valid
    assert [linked(span) for span in bench.spans()] == [[], []]


@pytest.mark.parametrize("name", ["publish", "publish_many"])
def test_a_publish_that_waits_in_the_loop_is_one_span(
    bench: Bench, broker: shmq.Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.configure(bench.topic, "channel", max_messages=1, overflow="block")
    tries, whole = 0, getattr(shmq.Producer, name)

    def counted(*arguments: object) -> object:
        nonlocal tries
        tries += 1
        return whole(*arguments)

    async def main() -> object:
        call = getattr(bench.producer, f"{name}_async")
        publishing = asyncio.ensure_future(call(b"waited" if name == "publish" else [b"waited"]))
        while tries < 3:
            await asyncio.sleep(0)
        assert not publishing.done()
        assert bench.spans() == []
        taken(bench)
        return await publishing

    bench.producer.publish(b"full")
    bench.spans()
    monkeypatch.setattr(shmq.Producer, name, counted, raising=False)
    result = asyncio.run(main())
    message = taken(bench)
    receive_full, send, receive = bench.spans()
    assert send.name == f"send {bench.topic}"
    assert send.events == ()
    assert send.status.status_code is trace.StatusCode.UNSET
    assert linked(receive) == [carried(send)]
    assert linked(receive_full) != linked(receive)
    assert message.properties == {"traceparent": carried(send)}
    assert message.id == (f"{result[0]:016x}" if isinstance(result, range) else result)


def test_a_publish_in_the_loop_that_gives_up_is_one_span(bench: Bench, broker: shmq.Broker) -> None:
    broker.configure(bench.topic, "channel", max_messages=1, overflow="block")

    async def main() -> None:
        bench.producer.publish(b"full")
        bench.spans()
        for call, body in (
            (bench.producer.publish_async, b"x"),
            (bench.producer.publish_many_async, [b"x"]),
        ):
            with pytest.raises(shmq.Full):
                await call(body, timeout=0.02)  # type: ignore[operator]

    asyncio.run(main())
    sends = bench.spans()
    assert [(send.attributes or {})["error.type"] for send in sends] == ["Full"] * 2
    taken(bench)


def test_an_error_is_in_the_span(bench: Bench) -> None:
    with pytest.raises(shmq.BadArgument):
        bench.producer.publish(b"")
    (send,) = bench.spans()
    assert send.status.status_code is trace.StatusCode.ERROR
    assert (send.attributes or {})["error.type"] == "BadArgument"
    assert [event.name for event in send.events] == ["exception"]


def test_tracing_refuses_nothing(bench: Bench, broker: shmq.Broker) -> None:
    """There is no room for the context: the message goes without it."""
    most = broker.limit("max_msg_size")
    full: dict[str, str | bytes] = {"k": "x" * (properties.MOST_BYTES - 4)}
    bench.producer.publish(b"x", properties=full)
    bench.producer.publish_many([b"x"], properties=full)
    with bench.producer.loan(1, properties=full) as buffer:
        buffer[:] = b"x"
    for _ in range(3):
        assert list(taken(bench).properties) == ["k"]
    bench.producer.publish(bytes(most))
    with bench.producer.loan(most):
        pass
    for _ in range(2):
        message = bench.consumer.take(timeout=WATCHDOG)
        assert message is not None
        assert (len(message), dict(message.properties)) == (most, {})
        message.finish()


def test_without_an_sdk_nothing_is_added(broker: shmq.Broker, topic: str) -> None:
    shmq.otel.instrument(broker, trace.NoOpTracerProvider())
    try:
        with broker.consumer(topic, "channel") as consumer:
            broker.producer(topic).publish(b"x", properties={"key": "17"})
            message = consumer.take(timeout=WATCHDOG)
            assert message is not None
            assert message.properties == {"key": b"17"}
            message.finish()
    finally:
        shmq.otel.uninstrument(broker)


def test_opentelemetry_is_imported_only_where_it_is_used() -> None:
    program = (
        "import sys, shmq, shmq.broker, shmq.client\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
