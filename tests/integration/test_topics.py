"""Topics and channels between processes: taking over, pause, empty, delete, ephemeral ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.deliveries import Background, take_all
from support.processes import Child, eventually, say
from support.recount import recount_all

import shmq
from shmq.errors import Gone

Open = Callable[..., shmq.Broker]
Spawn = Callable[..., Child]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%07d" % i for i in range(start, start + count)]


def topic_names(broker: shmq.Broker) -> list[str]:
    return sorted(topic.name for topic in broker.stats().topics)


def channel_names(broker: shmq.Broker, topic: str) -> list[str | None]:
    (found,) = [entry for entry in broker.stats().topics if entry.name == topic]
    return sorted(channel.name or "" for channel in found.channels)


@pytest.mark.parametrize("count", [10, 3000])
def test_the_first_channel_gets_what_was_published_before_and_later_ones_do_not(
    open_broker: Open, count: int
) -> None:
    broker = open_broker(mem_queue_size=500)  # 3000: most of the backlog is on disk
    producer = broker.producer("t")
    for first in range(0, count, 10):
        producer.publish_many(numbered(10, first))
    broker.create_channel("t", "first")
    broker.create_channel("t", "second")
    producer.publish(b"both")
    assert take_all(broker, "t", "first").bodies == [*numbered(count), b"both"]
    assert take_all(broker, "t", "second").bodies == [b"both"]
    recount_all(broker.instance)


def create_channels(instance, prefix):
    broker = shmq.attach(instance)
    say("ready")
    sys.stdin.readline()  # noqa: F821
    for k in range(20):
        broker.create_channel(f"t{k}", prefix)
        broker.create_channel(f"t{k}", "same")
    say("done")


def test_processes_that_create_the_same_things_at_once_share_them(
    broker: shmq.Broker, child: Spawn
) -> None:
    creators = [child(create_channels, broker.instance, f"c{k}") for k in range(3)]
    for creator in creators:
        creator.said("ready")
    for creator in creators:
        creator.tell()
    for creator in creators:
        creator.succeed()
    assert topic_names(broker) == sorted(f"t{k}" for k in range(20))
    assert channel_names(broker, "t7") == ["c0", "c1", "c2", "same"]
    recount_all(broker.instance)


@pytest.mark.parametrize("count", [10, 2500])
def test_what_came_while_a_topic_was_paused_goes_to_all_channels_in_order(
    open_broker: Open, count: int
) -> None:
    broker = open_broker(mem_queue_size=500)
    broker.create_channel("t", "a")
    producer = broker.producer("t")
    producer.publish(b"before")
    broker.pause_topic("t")
    broker.create_channel("t", "b")
    for first in range(0, count, 10):
        producer.publish_many(numbered(10, first))
    with broker.consumer("t", "b") as consumer:
        assert consumer.take(timeout=0) is None
    assert broker.stats().topics[0].paused
    broker.unpause_topic("t")
    producer.publish(b"after")
    backlog = [*numbered(count), b"after"]
    for channel, expected in (("a", [b"before", *backlog]), ("b", backlog)):
        bodies = take_all(broker, "t", channel).bodies
        eventually(
            lambda: (
                broker.stats().topics[0].backlog is None
                or not broker.stats().topics[0].backlog.depth
            )
        )
        bodies += take_all(broker, "t", channel).bodies
        assert bodies == expected
    recount_all(broker.instance)


def test_a_paused_channel_hands_out_nothing_and_wakes_its_waiters_when_it_goes_on(
    broker: shmq.Broker, keep: Any
) -> None:
    broker.create_channel("t", "c")
    broker.pause_channel("t", "c")
    broker.producer("t").publish(b"x")
    consumer = keep(broker.consumer("t", "c"))
    waiting = keep(Background(lambda: consumer.take(timeout=30)))
    assert not waiting.wait(0.2)
    broker.unpause_channel("t", "c")
    message = waiting.result()
    assert isinstance(message, shmq.Message)
    message.finish()


def test_an_emptied_channel_is_empty_in_memory_on_disk_and_in_flight(open_broker: Open) -> None:
    broker = open_broker(mem_queue_size=300)
    consumer = broker.consumer("t", "c")
    producer = broker.producer("t")
    for first in range(0, 2000, 50):
        producer.publish_many(numbered(50, first))
    held = consumer.take_many(10, timeout=10)
    producer.publish(b"deferred", defer=60)
    assert broker.empty_channel("t", "c") == 2001
    with pytest.raises(shmq.NotInFlight):
        held.finish()
    producer.publish(b"next")
    message = consumer.take(timeout=30)
    assert message is not None
    assert message.body == b"next"
    message.finish()
    recount_all(broker.instance)


def take_until_gone(instance):
    consumer = shmq.attach(instance).consumer("t", "c")
    say("waits")
    try:
        consumer.take()
    except shmq.Gone as exc:
        say("gone", exc)
    try:
        consumer.take()
    except shmq.Gone:
        say("still")


@pytest.mark.parametrize("what", ["channel", "topic"])
def test_who_waits_on_something_deleted_hears_of_it(
    broker: shmq.Broker, child: Spawn, what: str
) -> None:
    broker.create_channel("t", "c")
    waiters = [child(take_until_gone, broker.instance) for _ in range(2)]
    for waiter in waiters:
        waiter.said("waits")
    producer = broker.producer("t")
    if what == "topic":
        broker.delete_topic("t")
        with pytest.raises(Gone):
            producer.publish(b"x")
        assert topic_names(broker) == []
    else:
        broker.delete_channel("t", "c")
        assert channel_names(broker, "t") == []
    for waiter in waiters:
        assert waiter.succeed()[-1] == "still"
    broker.create_channel("t", "c")
    broker.producer("t").publish(b"anew")
    assert take_all(broker, "t", "c").bodies == [b"anew"]


def consume_ephemeral(instance):
    consumer = shmq.attach(instance).consumer("t", "c#ephemeral")
    say("ready")
    sys.stdin.readline()  # noqa: F821
    consumer.close()
    say("closed")
    sys.stdin.readline()  # noqa: F821


@pytest.mark.parametrize("end", ["close", "kill"])
def test_an_ephemeral_channel_goes_with_its_last_consumer(
    broker: shmq.Broker, child: Spawn, end: str
) -> None:
    one, two = (child(consume_ephemeral, broker.instance) for _ in range(2))
    one.said("ready")
    two.said("ready")
    one.kill()
    assert channel_names(broker, "t") == ["c#ephemeral"]
    if end == "kill":
        two.kill()
    else:
        two.tell()
        two.said("closed")
    eventually(lambda: channel_names(broker, "t") == [])
    broker.producer("t").publish(b"x")  # to the topic's backlog


def open_and_close(instance, kind, count):
    with shmq.attach(instance) as broker:
        say("ready")
        sys.stdin.readline()  # noqa: F821
        for _ in range(count):
            if kind == "consumer":
                broker.consumer("t#ephemeral", "c#ephemeral").close()
            elif kind == "holder":
                broker.lease_holder("t#ephemeral", "c#ephemeral", "l").close()
            else:
                broker.producer("t#ephemeral").close()
    say("done")


def test_opening_never_finds_an_ephemeral_channel_gone(broker: shmq.Broker, child: Spawn) -> None:
    """Each call makes what it lacks, also while the last consumer's leaving deletes it; one that
    was opened has a channel that stays."""
    kinds = [("consumer", 20_000)] * 3 + [("holder", 5000), ("producer", 5000)]
    openers = [child(open_and_close, broker.instance, *kind) for kind in kinds]
    for opener in openers:
        opener.said("ready")
    for opener in openers:
        opener.tell()
    for _ in range(5000):
        with broker.consumer("t#ephemeral", "c#ephemeral") as consumer:
            assert consumer.take(timeout=0) is None  # Gone, if it was deleted under it
    for opener in openers:
        opener.succeed()


def test_a_full_ephemeral_channel_drops_and_makes_nobody_wait(open_broker: Open) -> None:
    broker = open_broker(mem_queue_size=256)
    consumer = broker.consumer("t", "c#ephemeral")
    broker.create_channel("t", "whole")
    producer = broker.producer("t")
    for body in numbered(1000):
        producer.publish(body, timeout=30)
    batch = consumer.take_many(200, timeout=10)
    assert batch.bodies() == numbered(200)
    assert take_all(broker, "t", "whole").bodies == numbered(1000)
    (topic,) = broker.stats().topics
    dropped = {channel.name: channel.dropped for channel in topic.channels}
    assert dropped["whole"] == 0
    assert dropped["c#ephemeral"] > 0


def compete(instance, count):
    consumer = shmq.attach(instance).consumer("t", "c", max_in_flight=10)
    say("ready")
    while (message := consumer.take(timeout=20)) and message.body != b"end":
        say(message.body.decode())
        message.finish()
    if message:
        message.finish()


def test_consumers_of_one_channel_share_its_messages_each_goes_to_one(
    broker: shmq.Broker, child: Spawn
) -> None:
    consumers = [child(compete, broker.instance, 0) for _ in range(3)]
    for consumer in consumers:
        consumer.said("ready")
    producer = broker.producer("t")
    for body in numbered(3000):
        producer.publish(body)
    for _ in consumers:
        producer.publish(b"end")
    came = [consumer.succeed()[1:] for consumer in consumers]
    assert sorted(body.encode() for lines in came for body in lines) == numbered(3000)
    for lines in came:
        assert lines == sorted(lines)
