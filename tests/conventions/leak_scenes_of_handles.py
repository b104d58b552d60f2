"""The scenes of test_leaks for producers, loans, consumers, messages and batches."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conventions.leak_scenes import Scene, scene

from shmq import Message, ShmqError
from shmq.objects import pickling

# ---- Producer, Loan ----


@scene("Producer.publish", "Producer.topic", "Producer.closed", "Producer.close")
def publish(s: Scene) -> None:
    producer = s.make_producer()
    for body in (b"bytes", bytearray(b"array"), memoryview(b"view"), np.zeros(5, np.uint8)):
        producer.publish(body, timeout=0)
    producer.publish(b"x" * 70_000, None, 0)
    producer.publish(b"late", defer=5, timeout=0)
    for wrong in ("text", None, b"", b"x" * 200_000):
        with pytest.raises((TypeError, ShmqError)):
            producer.publish(wrong, timeout=0)
    with pytest.raises(ValueError, match="defer"):
        producer.publish(b"x", defer=-1)
    assert (producer.topic, producer.closed) == ("t", False)
    producer.close()
    with pytest.raises(ShmqError):
        producer.publish(b"x")
    s.broker.empty(s.queue, s.serial)


@scene("Producer.publish_object")
def objects(s: Scene) -> None:
    spare: list[Any] = []
    assert s.producer.publish_object(spare, 1) is False
    spare.append(pickling())
    assert s.producer.publish_object(spare, (1, "a")) is True
    assert len(spare) == 1
    taken = s.producer.publish_object(spare, b"x" * 5000)
    assert taken[2][0].endswith(b".")
    spare.append(pickling())
    with pytest.raises(TypeError):
        s.producer.publish_object(spare, s.consumer)
    assert spare == []
    for wrong in ([1], ["picklers"]):
        with pytest.raises(TypeError):
            s.producer.publish_object(wrong, 1)
    with pytest.raises(SystemError):
        s.producer.publish_object((), 1)  # type: ignore[arg-type]
    taken = s.consumer.take(0)
    assert taken is not None
    assert pickle.loads(taken.body) == (1, "a")
    taken.finish()


@scene("Producer.publish_list", "Producer.publish_fixed")
def publish_many(s: Scene) -> None:
    for bodies in ([b"a", b"b"], (b"a", bytearray(b"b")), iter([b"a", b"b"]), [b"x" * 70_000]):
        s.producer.publish_list(bodies, None, 0)  # type: ignore[arg-type]
    s.producer.publish_list([b"x"] * 150, None, 0)
    s.producer.publish_fixed(b"abcdef", 3, 2, None, 0)
    for call in (
        lambda: s.producer.publish_list([b"a", "b"]),
        lambda: s.producer.publish_list([bytearray(b"a"), None]),
        lambda: s.producer.publish_list(b"abc"),
        lambda: s.producer.publish_list([b"x" * 90_000] * 9, None, 0),
        lambda: s.producer.publish_fixed(b"abc", 3, 2),
        lambda: s.producer.publish_fixed("abc", 3, 2),
    ):
        with pytest.raises((TypeError, ValueError, ShmqError)):
            call()
    s.broker.empty(s.queue, s.serial)


@scene("Producer.publish_arrow", "Producer.publish_arrow_stream")
def publish_arrow(s: Scene) -> None:
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(20)):
        array = pa.array([b"x" * 20] * 3, kind)
        s.producer.publish_arrow(*array.__arrow_c_array__(), None, 0, b"")
        chunks = pa.chunked_array([array, array.slice(1)])
        s.producer.publish_arrow_stream(chunks.__arrow_c_stream__(), None, 0)
    for wrong in (pa.array([b"a", None]), pa.array([1]), pa.array([b"x" * 90_000] * 9)):
        with pytest.raises((TypeError, ValueError, ShmqError)):
            s.producer.publish_arrow(*wrong.__arrow_c_array__(), None, 0)
        with pytest.raises((TypeError, ValueError, ShmqError)):
            s.producer.publish_arrow_stream(pa.chunked_array([wrong]).__arrow_c_stream__(), None, 0)
        with pytest.raises(ValueError, match="PyCapsule"):
            s.producer.publish_arrow_stream(wrong)
    s.broker.empty(s.queue, s.serial)


@scene("Producer.loan", "Loan.id", "Loan.truncate")
def loan(s: Scene) -> None:
    for size in (5, 70_000):
        lent = s.producer.loan(size, None, 0)
        with lent as buffer:
            buffer[:1] = b"x"
            lent.truncate(3)
            with pytest.raises(ShmqError):
                lent.truncate(size + 1)
        assert lent.id
        with pytest.raises(ZeroDivisionError), s.producer.loan(size, None, 0):
            raise ZeroDivisionError
        with pytest.raises(BufferError), s.producer.loan(size, None, 0) as buffer:
            kept = np.frombuffer(buffer, np.uint8)
        del kept, buffer
        s.producer.loan(size, zero=False)  # never entered
        s.producer.loan(size, None, 0).__enter__()  # never left
        s.broker.empty(s.queue, s.serial)
    with pytest.raises(ShmqError):
        s.producer.loan(0)


# ---- Consumer, Message, Batch ----


@scene(
    "Consumer.topic",
    "Consumer.channel",
    "Consumer.closed",
    "Consumer.in_flight",
    "Consumer.max_in_flight",
    "Consumer.take",
    "Consumer.close",
)
def take(s: Scene) -> None:
    consumer = s.make_consumer()
    assert consumer.take(0) is None
    assert (consumer.topic, consumer.channel, consumer.closed) == ("t", "c", False)
    s.producer.publish_many([b"x"] * 3, timeout=0)
    kept = consumer.take(0)
    first = next(iter(consumer))
    first.finish()
    assert (consumer.in_flight, consumer.max_in_flight) == (1, 100)
    with pytest.raises(ValueError, match="timeout"):
        consumer.take(-1)
    consumer.close()
    with pytest.raises(ShmqError):
        consumer.take(0)
    assert list(consumer) == []
    del kept
    s.make_consumer()  # dropped
    s.broker.empty(s.queue, s.serial)


@scene("Consumer.take_body", "Producer.seal", "Message.sealed")
def bodies(s: Scene) -> None:
    s.producer.publish(b"anybody's", timeout=0)
    stranger = s.consumer.take_body(0)
    assert isinstance(stranger, Message)
    assert not stranger.sealed
    stranger.finish()
    sealed = s.make_producer()
    sealed.seal()
    sealed.publish(b"short", timeout=0)
    sealed.publish(b"x" * 5000, timeout=0)
    assert s.consumer.take_body(0) == b"short"
    long = s.consumer.take_body(0)
    assert isinstance(long, Message)
    assert long.body == b"x" * 5000
    long.finish()
    assert s.consumer.take_body(0) is None
    with pytest.raises(ValueError, match="timeout"):
        s.consumer.take_body(-1)


@scene(
    "Consumer.take_many",
    "Batch.bodies",
    "Batch.column",
    "Batch.import_arrow",
    "Batch.finish",
    "Batch.touch",
    "Batch.requeue",
)
def batches(s: Scene) -> None:
    assert len(s.consumer.take_many(5, 0)) == 0
    batch = s.batch()
    batch.touch()
    assert batch.bodies() == [b"x" * 10] * 5
    for name in ("ids", "timestamps", "attempts", "offsets", "data"):
        batch.column(name)
    for wrong in ("nothing", 5):
        with pytest.raises((ValueError, TypeError)):
            batch.column(wrong)
    table = batch.to_arrow()
    for exported in (batch, s.consumer.take_many(5, 0)):
        capsules = exported.__arrow_c_array__(), exported.__arrow_c_stream__()  # never imported
        tables = pa.table(exported), pa.RecordBatchReader.from_stream(exported)
    del capsules, tables
    assert batch.import_arrow(lambda address, schema: schema, 5) == 5  # never moved
    with pytest.raises(ZeroDivisionError):
        batch.import_arrow(lambda address, schema: address // 0, None)
    batch.requeue()
    batch = s.consumer.take_many(10, 0)
    messages = list(batch)
    messages[0].finish()
    with pytest.raises(IndexError):
        batch[9]
    batch.finish()
    with pytest.raises(ShmqError):
        messages[1].finish()
    with pytest.raises(ZeroDivisionError), s.batch():
        raise ZeroDivisionError
    with s.consumer.take_many(10, 0):
        pass
    large = s.batch(100)
    large.requeue(5)
    assert table.num_rows == 5
    s.broker.empty(s.queue, s.serial)


@scene(
    "Message.id",
    "Message.body",
    "Message.view",
    "Message.timestamp",
    "Message.attempts",
    "Message.finish",
    "Message.requeue",
    "Message.touch",
    "Message.reply",
)
def messages(s: Scene) -> None:
    for size in (10, 5000):
        message = s.message(size)
        assert (len(message.id), message.attempts, len(message.body)) == (16, 1, size)
        assert message.timestamp
        assert repr(message)
        views = [message.view for _ in range(3)]
        array = np.frombuffer(message, np.uint8)
        message.touch()
        message.requeue()
        message = s.consumer.take(0)
        message.requeue(5)
        with pytest.raises(ShmqError):
            message.finish()
        with pytest.raises(ValueError, match="delay"):
            message.requeue(-1)
        del views, array
        with s.message(size):
            pass
        with pytest.raises(ZeroDivisionError), s.message(size):
            raise ZeroDivisionError
        s.broker.empty(s.queue, s.serial)
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(s.message(size))
        s.broker.empty(s.queue, s.serial)
        message = s.message(size)
        with pytest.raises(ShmqError, match="nobody waits"):
            message.reply(b"x")
        view = message.view
        message.finish()
        del message
        view.release()
        s.broker.empty(s.queue, s.serial)


@scene("Broker.held_finish", "Broker.held_requeue")
def held(s: Scene) -> None:
    first, second = s.message(), s.message()
    s.broker.held_finish(s.queue, s.serial, int(first.id, 16), os.getpid())
    s.broker.held_requeue(s.queue, s.serial, int(second.id, 16), 0, 0)
    for wrong in (
        lambda: s.broker.held_finish(s.queue, s.serial, int(first.id, 16), 0),
        lambda: s.broker.held_requeue(s.queue, s.serial, int(second.id, 16), 0, 10**9),
        lambda: s.broker.held_requeue(s.queue, s.serial, 2**64, 0, 0),
        lambda: s.broker.held_finish(s.queue, s.serial + 1, 1, 0),
    ):
        with pytest.raises((ShmqError, ValueError)):
            wrong()
    again = s.consumer.take(0)
    assert again is not None
    again.finish()
