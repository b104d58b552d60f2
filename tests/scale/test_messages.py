"""A million messages in flight at once, and bodies from 1 byte to 64 MiB."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from support.processes import eventually
from support.resources import MIB, need_shared_memory

import shmq

OpenBroker = Callable[..., shmq.Broker]

MILLION = 1_000_000
LIST = 10_000


def take_million(consumer: shmq.Consumer) -> list[shmq.Batch]:
    batches, count = [], 0
    while count < MILLION:
        batches.append(consumer.take_many(min(LIST, MILLION - count), timeout=60))
        assert batches[-1], f"{count} came"
        count += len(batches[-1])
    return batches


def test_a_million_messages_in_flight_at_once(open_broker: OpenBroker) -> None:
    """They go back when their consumer is closed, and when they time out; then each is finished."""
    need_shared_memory(600 * MIB)
    broker = open_broker(in_flight_slots=MILLION, mem_queue_size=2 * LIST, arena_size=256 * MIB)

    def counts() -> tuple[int, int]:
        channel = broker.stats().channel("t", "c")
        return channel.depth, channel.in_flight

    producer = broker.producer("t")
    consumer = broker.consumer("t", "c", max_in_flight=MILLION, msg_timeout=None)
    published, held = 0, []
    while published < MILLION:
        rows = np.arange(published, published + LIST, dtype=">u8").view(np.uint8).reshape(LIST, 8)
        producer.publish_many(rows, timeout=60)
        held.append(consumer.take_many(LIST, timeout=60))
        assert len(held[-1]) == LIST
        published += LIST
    assert counts() == (0, MILLION)
    assert not consumer.take_many(1, timeout=0), "as many as it may hold"
    consumer.close()
    assert counts() == (MILLION, 0)

    consumer = broker.consumer("t", "c", max_in_flight=MILLION, msg_timeout=4.0)
    take_million(consumer)
    eventually(lambda: counts() == (MILLION, 0), watchdog=120)
    assert broker.stats().channel("t", "c").timeout_count == MILLION
    consumer.close()

    consumer = broker.consumer("t", "c", max_in_flight=MILLION, msg_timeout=None)
    batches = take_million(consumer)
    assert counts() == (0, MILLION)
    bodies = np.concatenate([np.frombuffer(batch.column("data"), ">u8") for batch in batches])
    assert np.array_equal(np.sort(bodies), np.arange(MILLION))
    attempts = np.concatenate([batch.attempts for batch in batches])
    assert set(attempts.tolist()) == {3}
    for batch in batches:
        batch.finish()
    assert counts() == (0, 0)
    channel = broker.stats().channel("t", "c")
    assert channel.finished == MILLION


LARGEST = 64 * MIB


def lengths() -> list[int]:
    """Each power of two with both its neighbours, and some more; in no order."""
    powers = [1 << k for k in range(LARGEST.bit_length())]
    near = {size + step for size in powers for step in (-1, 0, 1)}
    chosen = random.Random(64)
    odd = {chosen.randrange(1, 1 << chosen.randrange(1, 26)) for _ in range(30)}
    sizes = sorted(size for size in near | odd if 1 <= size <= LARGEST)
    chosen.shuffle(sizes)
    return sizes


@pytest.fixture(scope="module")
def body_of() -> Callable[[int], memoryview]:
    """`body_of(size)`: bytes that no other size has at the same place."""
    noise = random.Random(1).randbytes(LARGEST + 4096)
    return lambda size: memoryview(noise)[size % 4093 :][:size]


def check(message: shmq.Message | None, body: memoryview) -> None:
    """Its copy and its view, then finish it."""
    assert message is not None
    with message.view as view:
        assert view == body
    assert message.body == body
    message.finish()


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_bodies_of_all_sizes_come_as_they_went(
    on_disk: bool, open_broker: OpenBroker, body_of: Callable[[int], memoryview]
) -> None:
    need_shared_memory(256 * MIB)
    how = {"mem_queue_size": 0} if on_disk else {}
    broker = open_broker(max_msg_size=LARGEST, **how)
    sizes = lengths()
    producer = broker.producer("t")
    consumer = broker.consumer("t", "c")
    for number, size in enumerate(sizes):
        if number % 3 == 2:
            with producer.loan(size, timeout=60) as buffer:
                buffer[:] = body_of(size)
        else:
            producer.publish(body_of(size), timeout=60)
        if not on_disk:
            check(consumer.take(timeout=60), body_of(size))
    if on_disk:
        eventually(lambda: broker.stats().channel("t", "c").backend_depth > 0)
        for size in sizes:
            check(consumer.take(timeout=60), body_of(size))
        assert broker.stats().channel("t", "c").spilled >= len(sizes) // 2
    assert consumer.take(timeout=0) is None
    with pytest.raises(shmq.MessageTooBig):
        producer.publish(bytes(LARGEST + 1))
