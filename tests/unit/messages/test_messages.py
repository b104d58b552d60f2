"""The public API in one process: what is published comes back as it was, in order, once."""

from __future__ import annotations

import array
import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.processes import WATCHDOG, eventually

import shmq
from shmq import Consumer, Gone, NotInFlight, Producer

BODIES = [b"one", b"two two", b"3" * 300, b"\0\xff", "four \N{SNOWMAN}".encode()]
SIZES = (1, 63, 4096, 4097, 65535, 65536, 300_000)


def drain(consumer: Consumer, count: int) -> list[bytes]:
    """Exactly this many bodies, finished."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        batch = consumer.take_many(count - len(bodies), timeout=WATCHDOG)
        assert len(batch), f"only {len(bodies)} of {count}"
        bodies += batch.bodies()
        batch.finish()
    assert consumer.take(0) is None
    return bodies


# ---- one message ----


@pytest.mark.parametrize("size", SIZES)
def test_a_body_is_taken_and_finished_in_one_call(
    producer: Producer, consumer: Consumer, size: int
) -> None:
    producer.seal()
    producer.publish(b"b" * size)
    taken = consumer.take_body(timeout=WATCHDOG)
    if size <= 4096:
        assert taken == b"b" * size
    else:
        assert isinstance(taken, shmq.Message)
        assert consumer.in_flight == 1
        assert taken.body == b"b" * size
        taken.finish()
    assert consumer.in_flight == 0
    assert consumer.take_body(0) is None


def test_a_body_without_a_seal_is_taken_as_a_message(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish(b"from anybody")
    taken = consumer.take_body(timeout=WATCHDOG)
    assert isinstance(taken, shmq.Message)
    assert (taken.body, taken.sealed, consumer.in_flight) == (b"from anybody", False, 1)
    taken.finish()


@pytest.mark.parametrize("size", SIZES)
def test_a_sealed_producer_seals_all_that_it_publishes(
    producer: Producer, consumer: Consumer, size: int
) -> None:
    body = b"b" * size
    producer.publish(body)
    producer.seal()
    producer.publish(body, properties={"key": "17"})
    producer.publish_many([body, body])
    with producer.loan(size) as buffer:
        buffer[:] = body
    batch = consumer.take_many(9, timeout=WATCHDOG)
    assert [message.sealed for message in batch] == [False, True, True, True, True]
    assert [message.body for message in batch] == 5 * [body]
    assert [dict(message.properties) for message in batch][:3] == [{}, {"key": b"17"}, {}]
    batch.finish()


def test_take_body_waits_and_refuses_as_take_does(producer: Producer, consumer: Consumer) -> None:
    producer.seal()
    assert consumer.take_body(0.01) is None
    publisher = threading.Timer(0.05, producer.publish, (b"late",))
    publisher.start()
    assert consumer.take_body() == b"late"
    publisher.join()
    for wrong in (-1, "soon"):
        with pytest.raises((ValueError, TypeError)):
            consumer.take_body(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        consumer.take_body(1, 2)  # type: ignore[call-arg]
    consumer.close()
    with pytest.raises(Gone):
        consumer.take_body(0)


@pytest.mark.parametrize("size", SIZES)
def test_a_message_comes_back_as_it_was(producer: Producer, consumer: Consumer, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    before = time.time_ns()
    id_ = producer.publish(body)
    after = time.time_ns()
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    assert (message.id, message.body, message.attempts) == (id_, body, 1)
    assert len(id_) == 16
    assert int(id_, 16) > 0
    assert before <= message.timestamp <= after
    assert len(message) == size
    assert message.view == body
    assert message.view.readonly
    assert id_ in repr(message)
    message.finish()
    assert consumer.take(0) is None


@pytest.mark.parametrize(
    "body",
    [
        bytearray(b"body"),
        memoryview(b"body"),
        memoryview(b"-body-")[1:5],
        array.array("B", b"body"),
        np.frombuffer(b"body", "u1"),
        np.array([0x79646F62], "<u4"),
        pa.py_buffer(b"body"),
    ],
    ids=lambda body: type(body).__name__,
)
def test_a_body_may_be_any_buffer(producer: Producer, consumer: Consumer, body: Any) -> None:
    producer.publish(body)
    producer.publish_many([body, b"body"])
    assert drain(consumer, 3) == [b"body"] * 3


def test_ids_rise_over_producers_and_batches(broker: shmq.Broker, topic: str) -> None:
    ids: list[int] = []
    producers = [broker.producer(topic) for _ in range(3)]
    for number in range(60):
        producer = producers[number % 3]
        ids += producer.publish_many([b"a", b"b", b"c"])
        ids.append(int(producer.publish(b"d"), 16))
    assert ids == sorted(set(ids))
    assert len({id_ & 1023 for id_ in ids}) == 1


def test_messages_come_in_the_order_of_publishing(producer: Producer, consumer: Consumer) -> None:
    expected = []
    for number in range(500):
        expected.append(b"%d" % number)
        producer.publish(expected[-1])
    assert drain(consumer, 500) == expected


def test_take_waits_no_longer_than_asked(consumer: Consumer) -> None:
    assert consumer.take(0) is None
    assert consumer.take(timeout=0.01) is None
    assert len(consumer.take_many(10, 0)) == 0
    assert len(consumer.take_many(10, timeout=0.01)) == 0


def test_take_is_woken_by_a_publish(producer: Producer, consumer: Consumer) -> None:
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(consumer.take(timeout=WATCHDOG)))
    thread.start()
    producer.publish(b"body")
    thread.join(WATCHDOG)
    assert taken[0].body == b"body"


# ---- many ----


def rows(count: int = 5, width: int = 8) -> np.ndarray[Any, Any]:
    return np.arange(count * width, dtype=np.uint8).reshape(count, width)


def expected_rows(table: np.ndarray[Any, Any]) -> list[bytes]:
    return [row.tobytes() for row in table]


MANY: dict[str, Callable[[], Any]] = {
    "list": lambda: list(BODIES),
    "tuple": lambda: tuple(BODIES),
    "generator": lambda: (body for body in BODIES),
    "dict keys": lambda: dict.fromkeys(BODIES).keys(),
    "mixed": lambda: [BODIES[0], bytearray(BODIES[1]), memoryview(BODIES[2]), *BODIES[3:]],
    "arrow binary": lambda: pa.array(BODIES, pa.binary()),
    "arrow large binary": lambda: pa.array(BODIES, pa.large_binary()),
    "arrow sliced": lambda: pa.array([b"before", *BODIES, b"after"], pa.binary()).slice(1, 5),
    "arrow large sliced": lambda: pa.array([b"-", *BODIES, b"-"], pa.large_binary()).slice(1, 5),
    "arrow chunked": lambda: pa.chunked_array([BODIES[:2], BODIES[2:]], pa.binary()),
    "arrow one chunk": lambda: pa.chunked_array([BODIES], pa.large_binary()),
    "arrow chunks sliced": lambda: pa.chunked_array(
        [[b"x", *BODIES[:2]], [*BODIES[2:], b"y"]], pa.binary()
    ).slice(1, 5),
}


@pytest.mark.parametrize("kind", MANY)
def test_many_bodies_of_any_kind(producer: Producer, consumer: Consumer, kind: str) -> None:
    ids = producer.publish_many(MANY[kind]())
    batch = consumer.take_many(100, timeout=WATCHDOG)
    assert batch.bodies() == BODIES
    assert batch.ids.tolist() == list(ids)
    assert [message.id for message in batch] == [f"{id_:016x}" for id_ in ids]
    batch.finish()


def test_arrow_strings_are_published_as_utf_8(producer: Producer, consumer: Consumer) -> None:
    texts = ["plain", "\N{SNOWMAN}" * 3]
    for kind in (pa.string(), pa.large_string()):
        producer.publish_many(pa.array(texts, kind))
    assert drain(consumer, 4) == [text.encode() for text in texts] * 2


def test_arrow_of_fixed_size(producer: Producer, consumer: Consumer) -> None:
    fixed = pa.array([b"abcd", b"efgh", b"ijkl"], pa.binary(4))
    producer.publish_many(fixed)
    producer.publish_many(fixed.slice(1, 1))
    assert drain(consumer, 4) == [b"abcd", b"efgh", b"ijkl", b"efgh"]


@pytest.mark.parametrize(
    "table",
    [rows(), rows()[1:4], rows()[::2], rows(6, 8)[:, 2:5], np.asfortranarray(rows()), rows().T],
    ids=["plain", "sliced", "stepped", "columns", "fortran", "transposed"],
)
def test_the_rows_of_a_numpy_array(
    producer: Producer, consumer: Consumer, table: np.ndarray[Any, Any]
) -> None:
    ids = producer.publish_many(table)
    assert len(ids) == len(table)
    assert drain(consumer, len(table)) == expected_rows(table)


@pytest.mark.parametrize(
    "nothing",
    [[], (), iter(()), rows()[:0], pa.array([], pa.binary()), pa.chunked_array([], pa.binary())],
    ids=["list", "tuple", "generator", "numpy", "arrow", "chunked"],
)
def test_nothing_is_published_of_nothing(
    producer: Producer, consumer: Consumer, nothing: Any
) -> None:
    assert list(producer.publish_many(nothing)) == []
    assert consumer.take(0) is None


def test_a_batch_may_hold_large_and_small_bodies(producer: Producer, consumer: Consumer) -> None:
    bodies = [bytes([number]) * size for number, size in enumerate(SIZES)]
    producer.publish_many(bodies)
    assert drain(consumer, len(bodies)) == bodies


def test_every_channel_gets_every_message(broker: shmq.Broker, producer: Producer) -> None:
    channels = [broker.consumer(producer.topic, f"channel-{n}") for n in range(3)]
    ids = producer.publish_many([b"a", b"b"])
    large = producer.publish(b"L" * 100_000)
    with producer.loan(5) as buffer:
        buffer[:] = b"loan!"
    for consumer in channels:
        batch = consumer.take_many(10, timeout=WATCHDOG)
        assert batch.bodies() == [b"a", b"b", b"L" * 100_000, b"loan!"]
        assert batch.ids.tolist()[:3] == [*ids, int(large, 16)]
        batch.finish()


# ---- loans ----


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_into_a_loan_is_published_at_its_end(
    producer: Producer, consumer: Consumer, size: int
) -> None:
    loan = producer.loan(size)
    with loan as buffer:
        assert (len(buffer), buffer.readonly) == (size, False)
        np.frombuffer(buffer, np.uint8)[:] = 7
        assert consumer.take(0) is None
        assert loan.id is None
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    assert message.id == loan.id
    assert message.body == b"\x07" * size
    message.finish()


def test_a_loan_is_dropped_when_its_block_raises(producer: Producer, consumer: Consumer) -> None:
    with pytest.raises(ZeroDivisionError), producer.loan(10):
        raise ZeroDivisionError
    producer.publish(b"next")
    assert drain(consumer, 1) == [b"next"]


def test_a_loan_whose_buffer_is_still_used_is_not_published(
    producer: Producer, consumer: Consumer
) -> None:
    with pytest.raises(BufferError, match="still in use"), producer.loan(10) as buffer:
        kept = np.frombuffer(buffer, np.uint8)
    kept[:] = 1  # its memory is nobody else's
    producer.publish(b"next")
    assert drain(consumer, 1) == [b"next"]


def test_a_loan_can_be_entered_once(producer: Producer, consumer: Consumer) -> None:
    loan = producer.loan(3)
    with loan as buffer:
        buffer[:] = b"abc"
    with pytest.raises(RuntimeError, match="once"), loan:
        pass
    with pytest.raises(ValueError, match="released"):
        buffer[0] = 1
    assert drain(consumer, 1) == [b"abc"]


def test_a_loan_may_be_deferred(producer: Producer, broker: shmq.Broker, topic: str) -> None:
    broker.create_channel(topic, "channel")
    with producer.loan(1, defer=1000) as buffer:
        buffer[0] = 65
    (peeked,) = broker.peek(topic, "channel", "deferred")
    assert peeked.body == b"A"


# ---- deferred, requeued, timed out ----


def test_a_deferred_message_waits_until_it_is_due(producer: Producer, consumer: Consumer) -> None:
    before = time.time_ns()
    producer.publish(b"late", defer=0.2)
    producer.publish(b"now")
    assert [message.body for message in (consumer.take(WATCHDOG),) if message] == [b"now"]
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    assert message.body == b"late"
    assert time.time_ns() - before >= 200_000_000
    assert message.attempts == 1


def test_a_requeued_message_goes_to_the_end_of_the_line(
    producer: Producer, consumer: Consumer
) -> None:
    producer.publish_many([b"first", b"second"])
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    message.requeue()
    producer.publish(b"third")
    batch = consumer.take_many(10, timeout=WATCHDOG)
    assert batch.bodies() == [b"second", b"first", b"third"]
    assert batch.attempts.tolist() == [1, 2, 1]
    batch.finish()


def test_a_requeue_may_be_delayed(producer: Producer, consumer: Consumer) -> None:
    producer.publish(b"body")
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    before = time.time_ns()
    message.requeue(delay=0.2)
    assert consumer.take(0) is None
    again = consumer.take(timeout=WATCHDOG)
    assert again is not None
    assert time.time_ns() - before >= 200_000_000
    assert again.attempts == 2
    again.finish()


def test_a_delay_is_at_most_max_req_timeout(
    producer: Producer, consumer: Consumer, broker: shmq.Broker
) -> None:
    producer.publish(b"body")
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    message.requeue(delay=1e6)
    (peeked,) = broker.peek(producer.topic, "channel", "deferred")
    assert peeked.due is not None
    assert peeked.due <= time.time_ns() + 3600 * 10**9


def test_a_message_that_times_out_is_handed_out_again(
    producer: Producer, broker: shmq.Broker
) -> None:
    slow = broker.consumer(producer.topic, "channel", msg_timeout=0.05)
    producer.publish(b"body")
    message = slow.take(timeout=WATCHDOG)
    again = slow.take(timeout=WATCHDOG)
    assert message is not None
    assert again is not None
    assert (again.id, again.attempts) == (message.id, 2)
    with pytest.raises(NotInFlight, match="timed out"):
        message.finish()
    slow.close()


def test_a_touch_moves_the_deadline(broker: shmq.Broker, producer: Producer) -> None:
    consumer = broker.consumer(producer.topic, "channel", msg_timeout=100)
    producer.publish(b"body")
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None

    def deadline() -> int:
        (peeked,) = broker.peek(producer.topic, "channel", "in_flight")
        assert peeked.deadline is not None
        return peeked.deadline

    first = deadline()

    def touched() -> bool:
        message.touch()
        return deadline() > first

    eventually(touched)
    message.finish()


def test_without_a_timeout_a_message_stays_with_its_consumer(
    broker: shmq.Broker, producer: Producer
) -> None:
    consumer = broker.consumer(producer.topic, "channel", msg_timeout=None)
    producer.publish(b"body")
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    message.touch()
    (peeked,) = broker.peek(producer.topic, "channel", "in_flight")
    assert peeked.deadline is None
    message.finish()


def test_no_more_than_max_in_flight_are_out(broker: shmq.Broker, producer: Producer) -> None:
    consumer = broker.consumer(producer.topic, "channel", max_in_flight=3)
    producer.publish_many([b"%d" % number for number in range(10)])
    batch = consumer.take_many(10, timeout=WATCHDOG)
    assert (len(batch), consumer.in_flight, consumer.max_in_flight) == (3, 3, 3)
    assert consumer.take(0) is None
    batch[1].finish()
    assert consumer.in_flight == 2
    message = consumer.take(timeout=WATCHDOG)
    assert message is not None
    assert message.body == b"3"
    consumer.close()


# ---- closing ----


def test_what_a_consumer_has_not_finished_when_it_closes_goes_to_the_next_in_order(
    broker: shmq.Broker, producer: Producer
) -> None:
    bodies = [b"%d" % number for number in range(40)]
    producer.publish_many(bodies)
    for count in (10, 20, 20, 30):
        with broker.consumer(producer.topic, "channel") as consumer:
            assert consumer.take_many(count, timeout=WATCHDOG).bodies() == bodies[:count]
    with broker.consumer(producer.topic, "channel") as consumer:
        batch = consumer.take_many(40, timeout=WATCHDOG)
        assert batch.bodies() == bodies
        assert batch.attempts.tolist() == [5] * 10 + [4] * 10 + [2] * 10 + [1] * 10
        batch.finish()


def test_returned_messages_go_before_what_was_published_later(
    broker: shmq.Broker, producer: Producer
) -> None:
    producer.publish(b"first")
    with broker.consumer(producer.topic, "channel") as consumer:
        assert consumer.take(timeout=WATCHDOG) is not None
        producer.publish(b"second")
    with broker.consumer(producer.topic, "channel") as consumer:
        assert drain(consumer, 2) == [b"first", b"second"]


def test_iteration_ends_when_the_consumer_is_closed(
    producer: Producer, broker: shmq.Broker
) -> None:
    consumer = broker.consumer(producer.topic, "channel")
    producer.publish_many(BODIES)
    seen: list[bytes] = []

    def work() -> None:
        for message in consumer:
            seen.append(message.body)
            message.finish()

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: len(seen) == len(BODIES))
    consumer.close()
    thread.join(WATCHDOG)
    assert not thread.is_alive()
    assert seen == BODIES
    assert list(consumer) == []


def test_messages_in_asyncio(producer: Producer, broker: shmq.Broker) -> None:
    async def work() -> list[bytes]:
        with broker.consumer(producer.topic, "channel") as consumer:
            assert await consumer.take_async(timeout=0.01) is None
            waiting = asyncio.ensure_future(consumer.take_async())
            await asyncio.sleep(0)
            producer.publish_many(BODIES)
            first = await waiting
            assert first is not None
            first.finish()
            seen = [first.body]
            async for message in consumer:
                seen.append(message.body)
                message.finish()
                if len(seen) == len(BODIES):
                    break
            return seen

    assert asyncio.run(work()) == BODIES


def test_what_came_for_a_cancelled_task_goes_to_the_next_one_first(
    producer: Producer, broker: shmq.Broker
) -> None:
    async def work() -> list[bytes]:
        with broker.consumer(producer.topic, "channel", max_in_flight=3) as consumer:
            tasks = [asyncio.ensure_future(consumer.take_async()) for _ in range(3)]
            await asyncio.sleep(0.01)
            producer.publish_many([b"a", b"b", b"c"])
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            messages = [await task for task in tasks[1:]]
            messages.append(await consumer.take_async())
            return [message.body for message in messages if message]

    assert asyncio.run(work()) == [b"a", b"b", b"c"]


def test_context_managers_close(broker: shmq.Broker, topic: str) -> None:
    with broker.producer(topic) as producer:
        producer.publish(b"body")
        assert not producer.closed
    assert producer.closed
    with broker.consumer(topic, "channel") as consumer:
        pass
    assert consumer.closed
    assert consumer.in_flight == 0
    consumer.close()
    producer.close()


def test_publishing_after_close_says_so(broker: shmq.Broker, topic: str) -> None:
    producer = broker.producer(topic)
    producer.close()
    with pytest.raises(Gone, match="closed"):
        producer.publish(b"x")
