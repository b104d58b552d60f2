"""Programs that type checkers accept. Read by tests/conventions/test_typing.py, never run."""

from __future__ import annotations

import array
import mmap
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import numpy as np

import shmq


def embedded() -> None:
    with shmq.Broker(
        data_path=Path("/var/tmp/jobs"),
        instance="jobs",
        mem_queue_size=3,
        msg_timeout=5,
        mode=0o660,
        on_stop="keep",
        tls_cert=Path("x.pem"),
        lookupd_tcp_address=["a:4160"],
        verbose=None,
    ) as broker:
        assert_type(broker, shmq.Broker)
        assert_type(broker.instance, str)
        assert_type(broker.data_path, Path | None)


def many(broker: shmq.Broker) -> None:
    assert_type(broker.consumer("t", "c"), shmq.Consumer)
    jobs = broker.consumer(["t.high", "t"], "c", policy="weighted", weights=[3, 1])
    assert_type(jobs, shmq.MultiConsumer)
    assert_type(jobs.take(1), shmq.Message | None)
    assert_type(jobs.take().topic, str)
    assert_type(jobs.take_many(5), shmq.Batch)
    assert_type(jobs.fileno(), int)
    assert_type(broker.producer("t").publish(b"x", priority="high"), str)


def bodies(producer: shmq.Producer, message: shmq.Message, file: mmap.mmap) -> None:
    assert_type(producer.publish(b"x"), str)
    producer.publish(bytearray(b"x"), defer=2.5, timeout=1)
    producer.publish(memoryview(b"x"), timeout=None)
    producer.publish(array.array("i", [1]))
    producer.publish(np.zeros(5, np.uint8))
    producer.publish(file)
    producer.publish(message)
    producer.publish(message.view)
    assert_type(producer.publish_many([b"a", bytearray(b"b")]), range)
    producer.publish_many(b"%d" % k for k in range(5))
    producer.publish_many(np.zeros((2, 5), np.uint8))
    with producer.loan(5) as buffer:
        assert_type(buffer, memoryview)
    with (loan := producer.loan(5, zero=False)) as buffer:
        loan.truncate(3)
    assert_type(loan.id, str | None)


def taking(consumer: shmq.Consumer) -> Iterator[str]:
    with consumer.take() as message:
        assert_type(message, shmq.Message)
    found = consumer.take(timeout=1.0)
    assert_type(found, shmq.Message | None)
    if found is not None:
        with found:
            yield found.id
    batch = consumer.take_many(500, timeout=1.0)
    assert_type(batch, shmq.Batch)
    assert_type(batch.bodies(), list[bytes])
    for message in batch:
        assert_type(message.body, bytes)
    with batch as same:
        assert_type(same, shmq.Batch)
    for message in consumer:
        assert_type(message.attempts, int)


async def asynchronous(broker: shmq.Broker) -> None:
    async with broker:
        consumer = broker.consumer("t", "c", max_in_flight=1, msg_timeout=None)
        assert_type(await consumer.take_async(), shmq.Message)
        assert_type(await consumer.take_async(1.0), shmq.Message | None)
        assert_type(await consumer.take_many_async(5), shmq.Batch)
        async for message in consumer:
            assert_type(message, shmq.Message)


def looking(broker: shmq.Broker) -> None:
    found = broker.channel_stats("t", "c")
    assert_type(found.latency, shmq.Latency)
    assert_type(found.leases, list[shmq.LeaseEntry])
    assert_type(broker.peek("t", "c"), list[shmq.Peeked])
    try:
        broker.producer("t").publish(b"x", timeout=0)
    except (shmq.Full, shmq.OptionError, shmq.BadArgument) as exc:
        assert_type(exc, shmq.Full | shmq.OptionError | shmq.BadArgument)


def queues(broker: shmq.Broker, plain: shmq.Queue, simple: shmq.SimpleQueue[str]) -> None:
    anything = shmq.Queue(3)
    anything.put(1)
    assert_type(anything.get(), Any)
    assert_type(plain.get(timeout=1), Any)
    assert_type(simple.get(), str)
    numbers: shmq.Queue[int] = shmq.Queue(name="numbers", broker=broker)
    assert_type(numbers.get(), int)
    assert_type(numbers.get(True, 1.0), int)
    assert_type(numbers.get_nowait(), int)
    assert_type(numbers.get(ack=True).value, int)
    with numbers.item() as item, numbers.get(ack=True) as another:
        assert_type(item + another, int)
    jobs = shmq.JoinableQueue[tuple[int, str]](writable=True)
    assert_type(jobs.get(), tuple[int, str])
    multiprocessing.Process(target=queues, args=(broker, numbers, simple))
    broker.configure("t", "c", max_messages=5, overflow="drop-oldest")
