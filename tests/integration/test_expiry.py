"""Messages with a time to live: never delivered after it, and gone soon, wherever they wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import eventually

import shmq

Open = Callable[..., shmq.Broker]


def expiring(
    broker: shmq.Broker, topic: str = "t", **settings: Any
) -> tuple[shmq.Producer, shmq.Consumer]:
    broker.configure(topic, "c", **settings)
    return broker.producer(topic), broker.consumer(topic, "c")


def counts(broker: shmq.Broker) -> tuple[int, int]:
    found = broker.channel_stats("t", "c")
    return found.depth, found.expired


def wait_until(moment: float) -> None:
    eventually(lambda: time.time() > moment)


def test_expired_messages_go_from_between_others(open_broker: Open) -> None:
    producer, consumer = expiring(broker := open_broker())
    for i in range(10):
        producer.publish(b"%d" % i, ttl=0.05 if i % 2 else None)
    producer.publish_many([b"long"] * 3, ttl=1000)
    producer.publish(bytes(200_000), ttl=0.05)  # copied outside the lock
    eventually(lambda: counts(broker) == (8, 6))
    found = [m.body for m in consumer.take_many(100, timeout=5)]
    assert found == [b"0", b"2", b"4", b"6", b"8", *[b"long"] * 3]


def test_no_take_returns_an_expired_message(open_broker: Open) -> None:
    producer, consumer = expiring(broker := open_broker())
    for round in range(20):
        producer.publish(b"over", ttl=0.001)
        producer.publish(b"%d" % round)
        wait_until(time.time() + 0.001)
        message = consumer.take(timeout=5)
        assert message is not None
        assert message.body == b"%d" % round
        message.finish()
    assert broker.channel_stats("t", "c").expired == 20


def test_more_expired_messages_than_a_take_drops_at_once(open_broker: Open) -> None:
    producer, consumer = expiring(broker := open_broker())
    producer.publish_many([b"over"] * 5000, ttl=0.001)
    producer.publish(b"last")
    wait_until(time.time() + 0.001)
    message = consumer.take(timeout=0)
    assert message is not None
    assert message.body == b"last"
    assert counts(broker) == (0, 5000)


def test_what_is_redriven_begins_a_new_life(open_broker: Open) -> None:
    """One that expired has the channel's time again, and none of its own."""
    producer, consumer = expiring(broker := open_broker(), message_ttl=0.3, expired_to_dead=True)
    for body, ttl in ((b"by the channel", None), (b"by itself", 0.05)):
        producer.publish(body, ttl=ttl)
    first = time.time_ns()
    dead = broker.dead("t", "c")
    eventually(lambda: len(dead.peek(reason="expired")) == 2)
    wait_until(time.time() + 0.3)
    old = {letter.body: letter for letter in dead.peek()}
    broker.configure("t", "c", message_ttl=1000)
    before = time.time_ns()
    assert dead.redrive() == 2
    after = time.time_ns()
    for _ in range(2):
        message = consumer.take(5)
        assert message is not None
        assert message.id == old[message.body].id
        assert old[message.body].timestamp <= first < before <= message.timestamp <= after
        assert dict(message.properties) == {}
        message.requeue(failed=False)
    broker.configure("t", "c", message_ttl=0.3)
    eventually(lambda: len(dead.peek(reason="expired")) == 2, what="their new lives end, too")


def test_a_short_life_begins_when_it_is_redriven(open_broker: Open) -> None:
    producer, consumer = expiring(broker := open_broker(), message_ttl=2, expired_to_dead=True)
    producer.publish(b"x", ttl=0.01)
    dead = broker.dead("t", "c")
    eventually(lambda: dead.depth == 1)
    (letter,) = dead.peek()
    wait_until(letter.timestamp / 1e9 + 2)
    for _ in range(5):  # on a machine that stood still for two seconds it has expired again
        assert dead.redrive() == 1
        message = consumer.take(0)
        if message is not None:
            break
        eventually(lambda: dead.depth == 1)
    assert message is not None
    assert (message.body, message.id) == (b"x", letter.id)


