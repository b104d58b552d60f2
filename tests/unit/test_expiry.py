"""When the time of a deferred message begins, with the clock in the test's hands."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.in_process_broker import SECOND, Client, World
from support.processes import eventually

from shmq.settings import NONE

DEFER = 1000.0  # seconds


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


def when_due(world: World, queue: int) -> None:
    """Have the queue's deferred messages fall due."""
    later = time.time_ns() + int(2 * DEFER) * SECOND
    assert world.supervisor.expire(queue, realtime=later) == (0, 2)


def bodies_with_a_time_of(
    world: World, client: Client, queue: tuple[int, int], ttl: float
) -> list[bytes]:
    """The channel gets a time to live, which goes by; what can be taken then."""
    world.supervisor.configure(*queue, NONE.changed({"message_ttl": ttl}).to_native())
    over = time.time() + ttl
    eventually(lambda: time.time() > over)
    batch = client.consumer("t", "c").take_many(10, 0)
    found = [message.body for message in batch]
    batch.finish()
    return found


def publish(client: Client) -> None:
    """Two messages, one with a time of its own."""
    producer = client.producer("t")
    producer.publish(b"plain", defer=DEFER)
    producer.publish(b"with a time", defer=DEFER, ttl=10 * DEFER)


def test_a_time_that_comes_later_counts_from_when_a_message_was_due(world: World) -> None:
    queue, client = world.create_channel("t", "c"), world.attach()
    publish(client)
    when_due(world, queue[0])
    assert bodies_with_a_time_of(world, client, queue, 0.001) == [b"plain", b"with a time"]


def test_what_was_due_in_a_backlog_counts_the_time_from_then(world: World) -> None:
    queue, client = world.create_channel("t", "c"), world.attach()
    topic, generation = world.create_topic("t")
    world.supervisor.pause_topic(topic, generation, True)
    publish(client)
    backlog = world.supervisor.find_queue(topic, None)
    assert backlog is not None
    when_due(world, backlog[0])
    world.supervisor.pause_topic(topic, generation, False)
    assert world.supervisor.pump(topic, generation, 10) == 2
    assert bodies_with_a_time_of(world, client, queue, 0.001) == [b"plain", b"with a time"]


def test_the_time_goes_by_after_a_message_was_due(world: World) -> None:
    queue, client = world.create_channel("t", "c"), world.attach()
    client.producer("t").publish_many([b"a", b"b"], defer=0.0005)
    eventually(lambda: world.supervisor.expire(queue[0])[1] == 2)
    assert bodies_with_a_time_of(world, client, queue, 0.001) == []
