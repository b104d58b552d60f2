"""Batches, views of bodies that outlive the message, and looking without taking."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from support.processes import WATCHDOG
from unit.messages.test_messages import BODIES, drain

import shmq
from shmq import Consumer, NotInFlight, Producer
from shmq.layout import constant

# ---- batches ----


def test_a_batch_is_a_sequence_of_messages(producer: Producer, consumer: Consumer) -> None:
    producer.publish_many(BODIES)
    batch = consumer.take_many(10, timeout=WATCHDOG)
    assert len(batch) == 5
    assert [message.body for message in batch] == BODIES == [m.body for m in batch]
    assert (batch[0].body, batch[-1].body) == (BODIES[0], BODIES[-1])
    with pytest.raises(IndexError):
        batch[5]
    assert batch.timestamps.tolist() == [message.timestamp for message in batch]
    assert batch.attempts.tolist() == [1] * 5
    assert batch.ids.dtype == np.uint64
    assert not batch.ids.flags.writeable
    batch.finish()
    batch.finish()  # nothing is left to do
    with pytest.raises(NotInFlight):
        batch[0].finish()


def test_a_batch_leaves_alone_what_was_settled_singly(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish_many(BODIES)
    batch = consumer.take_many(10, timeout=WATCHDOG)
    batch[1].finish()
    batch[2].requeue()
    batch.touch()
    batch.finish()
    assert drain(consumer, 1) == [BODIES[2]]


def test_a_batch_as_a_block_is_finished_or_after_an_error_requeued(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish_many([b"a", b"b"])

    def work() -> None:
        with consumer.take_many(10, timeout=WATCHDOG) as batch:
            batch[0].finish()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    with consumer.take_many(10, timeout=WATCHDOG) as batch:
        assert batch.bodies() == [b"b"]
    assert consumer.take(0) is None
    assert consumer.in_flight == 0


def test_an_empty_batch(consumer: Consumer) -> None:
    batch = consumer.take_many(5, 0)
    assert (len(batch), list(batch), batch.bodies()) == (0, [], [])
    assert batch.ids.size == batch.timestamps.size == batch.attempts.size == 0
    assert batch.to_arrow().num_rows == 0
    batch.finish()
    batch.requeue()
    batch.touch()


def test_a_batch_is_arrow_without_a_copy(producer: Producer, consumer: Consumer) -> None:
    ids = producer.publish_many(BODIES)
    batch = consumer.take_many(10, timeout=WATCHDOG)
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.schema.names == ["id", "timestamp", "attempts", "body"]
    assert table.column("id").to_pylist() == list(ids)
    assert table.column("body").to_pylist() == BODIES
    assert table.column("attempts").to_pylist() == [1] * 5
    stamps = table.column("timestamp").cast(pa.int64()).to_pylist()
    assert stamps == batch.timestamps.tolist()
    data = np.frombuffer(batch.column("data"), np.uint8)
    assert table.column("body").buffers()[2].address == data.ctypes.data
    assert table.equals(pa.record_batch(batch), check_metadata=True)  # by the schema in a capsule
    batch.finish()
    del batch, data
    producer.publish_many([b"#" * 300] * 500)
    drain(consumer, 500)
    assert table.column("body").to_pylist() == BODIES


def test_arrow_comes_back_as_it_was_published(producer: Producer, consumer: Consumer) -> None:
    producer.publish_many(pa.array(BODIES, pa.binary()))
    first = consumer.take_many(10, timeout=WATCHDOG)
    table = first.to_arrow()
    producer.publish_many(table.column("body"))
    producer.publish_many(table.column("body").slice(2))
    first.finish()
    assert drain(consumer, 8) == BODIES + BODIES[2:]


# ---- views ----


@pytest.mark.parametrize("size", [100, 5000, 100_000])
def test_a_view_stays_what_it_was_while_its_memory_would_be_used_again(
    producer: Producer, consumer: Consumer, size: int
) -> None:
    producer.publish(b"V" * size)
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    view = message.view
    message.finish()
    del message
    for _ in range(30):
        producer.publish_many([b"#" * size] * 20)
        assert drain(consumer, 20) == [b"#" * size] * 20
    assert view == b"V" * size
    view.release()


def test_a_view_outlives_its_consumer(broker: shmq.Broker, producer: Producer) -> None:
    consumer = broker.consumer(producer.topic, "channel")
    producer.publish(b"V" * 5000)
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    view = np.frombuffer(message.view, np.uint8)
    consumer.close()
    del consumer, message
    with broker.consumer(producer.topic, "channel") as other:
        assert drain(other, 1) == [b"V" * 5000]
        for _ in range(20):
            producer.publish_many([b"#" * 5000] * 20)
            drain(other, 20)
    assert (view == ord("V")).all()


def test_more_views_than_the_log_holds_are_copies(producer: Producer, consumer: Consumer) -> None:
    count = constant("PINS") + 60
    bodies = [b"%06d" % number * 1000 for number in range(count)]
    producer.publish_many(bodies)
    messages = [consumer.take(timeout=WATCHDOG) for _ in range(count)]
    views = [message.view for message in messages if message]
    for message in messages:
        assert message is not None
        message.finish()
    del messages
    producer.publish_many([b"#" * 6000] * count)
    drain(consumer, count)
    assert [bytes(view) for view in views] == bodies
    del views
    producer.publish(b"next")  # every pin was given back
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    assert message.view == b"next"
    message.finish()


def test_views_of_one_message_share_a_pin(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"V" * 100)
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    views = [message.view for _ in range(constant("PINS") * 2)]
    first = views.pop(0)
    message.finish()
    del views
    assert first == b"V" * 100


# ---- looking ----


def test_peek_shows_and_changes_nothing(broker: shmq.Broker, producer: Producer) -> None:
    consumer = broker.consumer(producer.topic, "channel", max_in_flight=2)
    ids = producer.publish_many([b"a", b"b", b"c", b"d"])
    producer.publish(b"late", defer=1000)
    batch = consumer.take_many(2, timeout=WATCHDOG)
    for _ in range(2):
        waiting = broker.peek(producer.topic, "channel")
        assert [item.body for item in waiting] == [b"c", b"d"]
        assert [item.id for item in waiting] == [f"{id_:016x}" for id_ in ids[2:]]
        assert [item.attempts for item in waiting] == [0, 0]
        assert {i.body for i in broker.peek(producer.topic, "channel", "in_flight")} == {b"a", b"b"}
        assert [i.body for i in broker.peek(producer.topic, "channel", "deferred")] == [b"late"]
    assert [item.body for item in broker.peek(producer.topic, "channel", n=1)] == [b"c"]
    batch.finish()
    assert consumer.take_many(2, timeout=WATCHDOG).bodies() == [b"c", b"d"]
    consumer.close()


def test_the_topics_own_messages_can_be_looked_at(broker: shmq.Broker, producer: Producer) -> None:
    assert broker.peek(producer.topic, None) == []
    producer.publish(b"before any channel")
    assert [item.body for item in broker.peek(producer.topic, None)] == [b"before any channel"]


def test_stats_count_what_happened(broker: shmq.Broker, producer: Producer) -> None:
    consumer = broker.consumer(producer.topic, "channel", max_in_flight=7)
    producer.publish_many([b"12345"] * 6)
    producer.publish(b"late", defer=1000)
    batch = consumer.take_many(4, timeout=WATCHDOG)
    batch[0].finish()
    batch[1].requeue()
    topic = broker.stats().topic(producer.topic)
    channel = broker.stats().channel(producer.topic, "channel")
    assert (topic.message_count, topic.message_bytes, topic.depth) == (7, 34, 0)
    assert (channel.depth, channel.in_flight, channel.deferred) == (3, 2, 1)
    assert (channel.message_count, channel.delivered) == (7, 4)
    assert (channel.finished, channel.requeue_count, channel.timeout_count) == (1, 1, 0)
    (session,) = channel.sessions
    assert (session.max_in_flight, session.in_flight, session.delivered) == (7, 2, 4)
    assert (session.finished, session.requeued) == (1, 1)
    found = [t for t in broker.stats().to_json()["topics"] if t["topic_name"] == producer.topic]
    assert found[0]["channels"][0]["in_flight_count"] == 2
    consumer.close()
    assert broker.stats().channel(producer.topic, "channel").returned == 2
