"""The messages that wait in a channel with a limit: those that came back count, those that are gone
do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.in_process_broker import World

from shmq import Full
from shmq.client import Consumer, Producer
from shmq.settings import Settings


@pytest.fixture
def ends() -> Iterator[tuple[Producer, Consumer]]:
    """Of a channel in which 20 messages may wait."""
    with World() as world:
        client = world.attach()
        queue, serial = world.create_queue("t", "c")
        settings = Settings(max_messages=20, overflow="block")
        world.supervisor.configure(queue, serial, settings.to_native())
        yield client.producer("t"), client.consumer("t", "c")


def test_messages_that_were_taken_leave_their_room_to_others(
    ends: tuple[Producer, Consumer],
) -> None:
    producer, consumer = ends
    producer.publish_many([b"x"] * 15, timeout=0)
    for number, message in enumerate(consumer.take_many(15, 0)):
        message.requeue(failed=False) if number < 4 else message.finish()
    for count in (2, 14):  # and 4 that came back
        producer.publish_many([b"y"] * count, timeout=0)
    with pytest.raises(Full, match="max_messages is 20"):
        producer.publish(b"z", timeout=0)