def test_the_lower_time_to_live_counts(open_broker: Open) -> None:
    producer, _ = expiring(broker := open_broker(), message_ttl=0.05)
    broker.create_channel("t", "without")
    producer.publish(b"a", ttl=1000)
    producer.publish(b"b")
    eventually(lambda: counts(broker) == (0, 2))
    assert broker.channel_depth("t", "without") == 2
    broker.configure("t", "c", message_ttl=1000)
    producer.publish(b"c", ttl=0.05)
    eventually(lambda: counts(broker) == (0, 3))
    eventually(lambda: broker.channel_depth("t", "without") == 2)


def test_a_message_in_flight_may_be_finished_but_does_not_come_back(open_broker: Open) -> None:
    producer, consumer = expiring(broker := open_broker(), message_ttl=0.2)
    producer.publish_many([b"finished", b"requeued", b"later"])
    first, second, third = consumer.take_many(3, timeout=5)
    wait_until(time.time() + 0.2)
    first.finish()
    second.requeue()
    third.requeue(1000)
    eventually(lambda: broker.channel_stats("t", "c").expired == 2)
    assert consumer.take(timeout=0) is None
    assert broker.channel_stats("t", "c").deferred == 0


def test_a_deferred_message_lives_from_when_it_is_due(open_broker: Open) -> None:
    producer, consumer = expiring(open_broker(), message_ttl=0.3)
    producer.publish(b"both", defer=0.5, ttl=1000)
    producer.publish(b"channel's", defer=0.5)
    broker_time = time.time()
    found = [consumer.take(timeout=5), consumer.take(timeout=5)]
    assert {m.body for m in found if m is not None} == {b"both", b"channel's"}
    assert time.time() >= broker_time + 0.4
    for message in found:
        assert message is not None
        message.requeue()
    wait_until(time.time() + 0.3)
    assert consumer.take(timeout=0) is None


def test_what_expired_on_disk_is_not_delivered(open_broker: Open) -> None:
    broker = open_broker(mem_queue_size=300)
    producer, consumer = expiring(broker)
    for i in range(2000):
        producer.publish(b"%d" % i)
    eventually(lambda: broker.channel_stats("t", "c").backend_depth > 0)
    broker.configure("t", "c", message_ttl=0.001)
    assert consumer.take(timeout=0.2) is None
    eventually(lambda: counts(broker) == (0, 2000))


def test_the_time_to_live_goes_on_over_a_restart(tmp_path: Path, instance: str) -> None:
    with shmq.Broker(tmp_path, instance=instance) as broker:
        producer, _ = expiring(broker, message_ttl=0.5)
        producer.publish_many([b"x"] * 10)
    wait_until(time.time() + 0.5)
    with shmq.Broker(tmp_path, instance=instance) as broker:
        assert broker.consumer("t", "c").take(timeout=0.1) is None
        eventually(lambda: counts(broker) == (0, 10))


def test_a_lease_leaves_expired_messages_out(open_broker: Open) -> None:
    broker = open_broker()
    producer, _ = expiring(broker)
    producer.publish_many([b"over"] * 3, ttl=0.001)
    producer.publish_many([b"a", b"b"])
    wait_until(time.time() + 0.001)
    with broker.lease_holder("t", "c", "reader") as holder:
        lease = holder.lease(10)
        assert lease is not None
        assert lease.count == 2
        bodies = [body for batch in holder.read_lease(lease.id) for body in batch.bodies()]
    assert [bytes(body) for body in bodies] == [b"a", b"b"]


def test_a_backlog_hands_the_time_to_live_on(open_broker: Open) -> None:
    broker = open_broker()
    producer = broker.producer("t")
    broker.pause_topic("t")
    producer.publish_many([b"x"] * 3, ttl=0.5)
    producer.publish(b"y")
    broker.create_channel("t", "c")
    broker.create_channel("t", "d")
    broker.unpause_topic("t")
    eventually(lambda: broker.channel_depth("t", "d") + broker.channel_stats("t", "d").expired == 4)
    eventually(lambda: counts(broker)[0] == 1 == broker.channel_depth("t", "d"))


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), "soon"])
def test_a_time_to_live_that_makes_no_sense_is_refused(open_broker: Open, ttl: Any) -> None:
    producer = open_broker().producer("t")
    with pytest.raises((ValueError, TypeError), match="ttl"):
        producer.publish(b"x", ttl=ttl)
    with pytest.raises((ValueError, TypeError), match="ttl"):
        producer.publish_many([b"x"], ttl=ttl)
