"""Properties of messages: they come back as they were, by every way to publish and to take."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.processes import WATCHDOG

import shmq
from shmq import Consumer, MessageTooBig, Producer
from shmq.client import properties

SOME: dict[str, str | bytes] = {
    properties.KEY: "customer 17",
    properties.TRACEPARENT: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tenant": "Zürich",
    "raw": b"\0\xff",
    "empty": "",
}
READ: dict[str, bytes] = {
    name: value if isinstance(value, bytes) else value.encode() for name, value in SOME.items()
}

BAD: list[tuple[Any, type[Exception], str]] = [
    ({"Key": "x"}, shmq.BadArgument, "a-z 0-9"),
    ({"": "x"}, shmq.BadArgument, "a-z 0-9"),
    ({"k" * 65: "x"}, shmq.BadArgument, "1 to 64"),
    ({"shmq-expires": "x"}, shmq.BadArgument, "reserved"),
    ({"k": "x" * 4093}, MessageTooBig, "4096"),
    ({"a": "x" * 3000, "b": "x" * 2000}, MessageTooBig, "into the body"),
    ({"k": 5}, TypeError, "str or bytes"),
    ({5: "x"}, TypeError, "must be str"),
    ([("k", "x")], TypeError, "mapping"),
    ("k=x", TypeError, "mapping"),
]


def taken(consumer: Consumer, count: int) -> list[tuple[bytes, Mapping[str, bytes]]]:
    """Body and properties of this many messages, taken singly and finished."""
    found = []
    for _ in range(count):
        message = consumer.take(timeout=WATCHDOG)
        assert message is not None
        body = message.body  # a long one is read before it is finished
        message.finish()
        found.append((body, message.properties))
    return found


@pytest.mark.parametrize("size", [1, 4096, 4097, 65536, 200_000])
def test_properties_come_back_with_bodies_of_every_size(
    producer: Producer, consumer: Consumer, size: int
) -> None:
    body = bytes(range(1, 256)) * (size // 255) + b"e" * (size % 255)
    producer.publish(body, properties=SOME)
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    assert message.body == body
    assert len(message) == size
    assert bytes(message.view) == body
    message.finish()
    assert message.properties == READ
    assert message.properties is message.properties


def test_properties_cannot_be_changed(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"x", properties=SOME)
    ((_, found),) = taken(consumer, 1)
    assert isinstance(found, types.MappingProxyType)
    with pytest.raises(TypeError):
        found["key"] = b""  # type: ignore[index]


def test_a_message_without_properties_has_an_empty_mapping(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"a")
    producer.publish(b"b", properties=None)
    producer.publish(b"c", properties={})
    assert taken(consumer, 3) == [(b"a", {}), (b"b", {}), (b"c", {})]


def test_a_batch_has_the_properties_of_each(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"a")
    producer.publish(b"b", properties=SOME)
    producer.publish(b"c", properties={"n": "3"})
    batch = consumer.take_many(3, timeout=WATCHDOG)
    assert batch.bodies() == [b"a", b"b", b"c"]
    messages = list(batch)
    batch.finish()
    producer.publish_many([b"other" * 10] * 50)  # the memory is used again
    assert batch.properties == [{}, READ, {"n": b"3"}]
    assert [message.properties for message in messages] == batch.properties
    assert batch[1].properties == READ
    consumer.take_many(50, timeout=WATCHDOG).finish()


def test_many_get_one_mapping_or_one_each(producer: Producer, consumer: Consumer) -> None:
    each = [{"n": "1"}, None, SOME]
    producer.publish_many([b"a", b"b", b"c"], properties=each)
    producer.publish_many(iter([b"d", b"e"]), properties={"all": "yes"})
    producer.publish_many(np.full((2, 3), 65, np.uint8), properties=[None, {"row": "1"}])
    producer.publish_many(pa.array([b"f", b"g"]), properties=({"f": "1"}, {"g": "2"}))
    producer.publish_many(pa.array([b"hh"], pa.binary(2)), properties={"h": "1"})
    producer.publish_many(pa.array(["i"]), properties=[None])
    assert taken(consumer, 11) == [
        (b"a", {"n": b"1"}),
        (b"b", {}),
        (b"c", READ),
        (b"d", {"all": b"yes"}),
        (b"e", {"all": b"yes"}),
        (b"AAA", {}),
        (b"AAA", {"row": b"1"}),
        (b"f", {"f": b"1"}),
        (b"g", {"g": b"2"}),
        (b"hh", {"h": b"1"}),
        (b"i", {}),
    ]


def test_a_large_batch_keeps_properties_and_bodies_together(
    producer: Producer, consumer: Consumer
) -> None:
    bodies = [b"%d" % number * (20_000 if number % 100 == 7 else 1) for number in range(600)]
    each = [{"n": str(number)} if number % 3 else None for number in range(600)]
    producer.publish_many(bodies, properties=each)
    found = taken(consumer, 600)
    assert [body for body, _ in found] == bodies
    assert [dict(one) for _, one in found] == [
        {"n": b"%d" % number} if number % 3 else {} for number in range(600)
    ]


def test_a_loan_carries_properties(producer: Producer, consumer: Consumer) -> None:
    with producer.loan(10, properties=SOME) as buffer:
        assert len(buffer) == 10
        buffer[:] = b"0123456789"
    loan = producer.loan(10, properties={"cut": "yes"})
    with loan as buffer:
        buffer[:4] = b"abcd"
        loan.truncate(4)
    assert taken(consumer, 2) == [(b"0123456789", READ), (b"abcd", {"cut": b"yes"})]


def test_other_buffers_are_values(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"x", properties={"a": bytearray(b"1"), "m": memoryview(b"2")})  # type: ignore[dict-item]
    assert taken(consumer, 1) == [(b"x", {"a": b"1", "m": b"2"})]


def test_a_requeued_message_keeps_its_properties(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"x", properties=SOME)
    for _ in range(3):
        message = consumer.take(timeout=WATCHDOG)
        assert message is not None
        message.requeue()
    assert taken(consumer, 1) == [(b"x", READ)]


@pytest.mark.parametrize(("bad", "error", "says"), BAD)
def test_bad_properties_are_refused_and_nothing_is_published(
    producer: Producer, consumer: Consumer, bad: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        producer.publish(b"x", properties=bad)
    with pytest.raises((error, TypeError)):
        producer.publish_many([b"x"], properties=[bad])
    with pytest.raises(error, match=says):
        producer.loan(1, properties=bad)
    assert consumer.take(0) is None


def test_properties_must_be_as_many_as_bodies(producer: Producer, consumer: Consumer) -> None:
    with pytest.raises(ValueError, match="3 properties for 2 messages"):
        producer.publish_many([b"a", b"b"], properties=[None, None, None])
    with pytest.raises(TypeError, match="one mapping for all"):
        producer.publish_many([b"a", b"b"], properties=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one mapping for all"):
        producer.publish_many([b"a", b"b"], properties=b"ab")  # type: ignore[arg-type]
    assert consumer.take(0) is None


def test_body_and_properties_share_max_msg_size(
    broker: shmq.Broker, producer: Producer, consumer: Consumer
) -> None:
    most = int(broker.views().directory.limits["max_msg_size"])
    block = properties.pack({"key": "17"})
    producer.publish(bytes(most - len(block) - 12), properties={"key": "17"})
    assert taken(consumer, 1)[0][1] == {"key": b"17"}
    with pytest.raises(MessageTooBig, match="raise that option"):
        producer.publish(bytes(most - len(block) - 11), properties={"key": "17"})
    producer.publish(bytes(most))
    assert len(taken(consumer, 1)[0][0]) == most


def test_arrow_has_them_if_asked(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"a")
    producer.publish(b"b", properties=SOME)
    batch = consumer.take_many(2, timeout=WATCHDOG)
    batch.finish()
    assert batch.to_arrow().schema.names == ["id", "timestamp", "attempts", "body"]
    table = batch.to_arrow(properties=True)
    assert table.schema.field("properties").type == pa.map_(pa.string(), pa.binary())
    assert table.column("properties").to_pylist() == [[], list(READ.items())]
    assert table.column("body").to_pylist() == [b"a", b"b"]


def test_peek_shows_them(
    broker: shmq.Broker, topic: str, producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"a")
    producer.publish(b"b", properties=SOME)
    found = broker.peek(topic, "channel")
    assert [(one.body, one.properties) for one in found] == [(b"a", {}), (b"b", READ)]
    taken(consumer, 2)


def test_blocks_are_packed_as_documented() -> None:
    assert properties.pack({"key": "17", "x": b"\0"}) == b"\x03key\x02\x0017\x01x\x01\x00\x00"
    assert properties.pack(None) == properties.pack({}) == b""
    assert properties.unpack(b"") == {}
    assert properties.unpack(b"\x03key\x02\x0017") == {"key": b"17"}
    for damaged in (b"\x03ke", b"\x03key\x03\x0017", b"\x00\x00\x00", b"\x01K\x00\x00", b"\x05"):
        with pytest.raises(shmq.LayoutMismatch):
            properties.unpack(damaged)
