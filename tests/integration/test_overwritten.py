"""A queue whose header something overwrites while everything runs: it is replaced, with what it
held; nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import Child, eventually

import shmq
from shmq import layout, shm, sources
from shmq.errors import Gone, LayoutMismatch, ShmqError

COUNT = 30


@pytest.fixture
def broker(
    serve: Callable[..., Child], attach: Callable[[], shmq.Broker], instance: str
) -> Iterator[shmq.Broker]:
    child = serve(queue_scan_refresh_interval="200ms")
    yield attach()
    assert child.process.poll() is None  # the same supervisor all the time
    for path in shm.list_set_aside(instance):
        Path(path).unlink()


def overwrite(instance: str, channel: str) -> None:
    """More slots than there can be."""
    with sources.open_readonly(instance) as source:
        (entry,) = (queue for queue in source.directory.live_queues() if queue.channel == channel)
    fields = layout.dtype("queue").fields
    assert fields is not None
    fd = shm.open_queue(instance, entry.serial)
    with open(fd, "r+b", buffering=0) as segment:
        segment.seek(fields["slots_committed"][1])
        segment.write((0x7FFFFFFF).to_bytes(4, "little"))


def take_all(consumer: shmq.Consumer, count: int) -> set[bytes]:
    came: set[bytes] = set()

    def more() -> bool:
        batch = consumer.take_many(100, 0.1)
        came.update(batch.bodies())
        batch.finish()
        return len(came) >= count

    eventually(more, what=f"{count} messages come")
    return came


def test_a_queue_that_is_overwritten_is_replaced_with_what_it_held(
    broker: shmq.Broker, instance: str
) -> None:
    bodies = [b"%d" % number for number in range(COUNT)]
    held, other = (broker.consumer("t", channel) for channel in "cd")
    producer = broker.producer("t")
    producer.publish_many(bodies[:20])
    assert len(held.take_many(5, 10)) == 5
    producer.publish_many(bodies[20:], defer=0.5)
    overwrite(instance, "c")
    with pytest.raises((LayoutMismatch, Gone)):
        held.take(0)
    (aside,) = eventually(lambda: shm.list_set_aside(instance))
    assert Path(aside).exists()

    def again() -> Any:
        try:
            return broker.consumer("t", "c")
        except ShmqError:  # not yet
            return None

    consumer = eventually(again)
    assert take_all(consumer, COUNT) == set(bodies)
    assert sorted(take_all(other, COUNT)) == sorted(bodies)
    eventually(lambda: producer.publish(b"new", timeout=1))
    assert take_all(consumer, 1) == take_all(other, 1) == {b"new"}
