"""Faults that the state machine (tests/unit/model) has found, each as a small test."""

from __future__ import annotations

import pytest
from support.in_process_broker import World

from shmq import Full


def test_a_batch_that_finds_no_room_leaves_its_memory_to_others() -> None:
    """Free slots kept the bodies of a refused batch, and an idle queue was full for ever."""
    with World() as world:
        client = world.attach()
        producer, consumer = client.producer("t"), client.consumer("t", "c")
        producer.publish(b"x" * 100_000)
        held = consumer.take(0)
        with pytest.raises(Full):
            producer.publish_many([b"y" * 1700] * 100, timeout=0)
        held.finish()
        producer.publish(b"z" * 150_000, timeout=0)
        assert len(consumer.take(0)) == 150_000


def test_messages_on_their_way_to_disk_count_once() -> None:
    """The publisher counted them as ready, too, and was refused with room for hundreds."""
    with World() as world:
        client = world.attach()
        producer, consumer = client.producer("t"), client.consumer("t", "c")
        queue = world.supervisor.find_queue(0, "c")[0]
        producer.publish_many([b"x"] * 200)
        spill = world.supervisor.spill_begin(queue, 150, 1 << 20)
        producer.publish_many([b"y"] * 50, timeout=0)
        assert spill.end(0, False)
        assert consumer.take_many(500, 0).bodies() == [b"x"] * 16


def test_a_client_can_leave_after_a_queue_it_used_was_replaced() -> None:
    """It was asked to map the queue that has the old one's place, and stayed attached."""
    with World() as world:
        client, other = world.attach(), world.attach()
        client.producer("t")
        client.consumer("t", "old")
        world.remove_queue(*world.supervisor.find_queue(0, "old"))
        assert world.create_channel("t", "new")[0] == 0
        client.close()
        assert world.reap() == {}
        other.consumer("t", "new")


def test_who_waits_is_woken_when_the_queue_was_emptied_amid_a_spill() -> None:
    """While a batch is written only the requeue ring is served; its end makes the rest takeable."""
    with World() as world:
        client = world.attach()
        producer, consumer = client.producer("t"), client.consumer("t", "c")
        queue, serial = world.supervisor.find_queue(0, "c")
        producer.publish_many([b"x"] * 10)
        spill = world.supervisor.spill_begin(queue, 5, 1 << 20)
        assert world.supervisor.empty(queue, serial) == 10
        producer.publish(b"new")
        assert consumer.take(0) is None
        assert not spill.end(0, True)
        assert consumer.take(0).body == b"new"


def test_an_emptied_batch_is_not_counted_on_disk() -> None:
    with World() as world:
        client = world.attach()
        client.consumer("t", "c")
        client.producer("t").publish_many([b"x"] * 10)
        queue, serial = world.supervisor.find_queue(0, "c")
        spill = world.supervisor.spill_begin(queue, 5, 1 << 20)
        world.supervisor.empty(queue, serial)
        assert not spill.end(500, True)
        view = world.queue_view(queue)
        assert view.read("disk_depth") == view.read("disk_write") == 0
